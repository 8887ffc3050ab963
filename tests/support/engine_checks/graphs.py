"""Decode steps by graph and without: the same bits, and nobody's memory but their own."""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from minivllm_engine import LLM
from support.engine_checks import (
    assert_nothing_held,
    finish_all,
    greedy_params,
    random_prompts,
    recorded_logits,
    same_bits,
    start_anew,
)
from support.oracle import Oracle, agrees


@dataclass(frozen=True)
class Outcome:
    """What a scenario gave: ids of each request, and the logits of every step."""

    ids: list[list[int]]
    logits: list[torch.Tensor]


Scenario = Callable[[LLM], list[list[int]]]


def run_scenario(llm: LLM, scenario: Scenario, *, graphs: bool) -> Outcome:
    start_anew(llm)
    llm.use_graphs(graphs)
    try:
        with recorded_logits(llm) as logits:
            ids = scenario(llm)
    finally:
        llm.use_graphs(True)
    assert_nothing_held(llm)
    return Outcome(ids, logits)


def check_graph_is_eager(llm: LLM, scenario: Scenario) -> Outcome:
    """The same ids, and the same bits of all logits."""
    graph, eager = (run_scenario(llm, scenario, graphs=on) for on in (True, False))
    assert graph.ids == eager.ids
    assert len(graph.logits) == len(eager.logits)
    for step, (one, other) in enumerate(zip(graph.logits, eager.logits, strict=True)):
        assert one.isfinite().all(), f"step {step}"
        assert same_bits(one, other), f"step {step} of {len(one)} sequences"
    return graph


def check_batch_sizes(llm: LLM, sizes: Sequence[int]) -> None:
    """D4: so many requests side by side."""
    for size in sizes:
        prompts = random_prompts(size, [1 + 3 * i for i in range(size)])

        def scenario(llm: LLM, prompts: list[list[int]] = prompts) -> list[list[int]]:
            outs = llm.generate(prompts, greedy_params(4))
            return [out.outputs[0].token_ids for out in outs]

        outcome = check_graph_is_eager(llm, scenario)
        assert len(outcome.logits[-1]) == size


def check_prompts(llm: LLM) -> None:
    """Prompts of lengths in and around buckets, alone, side by side, beside decodes, and partly cached."""
    prompts = llm._loop.open_runner().graphs.prompts
    assert prompts is not None
    steps, load = [], prompts.load
    prompts.load = lambda sequences, bucket: steps.append(bucket) or load(sequences, bucket)
    try:
        for n in (2, 63, 64, 65, 127, 128, 129, 200, 256, 257, 300):
            check_graph_is_eager(llm, _generating([n]))
        check_graph_is_eager(llm, _generating([70, 3, 130, 64, 1, 200]))
        check_graph_is_eager(llm, _streaming([40, 300, 5, 129, 64, 257, 90], shared=192))
    finally:
        del prompts.load
    assert len(set(steps)) >= 5, f"only {set(steps)}"


def _generating(lengths: list[int]) -> Scenario:
    def scenario(llm: LLM) -> list[list[int]]:
        outs = llm.generate(random_prompts(len(lengths), lengths), greedy_params(3))
        return [out.outputs[0].token_ids for out in outs]

    return scenario


def _streaming(lengths: list[int], shared: int) -> Scenario:
    """A prompt every other step, so that chunks run beside decodes, each after the same tokens."""

    def scenario(llm: LLM) -> list[list[int]]:
        (prefix,) = random_prompts(99, [shared])
        names, finished = [], {}
        for prompt in random_prompts(5, lengths):
            names.append(llm.add_request(prefix + prompt, greedy_params(24)))
            for _ in range(2):
                finished |= {out.request_id: out for out in llm.step() if out.finished}
        finished |= finish_all(llm)
        assert not any(out.error for out in finished.values())
        return [finished[name].outputs[0].token_ids for name in names]

    return scenario


def check_one_by_one(llm: LLM, oracle: Oracle) -> None:
    """D3: eight requests that end one after the other, each like the oracle."""
    prompts = random_prompts(3, [5, 17, 1, 60, 9, 40, 30, 2])
    order = random.Random(0).sample(range(3, 11), 8)

    def scenario(llm: LLM) -> list[list[int]]:
        params = [greedy_params(count) for count in order]
        outs = llm.generate(prompts, params)
        for out, prompt in zip(outs, prompts, strict=True):
            assert out.error is None
            assert agrees(out.outputs[0], oracle(prompt))
        ids = [out.outputs[0].token_ids for out in outs]
        assert [len(one) for one in ids] == order
        return ids

    outcome = check_graph_is_eager(llm, scenario)
    assert {len(one) for one in outcome.logits} >= set(range(1, 9))


def check_idle_slots(llm: LLM, count: int) -> None:
    """D1: see `idle_slots`. The answers are those without graphs."""
    check_graph_is_eager(llm, idle_slots(count))


def idle_slots(count: int) -> Scenario:
    """`count` requests run in slots that lie apart; every other slot, block and snapshot keeps its bits."""

    def scenario(llm: LLM) -> list[list[int]]:
        total = llm._plan.max_num_seqs
        names = [
            llm.add_request(prompt, greedy_params(40))
            for prompt in random_prompts(count, [3 + i for i in range(total)])
        ]
        _step_until_decoding(llm, total)
        for name in random.Random(count).sample(names, total - count):
            llm.abort(name)
            names.remove(name)
        for _ in range(3):  # steps that were launched with all of them
            llm.step()
        running = llm._scheduler.running
        assert len(running) == count
        # Not NaN, and new: who writes again what is there already is not seen.
        _fill_with_numbers(llm)
        # A block that a sequence takes meanwhile is no idle one.
        before = _idle_memory(llm)
        for _ in range(4):
            llm.step()
            llm.check_integrity()
        after = _idle_memory(llm)
        assert before.keys() >= after.keys() and len(after) > 0
        for place, bits in after.items():
            assert same_bits(bits, before[place]), f"{place} was written"
        return [llm.abort(name).outputs[0].token_ids for name in names]

    return scenario


