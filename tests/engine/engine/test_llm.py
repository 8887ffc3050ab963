"""The engine's public face: answers, limits, containment, and state that never crosses requests."""

import logging
import math
import pickle
from dataclasses import asdict, replace
from typing import get_type_hints

import pytest
import torch
from pydantic import TypeAdapter

from minivllm_engine import (
    LLM,
    ConfigError,
    EngineConfig,
    EngineError,
    RequestError,
    SamplingParams,
)
from minivllm_engine.core.outputs import CompletionOutput, FinishReason
from support.oracle import Oracle, agrees

VOCAB = 320  # of the tiny model
NAN = float("nan")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)


def ids(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def oracle(tiny_model) -> Oracle:
    return Oracle(tiny_model, 12)


@pytest.fixture
def llm(tiny_model):
    with engine(tiny_model, max_num_seqs=8, block_size=64, num_blocks=100) as llm:
        yield llm
        llm.check_integrity()


def engine(tiny_model, *, num_blocks=None, block_size=16, **options) -> LLM:
    cache = {"block_size": block_size, "num_blocks": num_blocks or 400}
    llm = LLM(tiny_model, engine={"cpu_memory": "64MiB", **options}, cache=cache)
    llm._loop.runner.pool.fill_(NAN)
    return llm


def assert_like_oracle(outs, prompts, oracle) -> None:
    for out, prompt in zip(outs, prompts, strict=True):
        assert out.error is None
        assert agrees(out.outputs[0], oracle(prompt))
        assert len(out.outputs[0].token_ids) == 12


# -- A: state and slot lifetime ------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 2048])
def test_a1_a_first_chunk_of_one_token_starts_from_nothing(tiny_model, oracle, budget) -> None:
    with engine(tiny_model, max_num_seqs=1, max_num_batched_tokens=budget) as llm:
        for prompt in (ids(1, 100), ids(2, 1), ids(3, 2), ids(2, 1)):
            assert_like_oracle(llm.generate([prompt], GREEDY), [prompt], oracle)


def test_a2_slots_full_of_nan_change_nothing(tiny_model, oracle) -> None:
    prompts = [ids(i, 5 + 20 * i) for i in range(4)]
    with engine(tiny_model, max_num_seqs=2) as llm:
        for _ in range(2):
            llm.clear_cache()
            llm._loop.runner.pool.fill_(NAN)
            assert_like_oracle(llm.generate(prompts, GREEDY), prompts, oracle)


def test_a4_neither_state_nor_kv_of_the_last_owner_is_read(tiny_model, oracle) -> None:
    with engine(tiny_model, max_num_seqs=1) as llm:
        llm.generate([ids(9, 200)], GREEDY)
        pool = llm._loop.runner.pool
        assert pool.recurrent[0].isfinite().any()
        prompt = ids(4, 3)
        with_old = llm.generate([prompt], GREEDY)
        pool.fill_(NAN)
        with_nan = llm.generate([prompt], GREEDY)
        assert with_old[0].outputs[0].token_ids == with_nan[0].outputs[0].token_ids
        assert with_old[0].outputs[0].logprobs == with_nan[0].outputs[0].logprobs
    assert_like_oracle(with_nan, [prompt], oracle)


@pytest.mark.parametrize("num_blocks", [6, 7, 8])
def test_a5_preempted_requests_give_what_they_give_alone(tiny_model, oracle, num_blocks) -> None:
    prompts = [ids(10 + i, 14 + 16 * (i % 2)) for i in range(4)]
    with engine(tiny_model, max_num_seqs=4, num_blocks=num_blocks) as llm:
        outs = llm.generate(prompts, GREEDY)
        assert llm.stats().num_preemptions > 0
        assert sum(out.timing.preemptions for out in outs) == llm.stats().num_preemptions
    assert_like_oracle(outs, prompts, oracle)


def test_a6_more_prompts_than_slots(tiny_model, oracle) -> None:
    prompts = [ids(20 + i, 3 + 7 * i) for i in range(9)]
    with engine(tiny_model, max_num_seqs=4) as llm:
        outs = llm.generate(prompts, GREEDY)
        assert llm.stats().state_slots_peak == 4
    assert_like_oracle(outs, prompts, oracle)


def test_a8_prompts_of_very_different_lengths_in_one_batch(tiny_model, oracle) -> None:
    prompts = [ids(30 + i, n) for i, n in enumerate([1, 2, 3, 4, 50, 64, 130, 200])]
    with engine(tiny_model, max_num_seqs=8) as llm:
        assert_like_oracle(llm.generate(prompts, GREEDY), prompts, oracle)


def test_a10_the_pool_needs_no_initialisation(tiny_model, oracle, monkeypatch) -> None:
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(NAN) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    prompt = ids(40, 70)
    with LLM(tiny_model, engine={"max_num_seqs": 1}) as llm:
        assert_like_oracle(llm.generate([prompt], GREEDY), [prompt], oracle)


def test_a11_500_short_requests_with_random_aborts_leave_nothing_behind(tiny_model) -> None:
    generator = torch.Generator().manual_seed(0)
    with engine(tiny_model, max_num_seqs=6, num_blocks=12) as llm:
        live, number = set(), 0
        while number < 500 or llm.has_unfinished:
            while number < 500 and len(live) < 10:
                length = int(torch.randint(1, 30, (1,), generator=generator))
                params = SamplingParams(temperature=0, max_tokens=3, n=1 + number % 2)
                live.add(llm.add_request(ids(number, length), params))
                number += 1
            if live and torch.rand(1, generator=generator) < 0.3:
                llm.abort(live.pop())
            for out in llm.step():
                if out.finished:
                    live.discard(out.request_id)
            llm.check_integrity()
        stats = llm.stats()
        assert (stats.kv_blocks_used, stats.state_slots_used) == (0, 0)
        assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_a13_nan_in_one_state_ends_that_request_alone(tiny_model, oracle) -> None:
    prompts = [ids(50 + i, 20) for i in range(3)]
    with engine(tiny_model, max_num_seqs=3) as llm:
        names = [llm.add_request(prompt, GREEDY) for prompt in prompts]
        llm.step()
        llm.step()
        victim = next(r for r in llm._scheduler.running if r.request_id == names[1])
        for tensor in llm._loop.runner.pool.recurrent:
            tensor[victim.slot] = NAN
        outs = {}
        while llm.has_unfinished:
            outs |= {out.request_id: out for out in llm.step() if out.finished}
            llm.check_integrity()
        bad = outs[names[1]]
        assert bad.error.code == "non_finite_logits"
        assert bad.finish_reason is FinishReason.ERROR
        assert len(bad.outputs[0].token_ids) == 2
        good = [outs[names[0]], outs[names[2]]]
        assert_like_oracle(good, [prompts[0], prompts[2]], oracle)
        # The next users of that slot and those blocks are clean.
        assert_like_oracle(llm.generate(prompts, GREEDY), prompts, oracle)


# -- E, F: chunks, failures, capacity ------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 2, 7, 63, 64, 65])
def test_any_token_budget_gives_the_same(tiny_model, oracle, budget) -> None:
    prompts = [ids(60 + i, n) for i, n in enumerate([1, 63, 64, 65, 130])]
    with engine(tiny_model, max_num_seqs=3, max_num_batched_tokens=budget) as llm:
        assert_like_oracle(llm.generate(prompts, GREEDY), prompts, oracle)


def test_e6_two_prompts_in_one_prefill_do_not_see_each_other(llm, oracle) -> None:
    prompts = [ids(70, 33), ids(71, 90)]
    assert_like_oracle(llm.generate(prompts, GREEDY), prompts, oracle)


def test_e8_short_prompts_finish_before_the_last_long_one(tiny_model) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with engine(tiny_model, max_num_seqs=24, max_num_batched_tokens=128) as llm:
        long = [llm.add_request(ids(i, 600), params) for i in range(4)]
        short = [llm.add_request(ids(i, 20), params) for i in range(20)]
        order = []
        while llm.has_unfinished:
            order += [out.request_id for out in llm.step() if out.finished]
    assert max(order.index(r) for r in short) < max(order.index(r) for r in long)


def test_e9_a_failing_step_costs_the_request_to_blame_only(
    llm, oracle, monkeypatch, caplog
) -> None:
    prompts = [ids(80 + i, 10 + i) for i in range(4)]
    poison = prompts[2][0]
    run = llm._loop.runner.run

    def failing(batch, awaited):
        logits = run(batch, awaited)
        for sequence in batch.sequences:
            request = sequence.request
            if request.prompt_ids[0] == poison and len(request.output_ids) == 3:
                raise RuntimeError("not enough memory: you tried to allocate 9 bytes")
        return logits

    monkeypatch.setattr(llm._loop.runner, "run", failing)
    with caplog.at_level(logging.WARNING, "minivllm_engine"):
        outs = llm.generate(prompts, GREEDY)
    assert "not enough memory" in caplog.text
    bad = outs.pop(2)
    assert bad.error.code == "engine_error"
    assert "not enough memory" in bad.error.what
    assert len(bad.outputs[0].token_ids) == 3
    assert_like_oracle(outs, prompts[:2] + prompts[3:], oracle)
    stats = llm.stats()
    assert (stats.kv_blocks_used, stats.state_slots_used) == (0, 0)


def test_e13_dead_logits_end_the_request(llm) -> None:
    llm._loop.runner.model.head.data = torch.zeros_like(llm._loop.runner.model.head)
    out = llm.generate([ids(1, 4)], GREEDY)[0]
    assert out.error.code == "non_finite_logits"
    assert "all equal" in out.error.what


def test_an_interrupt_in_a_step_leaves_the_engine_usable(llm, oracle, monkeypatch) -> None:
    prompts = [ids(90, 30), ids(91, 5)]
    names = [llm.add_request(prompt, GREEDY) for prompt in prompts]
    llm.step()
    run = llm._loop.runner.run

    def interrupted(batch, awaited):
        run(batch, awaited)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._loop.runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    monkeypatch.setattr(llm._loop.runner, "run", run)
    llm.check_integrity()
    outs = {}
    while llm.has_unfinished:
        outs |= {out.request_id: out for out in llm.step() if out.finished}
    assert_like_oracle([outs[name] for name in names], prompts, oracle)


def test_f6_the_stated_concurrency_is_reached(tiny_model) -> None:
    with engine(tiny_model, max_num_seqs=5) as llm:
        llm.generate([ids(i, 10) for i in range(12)], GREEDY)
        stats = llm.stats()
        assert (stats.state_slots_total, stats.state_slots_peak) == (5, 5)


def test_f12_a_prompt_that_is_too_long_is_told_its_length_and_the_limit(tiny_model) -> None:
    with engine(tiny_model, max_num_seqs=2, max_model_len=50) as llm:
        too_long, longest = ids(1, 50), ids(2, 49)
        outs = llm.generate([too_long, longest], GREEDY)
        assert outs[0].error.code == "prompt_too_long"
        assert outs[0].error.what == "50 prompt tokens + 1 > max_model_len 50"
        assert outs[0].outputs == []
        assert outs[1].error is None
        assert outs[1].finish_reason is FinishReason.CONTEXT
        assert len(outs[1].outputs[0].token_ids) == 1


# -- H: sampling and text ------------------------------------------------------------------------


def test_h4_greedy_and_sampled_requests_share_a_batch(llm, oracle) -> None:
    prompt = ids(100, 20)
    hot = SamplingParams(temperature=1.5, max_tokens=12, seed=5, ignore_eos=True)
    outs = llm.generate([prompt, prompt, prompt], [GREEDY, hot, GREEDY])
    assert_like_oracle([outs[0], outs[2]], [prompt, prompt], oracle)
    assert outs[1].outputs[0].token_ids != outs[0].outputs[0].token_ids


@pytest.mark.parametrize("top_k", [-1, 0, 1, VOCAB, VOCAB + 1, 10**9])
def test_h5_top_k_beyond_the_vocabulary(llm, top_k) -> None:
    params = SamplingParams(temperature=1, top_k=top_k, max_tokens=3, seed=1, ignore_eos=True)
    assert llm.generate([ids(101, 5)], params)[0].error is None


def test_h10_sampled_tokens_survive_batching_chunking_and_preemption(tiny_model) -> None:
    prompts = [ids(110 + i, 14 + 16 * i) for i in range(4)]
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=12, seed=i, n=2, ignore_eos=True)
        for i in range(4)
    ]
    with engine(tiny_model, max_num_seqs=1) as llm:
        alone = [llm.generate([p], s)[0] for p, s in zip(prompts, params, strict=True)]
    with engine(tiny_model, max_num_seqs=4, num_blocks=9, max_num_batched_tokens=20) as llm:
        crowded = llm.generate(prompts, params)
        assert llm.stats().num_preemptions > 0
    for a, b in zip(alone, crowded, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
        assert a.outputs[0].token_ids != a.outputs[1].token_ids


def test_seeds_default_to_the_engines_seed_and_the_place(tiny_model) -> None:
    params = SamplingParams(temperature=1, max_tokens=8, ignore_eos=True)
    prompt = ids(120, 6)
    with LLM(tiny_model, engine={"max_num_seqs": 3}, sampling={"seed": 40}) as llm:
        first = llm.generate([prompt] * 3, params)
        again = llm.generate([prompt] * 3, params)
        fixed = llm.generate([prompt], params.model_copy(update={"seed": 42}))
    assert [out.params.seed for out in first] == [40, 41, 42]
    tokens = [out.outputs[0].token_ids for out in first]
    assert tokens == [out.outputs[0].token_ids for out in again]
    assert tokens[2] == fixed[0].outputs[0].token_ids
    assert tokens[0] != tokens[1]


def test_h12_an_empty_prompt_is_an_error_of_its_own(llm, oracle) -> None:
    prompt = ids(130, 5)
    outs = llm.generate(["", prompt, [], {"messages": []}], GREEDY)
    assert [out.error and out.error.code for out in outs] == [
        "empty_prompt",
        None,
        "empty_prompt",
        "empty_prompt",
    ]
    assert_like_oracle([outs[1]], [prompt], oracle)


def test_h14_a_huge_max_tokens_is_a_cap_and_no_reservation(tiny_model) -> None:
    with engine(tiny_model, max_num_seqs=2, max_model_len=100) as llm:
        params = SamplingParams(temperature=0, max_tokens=10**9, ignore_eos=True)
        outs = llm.generate([ids(1, 10), ids(2, 60)], params)
    assert [out.finish_reason for out in outs] == [FinishReason.CONTEXT] * 2
    assert [len(out.outputs[0].token_ids) for out in outs] == [90, 40]


def test_end_ids_are_the_union_of_all_three_files(tiny_model, llm) -> None:
    tokens = llm.generate([ids(140, 9)], GREEDY)[0].outputs[0].token_ids
    assert llm.stop_token_ids >= set(llm.tokenizer.eos_ids)
    llm._input_processor._end_ids = frozenset({tokens[4]})
    first = tokens.index(tokens[4])
    out = llm.generate([ids(140, 9)], SamplingParams(temperature=0, max_tokens=12))[0]
    assert out.finish_reason is FinishReason.STOP
    assert out.outputs[0].token_ids == tokens[: first + 1]
    ignored = llm.generate([ids(140, 9)], GREEDY)[0]
    assert ignored.outputs[0].token_ids == tokens
    late = SamplingParams(temperature=0, max_tokens=12, min_tokens=first + 2)
    assert len(llm.generate([ids(140, 9)], late)[0].outputs[0].token_ids) >= first + 2


def test_stop_token_ids_end_an_output_and_are_not_text(llm) -> None:
    tokens = llm.generate([ids(141, 9)], GREEDY)[0].outputs[0].token_ids
    stop = tokens[5]
    params = GREEDY.model_copy(update={"stop_token_ids": (stop,)})
    out = llm.generate([ids(141, 9)], params)[0].outputs[0]
    assert out.token_ids == tokens[: tokens.index(stop) + 1]
    assert (out.finish_reason, out.stop_reason) == (FinishReason.STOP, stop)
    assert out.text == llm.tokenizer.decode(out.token_ids[:-1])


def test_h1_streamed_and_whole_text_agree_with_and_without_stop_strings(llm) -> None:
    prompt = ids(142, 9)
    long = SamplingParams(temperature=0.8, seed=1, max_tokens=60, ignore_eos=True)
    whole = llm.generate([prompt], long)[0]
    assert whole.text == llm.tokenizer.decode(whole.outputs[0].token_ids)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 7]
    for params in (long, long.model_copy(update={"stop": (stop,)})):
        out = llm.generate([prompt], params)[0]
        pieces = list(llm.stream(prompt, params))
        assert "".join(piece.text_delta for piece in pieces) == out.text
        assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert pieces[-1].outputs[0].token_ids == out.outputs[0].token_ids
    assert out.text == whole.text[: whole.text.index(stop)]
    assert (out.finish_reason, out.outputs[0].stop_reason) == (FinishReason.STOP, stop)


