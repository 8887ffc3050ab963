"""The prefix cache as a structure: integers only, no model. Group letters are those of known failures."""

import random

import pytest

from minivllm_engine.cache.block_manager import BlockManager
from minivllm_engine.cache.deltanet_state import DeltaNetStateManager, SnapshotTag
from minivllm_engine.cache.prefix_cache import PrefixCache
from minivllm_engine.core.request import Request
from minivllm_engine.core.sampling_params import ResolvedSampling

GRID = 64


def make_cache(
    *, blocks: int = 64, block_size: int = 16, slots: int = 64, snapshots: int = 8
) -> PrefixCache:
    return PrefixCache(
        BlockManager(blocks, block_size), DeltaNetStateManager(slots, snapshots), model_id="m"
    )


def make_request(ids: list[int], *, answer_at: int | None = None, **values: object) -> Request:
    params = ResolvedSampling(seed=0, **values)
    return Request("r", tuple(ids), params, 0, max_total_tokens=4096, answer_at=answer_at)


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


def start(cache: PrefixCache, request: Request) -> int | None:
    match = cache.match(request)
    request.slot = cache.states.allocate()
    return cache.start_from(request, match)


def compute(cache: PrefixCache, request: Request, end: int, *, snapshot: bool = True) -> bool:
    """The request computes up to `end`. Was a snapshot taken there?"""
    missing = cache.blocks.blocks_for(end) - len(request.block_table)
    request.block_table += cache.allocate(missing)
    reserved = cache.reserve_snapshot(request, end) if snapshot else None
    request.num_computed_tokens = end
    cache.commit(request, end, reserved)
    return reserved is not None


def finish(cache: PrefixCache, request: Request) -> None:
    cache.blocks.release(request.block_table)
    cache.states.release(request.slot)
    request.block_table, request.slot, request.num_kept_blocks = [], None, 0


def run(cache: PrefixCache, request: Request) -> int:
    """From start to end, with a snapshot wherever the cache wants one. Returns where it started."""
    start(cache, request)
    began = request.num_computed_tokens
    for end in [*request.boundaries, request.num_tokens]:
        compute(cache, request, end, snapshot=end in request.boundaries)
    finish(cache, request)
    cache.check_integrity([])
    return began


def found(cache: PrefixCache, ids: list[int]) -> tuple[int, int, str | None]:
    use = cache.match(make_request(ids)).use
    return use.cached_tokens, use.kv_matched, use.miss_reason


def test_a_repeat_starts_at_the_last_boundary_before_its_last_token() -> None:
    for length in (65, 66, 127, 128, 129, 200, 256, 257):
        cache = make_cache()
        assert run(cache, make_request(tokens(length))) == 0
        assert run(cache, make_request(tokens(length))) == (length - 1) // GRID * GRID
        assert found(cache, tokens(length))[2] is None


def test_kv_alone_is_never_used() -> None:
    cache = make_cache()
    request = make_request(tokens(200))
    start(cache, request)
    for end in (64, 128, 192, 200):
        compute(cache, request, end, snapshot=False)
    finish(cache, request)
    assert found(cache, tokens(200)) == (0, 192, "no_snapshot")


def test_b18_a_shorter_hit_is_asked_for_again_not_cut() -> None:
    cache = make_cache(block_size=64)
    request = make_request(tokens(300))
    start(cache, request)
    for end in (64, 128, 192, 256):
        assert compute(cache, request, end, snapshot=end in (64, 192)) == (end in (64, 192))
    finish(cache, request)
    assert found(cache, tokens(300)) == (192, 256, "no_snapshot")
    deep = next(n for n in cache.walk() if n.end == 192)
    assert deep.snapshot is not None
    cache._tree.evict_snapshot(deep)
    cache.check_integrity([])
    assert found(cache, tokens(300)) == (64, 256, "evicted")


def test_a_block_counts_only_behind_the_same_beginning() -> None:
    cache = make_cache()
    same = tokens(140, seed=9)
    run(cache, make_request(tokens(64, seed=1) + same))
    assert found(cache, tokens(64, seed=2) + same) == (0, 0, "new_prefix")
    assert found(cache, same)[1] == 0


def test_b11_prompts_shorter_than_a_block_leave_no_entry() -> None:
    cache = make_cache(block_size=64)
    for length in (1, 2, 63):
        run(cache, make_request(tokens(length)))
        assert cache.num_nodes == 0
        assert found(cache, tokens(length))[2] == "below_granularity"
    assert run(cache, make_request(tokens(130))) == 0
    assert sorted(node.end for node in cache.walk()) == [64, 128]


