"""Which snapshots a cache that cannot hold all of them keeps: no model, requests one after the other.

`benchmarks/snapshot_eviction.py` has more loads, and figures.
"""

import random
from collections.abc import Iterator

import pytest

from minivllm_engine.cache.block_manager import BlockManager
from minivllm_engine.cache.deltanet_state import DeltaNetStateManager
from minivllm_engine.cache.node import Node
from minivllm_engine.cache.prefix_cache import PrefixCache
from minivllm_engine.core.request import Request
from minivllm_engine.core.sampling_params import ResolvedSampling

GRID = 64
OPENING = [1, 2, 3, 4]
# A prompt, its answer, and where it opens the answer.
Turn = tuple[list[int], list[int], int | None]


def text(seed: object, length: int) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(10, 1000) for _ in range(length)]


def make_cache(snapshots: int) -> PrefixCache:
    return PrefixCache(BlockManager(4000, GRID), DeltaNetStateManager(1, snapshots))


def serve(cache: PrefixCache, turn: Turn) -> int:
    """Compute a prompt and its answer. Returns the tokens that the cache had."""
    prompt, answer, answer_at = turn
    total = len(prompt) + len(answer)
    request = Request(
        "r", tuple(prompt), ResolvedSampling(seed=0), 0, 0, total, answer_at=answer_at
    )
    request.slot = cache.states.allocate()
    cache.start_from(request, cache.match(request))
    found = request.num_computed_tokens
    ends = [*request.boundaries, len(prompt)]
    for end in ends:
        _compute(cache, request, end, end in request.boundaries)
    request.output_ids += answer
    for end in range(-(-len(prompt) // GRID) * GRID, total, GRID):
        _compute(cache, request, end, True)
    _compute(cache, request, total - 1, False)  # the last token of an answer is never computed
    cache.blocks.release(request.block_table)
    cache.states.release(request.slot)
    cache.check_integrity([])
    cache.states.check_integrity([])
    return found


def _compute(cache: PrefixCache, request: Request, end: int, snapshot: bool) -> None:
    request.block_table += cache.allocate(cache.blocks.blocks_for(end) - len(request.block_table))
    reserved = cache.reserve_snapshot(request, end) if snapshot else None
    request.num_computed_tokens = end
    cache.commit(request, end, reserved)


def snapshots(cache: PrefixCache) -> list[Node]:
    """Nodes with a snapshot, the shortest prefix first."""
    return sorted((n for n in cache.walk() if n.snapshot is not None), key=lambda n: n.end)


def standing(cache: PrefixCache) -> list[int]:
    """Positions of the snapshots that are not superseded."""
    return [node.end for node in snapshots(cache) if not node.superseded]


def evicted_in_order(cache: PrefixCache) -> list[int]:
    """Positions of all snapshots, in the order in which they would be given up. Gives them up."""
    order = []
    while left := snapshots(cache):
        cache._tree.evict_cheapest_snapshot()
        order += [node.end for node in left if node.snapshot is None]
    return order


def conversation(name: object, turns: int, *, thinking: int = 0, answer: int = 50) -> list[Turn]:
    told: list[int] = []
    done: list[Turn] = []
    for turn in range(turns):
        told = told + text((name, turn, "question"), 100)
        said, thought = text((name, turn, "said"), answer), text((name, turn, "thought"), thinking)
        done.append((told + OPENING, thought + said + [5], len(told)))
        # As templates do it: where it was thought first, the opening is told otherwise later on.
        told = told + (OPENING[:3] if thinking else OPENING) + said + [5, 6]
    return done


def taking_turns(chats: int, turns: int, **kind: int) -> Iterator[Turn]:
    for round_ in zip(*(conversation(i, turns, **kind) for i in range(chats)), strict=True):
        yield from round_


def share_saved(load: list[Turn], snapshots: int) -> float:
    """Tokens found with so many snapshots, of those found where all have room."""
    few, all_ = make_cache(snapshots), make_cache(2000)
    best = sum(serve(all_, turn) for turn in load)
    return sum(serve(few, turn) for turn in load) / best


@pytest.mark.parametrize(
    "kind", [{}, {"answer": 400}, {"thinking": 200}], ids=["short", "long answers", "thinking"]
)
def test_c7_chats_that_take_turns_need_little_more_than_a_snapshot_each(kind) -> None:
    # They leave two or three a turn. By recency and distance alone, 0 to 23 % were saved.
    load = list(taking_turns(12, 7, **kind))
    assert share_saved(load, 18) >= 0.9
    assert share_saved(load, 24) >= 0.93


def test_strangers_do_not_take_the_room_of_chats() -> None:
    load = []
    for i, turn in enumerate(taking_turns(12, 7)):
        load.append(turn)
        if i % 4 == 0:
            load.append((text(("stranger", i), 300), text("bye", 20), None))
    assert share_saved(load, 18) >= 0.85


def test_what_a_chat_has_gone_on_from_goes_first() -> None:
    cache = make_cache(100)
    for turn in conversation("a", 4, answer=10):  # crosses no boundary: one snapshot a turn
        serve(cache, turn)
    assert standing(cache) == [snapshots(cache)[-1].end]
    order = [node.end for node in snapshots(cache)]
    serve(cache, (text("other", 80), [5], None))
    assert evicted_in_order(cache) == [*order[:-1], 64, order[-1]]


def test_what_it_saves_is_counted_from_the_one_above_that_stands() -> None:
    cache = make_cache(100)
    system = text("system", 256)
    for name in "ab":
        for prompt, answer, at in conversation(name, 3, answer=10):
            serve(cache, (system + prompt, answer, len(system) + at))
    found = [(n.end, n.saves, n.superseded) for n in snapshots(cache)]
    last = max(end for end, _, _ in found)
    # One of the two chats was computed before anybody knew where they part.
    assert sorted(entry for entry in found if not entry[2]) == [
        (256, 256, False),
        (last, last - 256, False),
        (last, last, False),
    ]


def test_whoever_starts_from_a_superseded_one_makes_it_a_branch_point() -> None:
    cache = make_cache(100)
    turns = conversation("a", 4)
    for turn in turns:
        serve(cache, turn)
    node = next(n for n in snapshots(cache) if n.superseded and n.end > 2 * GRID)
    # Ends with a block that is cached too: where it starts is all that it shows.
    beginning = turns[-1][0][: node.end + GRID]
    assert serve(cache, (beginning, [5], None)) == node.end
    assert node.branch_point and not node.superseded
    serve(cache, (beginning[:-4] + text("elsewhere", 200), [5], None))
    assert not node.superseded, "who goes on from a branch point does not supersede it"
    serve(cache, (text("stranger", 70), [5], None))
    stranger = next(n for n in snapshots(cache) if n.token_ids == tuple(text("stranger", 64)))
    while stranger.snapshot is not None:
        cache._tree.evict_cheapest_snapshot()
    assert node.snapshot is not None, "it is worth the tokens that it saves again"


def test_where_prompts_part_stays_under_a_stream_of_them() -> None:
    system = text("system", 400)
    load = [(system + text(("user", i), 100), text(i, 70), len(system) + 90) for i in range(40)]
    cache = make_cache(4)
    found = [serve(cache, turn) for turn in load]
    assert found[2:] == [384] * 38
    assert [node.end for node in snapshots(cache) if node.branch_point] == [384]


def test_thinking_that_is_not_told_again_makes_no_branch_point() -> None:
    cache = make_cache(100)
    turns = conversation("a", 4, thinking=200)
    for turn in turns:
        serve(cache, turn)
    assert not any(node.branch_point for node in cache.walk())
    prompts = {(len(prompt) - 1) // GRID * GRID for prompt, _, _ in turns}
    assert [end for end in standing(cache) if end in prompts] == [max(prompts)]


def test_of_a_prompt_and_its_answer_the_prompt_stays_unless_the_chat_goes_on_from_answers() -> None:
    turns = conversation("a", 2, answer=300)
    cache = make_cache(100)
    serve(cache, turns[0])
    assert evicted_in_order(cache)[-1] == 64  # of a prompt of 104
    cache = make_cache(100)
    for turn in turns:
        serve(cache, turn)
    assert evicted_in_order(cache)[-1] > len(turns[1][0])


def test_an_answer_short_beside_its_prompt_does_not_supersede_it() -> None:
    cache = make_cache(100)
    prompt, said = text("long", 4000), text("said", 100)
    serve(cache, (prompt, said, None))
    longer = prompt + said + text("more", 100)
    serve(cache, (longer, text("said too", 70), None))
    assert standing(cache) == [4160, 4224]


def test_a_long_prompt_holds_one_snapshot_dear_and_not_its_whole_grid() -> None:
    cache = make_cache(16)
    for i in range(12):
        serve(cache, conversation(i, 1, answer=10)[0])
    serve(cache, (text("long", 31_990), [5], None))
    assert [end for end in standing(cache) if end > 1000] == [31_936]
    for i in range(24):
        serve(cache, conversation(("new", i), 1, answer=10)[0])
    assert [node.end for node in snapshots(cache) if node.end > 1000] == [31_936]