def test_closing_a_stream_aborts_its_request(llm) -> None:
    stream = llm.stream(ids(143, 5), GREEDY)
    next(stream)
    stream.close()
    assert not llm.has_unfinished
    assert llm.stats().state_slots_used == 0


def test_ids_of_callers_are_never_given_again(llm) -> None:
    mine = [llm.add_request([7] * 5, GREEDY, request_id=f"request-{n}") for n in (1, 2)]
    outs = llm.generate([[8] * 5, [9] * 5, [8] * 5], GREEDY)
    assert not any(out.error for out in outs)
    assert len({*mine, *(out.request_id for out in outs)}) == 5
    assert mine[0] not in [llm.add_request([7] * 5, GREEDY) for _ in range(2)]
    while llm.has_unfinished:
        done = {out.request_id for out in llm.step() if out.finished}
        mine = [request_id for request_id in mine if request_id not in done]
    assert not mine, "nobody but their owner ends them"


def test_an_id_is_in_use_until_its_last_output_was_taken(llm) -> None:
    llm.add_request([7] * 5, GREEDY, request_id="mine")
    llm.generate([9] * 5, GREEDY.model_copy(update={"max_tokens": 20}))
    with pytest.raises(RequestError, match="'mine' is in use") as caught:
        llm.add_request([7] * 5, GREEDY, request_id="mine")
    assert caught.value.hint == "give another id, or none"
    assert [(out.request_id, out.finished) for out in llm.step()][-1] == ("mine", True)
    assert llm.add_request([7] * 5, GREEDY, request_id="mine") == "mine"
    llm.abort("mine")