def test_b15_b16_a_prompt_with_another_end_starts_where_a_state_is() -> None:
    cache = make_cache()
    run(cache, make_request(tokens(200)))
    for cut in (1, 5, 8, 9, 17, 72, 73):
        other = tokens(200)[: 200 - cut] + tokens(10, seed=cut)
        cached, matched, _ = found(cache, other)
        assert cached <= 200 - cut and cached <= matched
        assert cached in {node.end for node in cache.walk() if node.snapshot is not None} | {0}


def test_c3_the_third_prompt_with_one_beginning_starts_behind_it() -> None:
    cache = make_cache(blocks=200)
    system = tokens(200)
    starts = [run(cache, make_request(system + tokens(100, seed=i))) for i in range(1, 6)]
    assert starts == [0, 0, 192, 192, 192]


def test_c5_the_same_prompt_twice_is_a_hit() -> None:
    cache = make_cache()
    run(cache, make_request(tokens(65)))
    assert found(cache, tokens(65))[0] == 64


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 80, 128])
def test_snapshots_lie_on_the_grid_of_blocks_and_chunks(block_size: int) -> None:
    cache = make_cache(block_size=block_size, blocks=100)
    assert cache.interval % block_size == 0 and cache.interval % 64 == 0
    length = 2 * cache.interval + 5
    run(cache, make_request(tokens(length)))
    assert found(cache, tokens(length))[0] == 2 * cache.interval


def test_in_a_chat_there_is_a_snapshot_before_the_answer_opens() -> None:
    cache = make_cache()
    ids = tokens(130)
    run(cache, make_request(ids, answer_at=127))
    # The next turn tells the end of this prompt otherwise, and goes on.
    other = [*ids[:127], *tokens(60, seed=1)]
    assert found(cache, other)[0] == 64
    assert found(cache, ids)[0] == 128


def test_a_long_prompt_gets_a_sparse_grid_and_not_more() -> None:
    cache = make_cache(blocks=600, block_size=64, snapshots=100)
    run(cache, make_request(tokens(32_000)))
    ends = sorted(node.end for node in cache.walk() if node.snapshot is not None)
    assert 8 <= len(ends) <= 10 and ends[-1] == 31_936
    assert found(cache, tokens(32_000)[:20_000] + [1] * 500)[0] >= 16_000


def test_c12_snapshots_never_exceed_their_number() -> None:
    cache = make_cache(blocks=400, snapshots=3)
    for i in range(40):
        run(cache, make_request(tokens(100 + i, seed=i)))
        assert cache.states.num_stored <= 3
    assert cache.states.num_evicted > 0
    cache.clear()
    assert cache.states.num_stored == 0 and cache.num_nodes == 0
    assert cache.blocks.num_free == cache.blocks.num_blocks
    run(cache, make_request(tokens(200)))
    assert cache.states.num_stored <= 3
    cache.check_integrity([])


def test_c7_many_conversations_keep_their_hits_with_few_snapshots() -> None:
    # Three snapshots a conversation, and strangers that are never seen again. Were all snapshots on the way
    # refreshed, and not only the one that is used, a third of these turns would hit.
    cache = make_cache(blocks=3000, snapshots=36)
    chats = {i: tokens(70, seed=i) for i in range(12)}
    hits = total = 0
    for turn in range(10):
        for i in chats:
            earlier = len(chats[i])
            chats[i] = chats[i] + tokens(64, seed=1000 * turn + i)
            began = run(cache, make_request(chats[i]))
            total += turn > 0
            hits += began >= earlier - GRID
        for stranger in range(2):
            run(cache, make_request(tokens(300, seed=77_000 + 100 * turn + stranger)))
    assert hits / total >= 0.8


def test_c7_only_the_snapshot_that_was_used_is_refreshed() -> None:
    cache = make_cache(snapshots=3)
    run(cache, make_request(tokens(70)))
    run(cache, make_request(tokens(140)))
    run(cache, make_request(tokens(70, seed=1)))
    run(cache, make_request(tokens(140)))  # uses the deeper one of two on its way
    run(cache, make_request(tokens(70, seed=2)))
    assert found(cache, tokens(140)) == (128, 128, None)
    assert found(cache, tokens(100)) == (0, 96, "evicted")
    assert found(cache, tokens(70, seed=1))[0] == 64


