"""The report of the prefix cache: a small scripted run, segment by segment; sums; nothing is changed."""

import logging
import random
from dataclasses import MISSING, fields

import pytest

from minivllm_engine import LLM, EngineConfig, SamplingParams
from minivllm_engine.cache.block_manager import BlockManager
from minivllm_engine.cache.deltanet_state import DeltaNetStateManager
from minivllm_engine.cache.prefix_cache import PrefixCache
from minivllm_engine.cache.report import CacheReport, CacheSegment, cache_report
from minivllm_engine.core.request import Request
from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.core.stats import EngineStats
from minivllm_engine.engine.prepare import prepare

VOCAB = 320
REQUIRED = [f.name for f in fields(EngineStats) if f.default is f.default_factory is MISSING]
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def engine(model, **cache) -> LLM:
    options = {"max_num_seqs": 4, "max_model_len": 1024, "cpu_memory": "32MiB"}
    return LLM(model, engine=options, cache={"block_size": 16, "num_blocks": 200, **cache})


def shown(segment: CacheSegment) -> tuple:
    return (
        *(segment.id, segment.parent, segment.start, segment.end, segment.blocks),
        *(segment.hits, segment.recomputed, segment.refs, segment.snapshot, segment.age),
    )


def check_tree(report: CacheReport, llm: LLM) -> None:
    """Whatever the run: segments are disjoint, hang together, and hold all that is cached."""
    ends = {0: 0}
    for segment in report.segments:
        assert segment.parent in ends, "parents come before children"
        assert segment.start == ends[segment.parent]
        assert len(segment.token_ids) == segment.end - segment.start > 0
        assert segment.snapshot in (None, segment.end)
        ends[segment.id] = segment.end
    assert sum(s.blocks for s in report.segments) == report.stats.blocks_cached
    assert sum(s.snapshot is not None for s in report.segments) == report.stats.snapshots_used
    nodes = {node.hash.hex(): node for node in llm._cache.walk()}
    assert all(nodes[s.hash].end == s.end for s in report.segments)


def test_a_scripted_run_segment_by_segment(tiny_model) -> None:
    system = ids(1, 200)
    first, second, third = (system + ids(10 + i, 60) for i in range(3))
    with engine(tiny_model) as llm:
        llm.generate([first], GREEDY)
        # The last boundary before token 260 is 256: one snapshot; 260 tokens fill 16 blocks.
        assert [shown(s) for s in llm.cache_report().segments] == [
            (1, 0, 0, 256, 16, 0, 0, 0, 256, 0)
        ]
        llm.generate([second], GREEDY)
        # 12 blocks are the same, and no state lies there: they were computed again, once.
        assert [shown(s) for s in llm.cache_report().segments] == [
            (1, 0, 0, 192, 12, 1, 1, 0, 192, 0),
            (2, 1, 192, 256, 4, 0, 0, 0, 256, 1),
            (3, 1, 192, 256, 4, 0, 0, 0, 256, 0),
        ]
        llm.generate([third, second], GREEDY)
        report = llm.cache_report()
        assert [shown(s) for s in report.segments] == [
            (1, 0, 0, 192, 12, 3, 1, 0, 192, 0),
            (2, 1, 192, 256, 4, 0, 0, 0, 256, 3),
            (3, 1, 192, 256, 4, 1, 0, 0, 256, 0),
            (4, 1, 192, 256, 4, 0, 0, 0, 256, 0),
        ]
        check_tree(report, llm)
        assert report.segments[0].token_ids == tuple(system[:192])
        assert report.segments[0].recomputed_tokens == 192
        assert report.requests == 4
        assert report.stats.misses == {"new_prefix": 2, "no_snapshot": 1}
        assert (report.stats.cached_tokens, report.stats.kv_matched_tokens) == (448, 640)


def test_a_running_request_holds_what_it_uses(tiny_model) -> None:
    with engine(tiny_model) as llm:
        llm.generate([ids(1, 130)], GREEDY)
        for tail in (2, 3):
            llm.add_request(ids(1, 130) + ids(tail, 70), GREEDY)
        llm.step()
        held = {(s.start, s.end): s.refs for s in llm.cache_report().segments}
        assert held[0, 128] == 2
        while llm.has_unfinished:
            llm.step()
        assert {s.refs for s in llm.cache_report().segments} == {0}