def test_streams_side_by_side_get_all_of_their_outputs(llm) -> None:
    """Also with `generate` between them."""
    prompts = [[5] * 9, [6] * 70]
    alone = [list(llm.stream(prompt, GREEDY)) for prompt in prompts]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    found = [[next(stream)] for stream in streams]
    llm.generate([9] * 5, GREEDY)
    for out in streams[1]:
        found[1].append(out)
    found[0] += streams[0]
    for outs, expected in zip(found, alone, strict=True):
        assert outs[-1].finished and not any(out.finished for out in outs[:-1])
        texts = ["".join(out.outputs[0].text_delta for out in some) for some in (outs, expected)]
        assert texts[0] == texts[1] == expected[-1].outputs[0].text
        assert outs[-1].outputs[0].token_ids == expected[-1].outputs[0].token_ids
    assert not llm.has_unfinished


def test_a_stream_that_was_closed_leaves_nothing_to_take(llm) -> None:
    stream = llm.stream([5] * 9, GREEDY)
    next(stream)
    llm.generate([9] * 5, GREEDY)
    assert llm.has_unfinished
    stream.close()
    assert not llm.has_unfinished and llm.step() == []


@pytest.mark.parametrize("prompt", [[-1] * 100, [2**70] * 100, []], ids=["below", "above", "empty"])
def test_the_prefix_of_a_prompt_that_cannot_be_is_a_request_error(llm, prompt) -> None:
    with pytest.raises(RequestError):
        llm.cached_prefix(prompt)