def test_one_long_prompt_does_not_evict_everyone_else() -> None:
    cache = make_cache(blocks=1200, block_size=64, snapshots=16)
    others = [tokens(200, seed=i) for i in range(12)]
    for _ in range(2):
        for ids in others:
            run(cache, make_request(ids))
    run(cache, make_request(tokens(32_000, seed=99)))
    assert sum(found(cache, ids)[0] > 0 for ids in others) >= 6


def test_a_block_that_goes_takes_what_builds_on_it() -> None:
    cache = make_cache(blocks=16, snapshots=8)
    run(cache, make_request(tokens(200), answer_at=70))
    assert found(cache, tokens(200))[0] == 192
    run(cache, make_request(tokens(100, seed=1)))
    assert found(cache, tokens(200))[0] == 64
    run(cache, make_request(tokens(250, seed=2)))
    assert found(cache, tokens(200)) == (0, 0, "evicted")
    assert cache.states.num_stored == len([n for n in cache.walk() if n.snapshot is not None])


def test_a_held_prefix_is_not_evicted() -> None:
    cache = make_cache(blocks=16)
    run(cache, make_request(tokens(130)))
    request = make_request(tokens(130))
    start(cache, request)
    cache.allocate(cache.blocks.num_available)
    assert [cache.blocks.is_idle(block) for block in request.block_table] == [False] * 8
    assert found(cache, tokens(130))[0] == 128


def test_snapshot_tags_are_checked_when_used() -> None:
    states = DeltaNetStateManager(1, 2)
    snapshot = states.reserve_snapshot()
    states.store_snapshot(snapshot, SnapshotTag("m", 64, b"abc"), 64)
    states.use_snapshot(snapshot, SnapshotTag("m", 64, b"abc"))
    for wrong in (
        SnapshotTag("other", 64, b"abc"),
        SnapshotTag("m", 128, b"abc"),
        SnapshotTag("m", 64, b"abd"),
    ):
        with pytest.raises(AssertionError, match="wanted"):
            states.use_snapshot(snapshot, wrong)


def test_eviction_weighs_recency_and_work() -> None:
    states = DeltaNetStateManager(1, 3)

    def store(name: bytes, saved: int) -> int:
        snapshot = states.reserve_snapshot()
        states.store_snapshot(snapshot, SnapshotTag("m", saved, name), saved)
        return snapshot

    small, large = store(b"small", 64), store(b"large", 4096)
    recent = store(b"recent", 64)
    assert states.cheapest_snapshot() == small, "of two that save as much, the older"
    states.use_snapshot(small, SnapshotTag("m", 64, b"small"))
    assert states.cheapest_snapshot() == recent
    for i in range(100):  # but what saves much does not stay for ever
        states.evict_snapshot(states.cheapest_snapshot())
        if large not in states._stored:
            break
        store(str(i).encode(), 64)
    assert 5 < i < 50


def test_two_requests_that_compute_the_same_share_one_copy() -> None:
    cache = make_cache()
    first, second = make_request(tokens(100)), make_request(tokens(100))
    start(cache, first)
    start(cache, second)
    for end in (64, 100):
        compute(cache, first, end, snapshot=end == 64)
        compute(cache, second, end, snapshot=end == 64)
        cache.check_integrity([first, second])
    assert first.block_table[:6] == second.block_table[:6]
    assert cache.states.num_stored == 1
    cache.blocks.check_integrity([first.block_table, second.block_table])
    finish(cache, first)
    finish(cache, second)
    assert cache.blocks.num_available == cache.blocks.num_blocks


def test_a13_what_a_failed_request_computed_is_forgotten() -> None:
    cache = make_cache()
    run(cache, make_request(tokens(130)))
    bad = make_request(tokens(130) + tokens(100, seed=1))
    start(cache, bad)
    compute(cache, bad, 192)
    cache.forget(bad)
    finish(cache, bad)
    cache.check_integrity([])
    assert found(cache, tokens(130) + tokens(100, seed=1))[:2] == (128, 128)
    assert found(cache, tokens(130))[0] == 128


def test_a_cold_request_finds_and_leaves_nothing() -> None:
    cache = make_cache()
    run(cache, make_request(tokens(200), prefix_cache=False))
    assert cache.num_nodes == 0
    run(cache, make_request(tokens(200)))
    cold = make_request(tokens(200), prefix_cache=False)
    assert cache.match(cold).use.miss_reason == "disabled"
    assert run(cache, cold) == 0


def test_a_disabled_cache_finds_and_leaves_nothing() -> None:
    cache = PrefixCache(BlockManager(64, 16), DeltaNetStateManager(4, 0), enabled=False)
    for _ in range(2):
        assert run(cache, make_request(tokens(200))) == 0
    assert cache.num_nodes == 0 and found(cache, tokens(200)) == (0, 0, "disabled")