def test_a_dropped_snapshot_leaves_kv_whose_cost_is_counted(tiny_model) -> None:
    with engine(tiny_model) as llm:
        llm.generate([ids(1, 130)], GREEDY)
        (node,) = [n for n in llm._cache.walk() if n.snapshot is not None]
        llm._cache._tree.evict_snapshot(node)
        (before,) = llm.cache_report().segments
        assert (before.snapshot, before.hits, before.recomputed) == (None, 0, 0)
        llm.generate([ids(1, 130)], GREEDY)
        (after,) = llm.cache_report().segments
        assert (after.snapshot, after.hits, after.recomputed_tokens) == (128, 1, 128)
        assert llm.stats().misses == {"new_prefix": 1, "evicted": 1}


def test_c14_random_runs_add_up(tiny_model) -> None:
    rng, usages = random.Random(3), []
    with engine(tiny_model, snapshot_memory="60KiB", num_blocks=400) as llm:
        for round_ in range(6):
            base = ids(rng.randrange(3), 200)
            prompts = [base[: rng.randint(1, 200)] + ids(100 * round_ + i, 20) for i in range(5)]
            usages += [out.usage for out in llm.generate(prompts, GREEDY)]
            before = llm.stats()
            report = llm.cache_report()
            check_tree(report, llm)
            llm.check_integrity()
            assert report.stats == before == llm.stats(), "looking changes nothing"
        assert llm.stats().blocks_evicted == llm.stats().num_preemptions == 0
        assert report.requests == len(usages)
        assert report.stats.prompt_tokens == sum(u.prompt_tokens for u in usages)
        # No block was given up: what was found in vain is all still there.
        wasted = sum(u.kv_matched - u.cached_tokens for u in usages)
        assert sum(s.recomputed_tokens for s in report.segments) == wasted > 0


def test_the_order_of_use_is_kept(tiny_model) -> None:
    with engine(tiny_model) as llm:
        for seed in (1, 2, 3, 1):
            llm.generate([ids(seed, 70)], GREEDY)
        segments = llm.cache_report().segments
        assert [s.token_ids[0] for s in segments] == [ids(seed, 1)[0] for seed in (1, 2, 3)]
        assert [s.age for s in segments] == [0, 2, 1]


def test_a_long_prompt_needs_no_recursion() -> None:
    count = 5_000
    cache = PrefixCache(BlockManager(count + 1, 64), DeltaNetStateManager(1, count))
    request = Request("r", tuple(range(64 * count + 1)), ResolvedSampling(seed=0), 0)
    cache.start_from(request, cache.match(request))
    request.block_table = cache.allocate(count + 1)
    for end in range(64, 64 * count + 1, 64):
        cache.commit(request, end, cache.reserve_snapshot(request, end))
    stats = EngineStats(**dict.fromkeys(REQUIRED, 0))
    assert len(cache_report(cache, stats).segments) == count


def test_f5_allocated_bytes_are_those_of_the_plan(tiny_model) -> None:
    with engine(tiny_model) as llm:
        allocated = llm.allocated_bytes()
        planned = {row.name: row.num_bytes for row in llm._plan.rows(from_headers=True)}
        assert set(allocated) == {"weights", "state slots", "snapshots", "KV blocks"}
        for name, size in allocated.items():
            assert size == pytest.approx(planned[name], rel=0.01)


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        ({}, "the shortest prefix that can hit has 64 tokens"),
        ({"block_size": 96}, "the shortest prefix that can hit has 192 tokens"),
        ({"prefix_cache": False}, "prefix cache: off"),
        ({"snapshot_memory": 0}, "no prefix can hit"),
        ({"num_blocks": 1, "snapshot_memory": 0}, "0 state snapshots, 1 KV block of 64 tokens"),
    ],
)
def test_c2_the_shortest_reusable_prefix_is_said_at_the_start(
    tiny_model, caplog, monkeypatch, cache, said
) -> None:
    logger = logging.getLogger("minivllm_engine")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO, logger="minivllm_engine"):
        prepare(tiny_model, EngineConfig.create(engine={"cpu_memory": "32MiB"}, cache=cache))
    (line,) = [r.getMessage() for r in caplog.records if "prefix cache:" in r.getMessage()]
    assert said in line