def test_running_ids_are_those_that_were_given_room(tiny_model) -> None:
    with engine(tiny_model, max_num_seqs=2) as llm:
        names = [llm.add_request(ids(150 + n, 5), GREEDY) for n in range(3)]
        assert llm.running_ids == set()
        llm.step()
        assert llm.running_ids == set(names[:2])
        llm.abort(names[0])
        llm.step()
        assert llm.running_ids == set(names[1:])


def test_an_abort_returns_what_there_is(llm) -> None:
    name = llm.add_request(ids(144, 5), GREEDY)
    llm.step()
    llm.step()
    out = llm.abort(name)
    assert out.finished
    assert out.finish_reason is FinishReason.ABORT
    assert len(out.outputs[0].token_ids) == 2
    assert llm.abort(name) is None
    assert llm.step() == []


def several_outputs(llm, *, stops_early: int) -> str:
    """A request of three outputs, of which one has ended by its stop token, and its id."""
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=20, ignore_eos=True)
    (free,) = llm.generate(ids(146, 5), params)
    others = {i for out in free.outputs if out.index != stops_early for i in out.token_ids}
    stop = next(i for i in free.outputs[stops_early].token_ids if i not in others)
    params = params.model_copy(update={"stop_token_ids": (stop,)})
    name = llm.add_request(ids(146, 5), params)
    while not any(
        out.outputs[stops_early].finish_reason is not None and not out.finished
        for out in llm.step()
    ):
        assert llm.has_unfinished
    return name