def test_c14_counters_are_the_sums_of_what_requests_report() -> None:
    cache = make_cache(blocks=40, snapshots=3)
    rng = random.Random(1)
    reported = []
    for i in range(60):
        base = tokens(200, seed=rng.randrange(4))
        request = make_request(base[: rng.randint(1, 200)] + tokens(rng.randint(1, 80), seed=i))
        run(cache, request)
        reported.append((request, request.cache_use))
    assert cache.prompt_tokens == sum(len(r.prompt_ids) for r, _ in reported)
    assert cache.cached_tokens == sum(use.cached_tokens for _, use in reported) > 0
    assert cache.kv_matched_tokens == sum(use.kv_matched for _, use in reported)
    reasons = [use.miss_reason for _, use in reported if use.miss_reason is not None]
    assert dict(cache.misses) == {reason: reasons.count(reason) for reason in set(reasons)}
    assert {"new_prefix", "evicted"} <= set(reasons)


def test_template_divergence_names_the_token() -> None:
    cache = make_cache()
    ids, answer_at = tokens(140), 130
    run(cache, make_request(ids + tokens(60, seed=1), answer_at=answer_at))
    # The next turn leaves out what followed the opening of the answer: thinking, as a rule.
    use = cache.match(make_request(ids + tokens(90, seed=2), answer_at=220)).use
    assert (use.cached_tokens, use.miss_reason) == (128, "template_divergence")
    assert use.divergence.position == 140
    assert use.divergence.cached_id == tokens(60, seed=1)[0]
    assert use.divergence.prompt_id == tokens(90, seed=2)[0]
    # Another question is no divergence of the template, and a raw prompt has no template.
    use = cache.match(make_request(ids[:60] + tokens(90, seed=2), answer_at=140)).use
    assert (use.miss_reason, use.divergence) == ("new_prefix", None)
    use = cache.match(make_request(ids + tokens(90, seed=2))).use
    assert (use.miss_reason, use.divergence) == ("new_prefix", None)


@pytest.mark.parametrize("seed", range(5))
def test_b13_ten_thousand_operations_keep_all_parts_agreed(seed: int) -> None:
    rng = random.Random(seed)
    cache = make_cache(
        blocks=40, block_size=rng.choice([16, 32, 64]), snapshots=rng.choice([1, 2, 3])
    )
    bases = [tokens(400, seed=i) for i in range(5)]
    live: list[Request] = []
    for step in range(2000):
        action = rng.random()
        if action < 0.35 and len(live) < 5:
            ids = rng.choice(bases)[: rng.randint(1, 250)] + tokens(rng.randint(0, 40), seed=step)
            request = make_request(ids, answer_at=rng.choice([None, len(ids) // 2]))
            start(cache, request)
            live.append(request)
        elif action < 0.75 and live:
            request = rng.choice(live)
            end = min(
                request.num_tokens, request.num_computed_tokens + rng.choice([1, 16, 64, 200])
            )
            end = next((b for b in request.boundaries if request.num_computed_tokens < b), end)
            missing = cache.blocks.blocks_for(end) - len(request.block_table)
            if end > request.num_computed_tokens and missing <= cache.blocks.num_available:
                compute(cache, request, end, snapshot=rng.random() < 0.8)
                if end == request.num_tokens:
                    request.output_ids.append(rng.randrange(1000))
        elif action < 0.95 and live:
            finish(cache, live.pop(rng.randrange(len(live))))
        elif action < 0.97 and live:
            cache.forget(rng.choice(live))
        elif action > 0.998:
            cache.clear()
        cache.check_integrity(live)
        cache.blocks.check_integrity(request.block_table for request in live)
        cache.states.check_integrity(request.slot for request in live)
    assert cache.num_evicted_blocks > 50 and cache.states.num_evicted > 20


def test_looking_for_an_earlier_turn_does_not_grow_with_the_cache() -> None:
    cache = make_cache(blocks=4000, snapshots=100)
    for i in range(200):
        run(cache, make_request(tokens(70, seed=i), answer_at=2))
    compared = []

    class Counted(tuple):
        def __iter__(self):
            compared.append(1)
            return super().__iter__()

    for node in cache.walk():
        node.token_ids = Counted(node.token_ids)
    assert cache.match(make_request(tokens(70, seed=999), answer_at=60)).use.miss_reason
    assert 0 < len(compared) <= 32