def _step_until_decoding(llm: LLM, count: int) -> None:
    while len(llm._scheduler.running) < count or any(
        r.num_computed_tokens < len(r.prompt_ids) for r in llm._scheduler.running
    ):
        llm.step()


def _idle_places(llm: LLM) -> list[tuple[str, list[torch.Tensor], list[int]]]:
    """All slots, snapshots and blocks that no running request holds, the sinks left out."""
    pool, running = llm._loop.open_runner().pool, llm._scheduler.running
    slots = [s for s in range(pool.num_slots) if s not in {r.slot for r in running}]
    held = {block for r in running for block in r.block_table}
    blocks = [b for b in range(pool.num_blocks) if b not in held]
    snapshots = list(range(pool.num_snapshots))
    return [
        ("conv state", pool.conv, slots),
        ("recurrent state", pool.recurrent, slots),
        ("conv snapshot", pool.conv_snapshots, snapshots),
        ("recurrent snapshot", pool.recurrent_snapshots, snapshots),
        ("keys", pool.keys, blocks),
        ("values", pool.values, blocks),
    ]


def _fill_with_numbers(llm: LLM) -> None:
    generator = torch.Generator(llm.device).manual_seed(0)
    for _, tensors, places in _idle_places(llm):
        for tensor in tensors:
            shape = (len(places), *tensor.shape[1:])
            numbers = torch.randn(shape, generator=generator, device=tensor.device)
            tensor[places] = numbers.to(tensor.dtype)


def _idle_memory(llm: LLM) -> dict[str, torch.Tensor]:
    """Copies of what is idle."""
    copies = {}
    for kind, tensors, places in _idle_places(llm):
        stacked = torch.stack(tensors, dim=1)
        copies |= {f"{kind} {place}": stacked[place].clone() for place in places}
    return copies


def check_padding_lanes(llm: LLM) -> None:
    """D6: a padding lane has a length of its own, so that its softmax is over something.

    Over memory without NaN what it computes is finite: it reads the sinks.
    """
    pool, static = llm._loop.open_runner().pool, llm._loop.open_runner().graphs.static
    assert 3 not in llm.graph_sizes
    start_anew(llm)
    pool.fill_(0.0)
    for prompt in random_prompts(6, [4, 5, 6]):
        llm.add_request(prompt, greedy_params(5))
    _step_until_decoding(llm, 3)
    static.logits.fill_(float("nan"))
    for _ in range(2):
        llm.step()
    lanes = static._numbers[:, :4].cpu()
    positions, slots = lanes[2], lanes[3]
    assert (slots >= 0).sum() == 3 and slots[3] == -1
    assert (positions + 1 >= 1).all(), "a lane of length 0"
    assert static.logits[:4].isfinite().all()
    assert static.logits[4:].isnan().all(), "more lanes than the graph has"
    finish_all(llm)


def check_beyond_the_largest_graph(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """D7: one warning in all, however many steps are larger, and none where they fit."""
    decodes = llm._loop.open_runner().graphs
    decodes._warned = False
    largest = llm.graph_sizes[-1]
    texts = []
    for count in (largest, largest + 1, largest + 1, llm._plan.max_num_seqs):
        start_anew(llm)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "minivllm_engine"):
            llm.generate(random_prompts(1, [3] * count), greedy_params(4))
        texts.append([r.getMessage() for r in caplog.records if "CUDA graph" in r.getMessage()])
    assert [len(found) for found in texts] == [0, 1, 0, 0]
    assert f"graph.max_batch is {largest}" in texts[1][0]


def check_fragmented_slots(llm: LLM) -> None:
    """F11: the same answers in slots that lie apart as in slots side by side."""
    count = llm._plan.max_num_seqs // 2
    prompts = random_prompts(11, [4 + 5 * i for i in range(count)])
    start_anew(llm)
    names = [llm.add_request(prompt, greedy_params(16)) for prompt in prompts]
    slots, packed = _slots_and_answers(llm, names)
    assert max(slots) - min(slots) == count - 1
    start_anew(llm)
    names, strangers = [], []
    for prompt in prompts:
        names.append(llm.add_request(prompt, greedy_params(16)))
        strangers.append(llm.add_request([7], greedy_params(16)))
    _step_until_admitted(llm, 2 * count)
    for stranger in strangers:
        llm.abort(stranger)
    slots, apart = _slots_and_answers(llm, names)
    assert max(slots) - min(slots) >= 2 * count - 2
    assert packed == apart


def _step_until_admitted(llm: LLM, count: int) -> None:
    while len(llm._scheduler.running) < count:
        llm.step()


def _slots_and_answers(llm: LLM, names: list[str]) -> tuple[list[int], list[list[int]]]:
    _step_until_admitted(llm, len(names))
    slots = [r.slot for r in llm._scheduler.running]
    finished = finish_all(llm)
    return slots, [finished[name].outputs[0].token_ids for name in names]