@pytest.mark.parametrize("early", [0, 2])
def test_an_abort_ends_the_whole_request_whatever_some_outputs_had_come_to(llm, early) -> None:
    name = several_outputs(llm, stops_early=early)
    out = llm.abort(name)
    each = [one.finish_reason for one in out.outputs]
    assert out.finished and out.finish_reason is FinishReason.ABORT
    assert each[early] is FinishReason.STOP
    assert [reason for i, reason in enumerate(each) if i != early] == [FinishReason.ABORT] * 2


def test_a_failure_ends_the_whole_request_whatever_some_outputs_had_come_to(
    llm, monkeypatch
) -> None:
    several_outputs(llm, stops_early=0)

    def fail(*_: object) -> None:
        raise RuntimeError("the fan fell off")

    monkeypatch.setattr(llm._loop.runner, "run", fail)
    outs = []
    while llm.has_unfinished:
        outs += llm.step()
    assert outs[-1].finished and outs[-1].finish_reason is FinishReason.ERROR
    assert outs[-1].outputs[0].finish_reason is FinishReason.STOP


def test_a_request_has_no_reason_to_have_ended_before_all_its_outputs_have(llm) -> None:
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=20, ignore_eos=True)
    (free,) = llm.generate(ids(146, 5), params)
    stop = free.outputs[0].token_ids[0]
    name = llm.add_request(ids(146, 5), params.model_copy(update={"stop_token_ids": (stop,)}))
    seen = []
    while llm.has_unfinished:
        seen += [out for out in llm.step() if out.request_id == name]
    assert any(out.outputs[0].finish_reason and not out.finished for out in seen)
    for out in seen:
        assert (out.finish_reason is None) == (not out.finished)
    assert seen[-1].finish_reason is FinishReason.STOP


def test_a_request_that_was_refused_ended_with_an_error(llm) -> None:
    (out,) = llm.generate([[]], GREEDY)
    assert out.error.code == "empty_prompt" and not out.outputs
    assert out.finish_reason is FinishReason.ERROR


def test_requests_added_by_hand_are_not_lost_to_generate(llm) -> None:
    name = llm.add_request(ids(145, 5), GREEDY)
    llm.generate([ids(146, 40)], GREEDY)
    outs = []
    while llm.has_unfinished:
        outs += llm.step()
    assert {out.request_id for out in outs} == {name}
    assert outs[-1].finished


def test_n_gives_independent_outputs_and_a_bad_one_costs_only_its_own_request(llm) -> None:
    params = SamplingParams(temperature=1, seed=3, n=3, max_tokens=5, ignore_eos=True)
    out = llm.generate([ids(147, 5)], params)[0]
    assert [o.index for o in out.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in out.outputs}) == 3
    assert out.usage.completion_tokens == 15
    one = llm.generate([ids(147, 5)], params.model_copy(update={"n": 1}))[0]
    assert one.outputs[0].token_ids == out.outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([0, VOCAB], {}, f"prompt token id {VOCAB} is out of range"),
        ([-1], {}, "prompt token id -1 is out of range"),
        ([1, "a"], {}, "not all are integers"),
        ([1, True], {}, "not all are integers"),
        ([1, None], {}, "not all are integers"),
        (5, {}, "text, token ids or an object"),
        ({"prompt": 5}, {}, "prompt: not a string"),
        ({"prompt": "x", "messages": []}, {}, "one of"),
        ({"prompt": "x", "tool": 1}, {}, "tool: unknown key"),
        ({"messages": "hi"}, {}, "not a list"),
        ({"messages": [1]}, {}, "not a list of objects"),
        ({"messages": [{}], "chat_template_kwargs": 1}, {}, "chat_template_kwargs"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, f"logit_bias id {VOCAB}"),
        ([1], {"stop_token_ids": (600,)}, "stop_token_ids id 600"),
        ([1], {"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 > max_tokens 4"),
    ],
)
def test_bad_requests_are_refused_with_a_reason(llm, prompt, params, text) -> None:
    sampling = SamplingParams(**params)
    with pytest.raises(RequestError) as caught:
        llm.add_request(prompt, sampling)
    assert text in str(caught.value)
    assert not llm.has_unfinished
    if isinstance(prompt, list | dict):
        assert text in str(llm.generate([prompt], sampling)[0].error)


def test_usage_timing_and_stats_add_up(llm) -> None:
    prompts = [ids(150, 7), ids(151, 70)]
    outs = llm.generate(prompts, GREEDY)
    for out, prompt in zip(outs, prompts, strict=True):
        assert out.usage.prompt_tokens == len(prompt)
        assert (out.usage.completion_tokens, out.usage.cached_tokens) == (12, 0)
        t = out.timing
        assert 0 <= t.queue_s <= t.ttft_s <= t.e2e_s
        assert math.isclose(t.tpot_s, (t.e2e_s - t.ttft_s) / 11)
    stats = llm.stats()
    assert stats.output_tokens == 24
    assert stats.prompt_tokens_computed == 77


def test_prompt_progress_is_reported(tiny_model) -> None:
    with engine(tiny_model, max_num_seqs=1, max_num_batched_tokens=64) as llm:
        seen = [out.num_prompt_computed for out in llm.stream(ids(1, 200), GREEDY)]
    assert seen[:4] == [64, 128, 192, 200]


def test_low_precision_runs_and_states_have_their_own_dtype(tiny_model) -> None:
    with LLM(tiny_model, engine={"dtype": "bf16", "max_num_seqs": 2}) as llm:
        assert llm.config.engine.state_dtype == "fp32"
        pool = llm._loop.runner.pool
        assert {t.dtype for t in pool.conv + pool.keys + pool.values} == {torch.bfloat16}
        assert {t.dtype for t in pool.recurrent} == {torch.float32}
        assert llm.generate([ids(1, 70)], GREEDY)[0].error is None
    with LLM(tiny_model, engine={"state_dtype": "bf16", "max_num_seqs": 2}) as llm:
        assert {t.dtype for t in llm._loop.runner.pool.recurrent} == {torch.bfloat16}
        assert llm.generate([ids(1, 70)], GREEDY)[0].error is None


def test_wrong_use_is_told(tiny_model, llm) -> None:
    with pytest.raises(ConfigError, match="2 prompts but 1"):
        llm.generate([[1], [2]], [GREEDY])
    name = llm.add_request([1], GREEDY, request_id="x")
    with pytest.raises(RequestError, match="in use"):
        llm.add_request([1], GREEDY, request_id="x")
    llm.abort(name)
    closed = LLM(tiny_model, engine={"max_num_seqs": 1})
    closed.close()
    closed.close()
    with pytest.raises(EngineError, match="closed"):
        closed.generate([[1]], GREEDY)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": None}, "neither a directory"),
        ({"model": ""}, "neither a directory"),
        ({"model": 5}, "neither a directory"),
        ({"cache": "x"}, "cache: not a mapping"),
        ({"engine": {"max_num_sqs": 1}}, "engine.max_num_sqs"),
        ({"engine": {}, "config": EngineConfig()}, "exclude each other"),
    ],
)
def test_odd_arguments_are_named(arguments, text) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(**arguments)
    assert text in str(caught.value)


def test_params_of_another_type_are_an_error_of_the_request(llm) -> None:
    out = llm.generate([[1]], {"max_tokens": 2})[0]
    assert "dict is no SamplingParams" in out.error.what


def test_one_prompt_need_not_be_in_a_list(llm) -> None:
    by_ids = llm.generate(ids(160, 5), GREEDY)
    in_list = llm.generate([ids(160, 5)], GREEDY)
    assert len(by_ids) == len(in_list) == 1
    assert by_ids[0].outputs[0].token_ids == in_list[0].outputs[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_answers_that_are_known_outlive_a_step_that_is_interrupted(tiny_model, monkeypatch) -> None:
    with LLM(tiny_model, engine={"cpu_memory": "32MiB"}) as llm:
        short = llm.add_request(ids(150, 5), SamplingParams(temperature=0, max_tokens=2))
        stream = llm.stream(ids(151, 5), GREEDY)
        for _ in range(4):
            next(stream)

        def interrupted(batch, awaited):
            raise KeyboardInterrupt

        run = llm._loop.runner.run
        monkeypatch.setattr(llm._loop.runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.step()
        monkeypatch.setattr(llm._loop.runner, "run", run)
        assert [out.finished for out in llm.step() if out.request_id == short][-1]
        stream.close()


def test_ids_that_were_reported_stay_as_they_were_and_are_the_readers_own(tiny_model) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(tiny_model) as llm:
        (expected,) = llm.generate([5, 6, 7], params)
        llm.add_request([5, 6, 7], params)
        seen = []
        while llm.has_unfinished:
            seen += llm.step()
            if len(seen) == 3:
                seen[1].outputs[0].token_ids.append(-1)
                seen[1].outputs[0].token_ids[0] = -1
        early = next(llm.stream([5, 6, 7], params)).outputs[0]
    whole = expected.outputs[0].token_ids
    assert len(whole) == 8
    lengths = [out.usage.completion_tokens for out in seen]
    assert lengths[-1] == 8 and sorted(lengths) == lengths and len(set(lengths)) > 3
    assert seen[1].outputs[0].token_ids == [-1, *whole[1 : lengths[1]], -1]
    del seen[1], lengths[1]
    assert [out.outputs[0].token_ids for out in seen] == [whole[:n] for n in lengths]
    assert vars(pickle.loads(pickle.dumps(early)))["token_ids"] == early.token_ids == whole[:1]
    copied = pickle.loads(pickle.dumps(replace(seen[2].outputs[0], index=3)))
    assert copied == replace(seen[2].outputs[0], index=3)
    assert asdict(copied)["token_ids"] == whole[: lengths[2]]
    assert CompletionOutput(0).token_ids == []
    assert get_type_hints(CompletionOutput)["token_ids"] == list[int]
    assert TypeAdapter(CompletionOutput).validate_python({"index": 1}).token_ids == []


def test_b8_closing_ends_every_request_with_a_last_output(tiny_model) -> None:
    """Whoever reads a stream, or steps, gets a finished output with the reason abort."""
    params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    llm = LLM(tiny_model)
    other = llm.add_request("efgh", params)
    stream = llm.stream("abcd", params)
    first = next(stream)
    assert not first.finished
    llm.close()
    (last,) = list(stream)
    assert last.finished and last.finish_reason == FinishReason.ABORT
    assert last.outputs[0].text.startswith(first.outputs[0].text)
    assert llm.has_unfinished
    *_, out = llm.step()
    assert (out.request_id, out.finished, out.finish_reason) == (other, True, FinishReason.ABORT)
    assert not llm.has_unfinished
    with pytest.raises(EngineError, match="closed"):
        llm.step()
    llm.close()
