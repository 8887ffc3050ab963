"""The engine with a step in flight while the one before is looked at, as on a GPU: nothing else changes."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm_engine import LLM, EngineError, SamplingParams
from minivllm_engine.core.outputs import FinishReason, RequestOutput
from minivllm_engine.runner.sampler import SampleHandle
from support.request_kinds import GREEDY, all_kinds, contents, count_ahead, engine, ids


@pytest.fixture
def llm(tiny_model: Path) -> Iterator[LLM]:
    with engine(tiny_model) as llm:
        yield llm
        llm.check_integrity()
        assert nothing_held(llm)


def nothing_held(llm: LLM) -> bool:
    stats = llm.stats()
    return (stats.kv_blocks_used, stats.state_slots_used) == (0, 0)


@pytest.fixture(scope="module")
def kinds(tiny_model: Path) -> tuple[list[Any], list[SamplingParams], list[Any]]:
    """Prompts, parameters, and what an engine gives for them one by one."""
    prompts, params = all_kinds(tiny_model)
    with engine(tiny_model, overlap=False) as llm:
        alone = [contents(llm.generate([p], s)[0]) for p, s in zip(prompts, params, strict=True)]
    reasons = {output[3] for outputs in alone for output in outputs}
    assert reasons == {FinishReason.LENGTH, FinishReason.STOP}
    return prompts, params, alone


SIZES = [
    {},
    {"max_num_batched_tokens": 7},
    {"max_num_batched_tokens": 1, "max_num_seqs": 2},
    {"num_blocks": 8, "max_num_seqs": 6, "max_num_batched_tokens": 65},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_requests_of_all_kinds_are_answered_as_without(tiny_model, kinds, caplog, sizes) -> None:
    prompts, params, alone = kinds
    with engine(tiny_model, **sizes) as llm:
        ahead = count_ahead(llm)
        outs = llm.generate(prompts, params)
        assert [contents(out) for out in outs] == alone
        assert len(ahead) > 20
        assert "failed" not in caplog.text  # which would be made good silently
        stats = llm.stats()
        assert stats.output_tokens == sum(out.usage.completion_tokens for out in outs)
        assert nothing_held(llm)
        llm.check_integrity()


def test_a_stream_says_the_same_in_pieces(llm, kinds) -> None:
    prompts, params, alone = kinds
    for place in (0, 1, 3, 5, 7, 11, 14, 17):
        seen = list(llm.stream(prompts[place], params[place]))
        whole, expected = contents(seen[-1]), alone[place]
        assert whole == expected
        assert "".join(out.outputs[0].text_delta for out in seen) == expected[0][1]
        assert [out.finished for out in seen] == [False] * (len(seen) - 1) + [True]
        assert not llm.has_unfinished and llm.step() == []


def test_a_closed_stream_leaves_nothing_in_flight(llm) -> None:
    stream = llm.stream(ids(1, 40), GREEDY)
    next(stream)
    assert llm._loop._flight is not None
    stream.close()
    assert llm._loop._flight is None and nothing_held(llm)


# -- aborts, failures, interrupts ----------------------------------------------------------------


class Faults:
    """Lets steps fail: when they are launched, or when their tokens are waited for.

    Attributes:
        at_launch, at_collect: told the sequences of a step, they raise, or do not.
    """

    def __init__(self, llm: LLM) -> None:
        runner = llm._loop.runner
        self.at_launch: Callable[[Any], None] = lambda sequences: None
        self.at_collect: Callable[[Any], None] = lambda sequences: None
        self._run, self._draw, self._sequences = runner.run, runner.draw, []
        runner.run, runner.draw = self.run, self.draw

    def run(self, batch, awaited):
        output = self._run(batch, awaited)
        self._sequences = batch.sequences
        self.at_launch(self._sequences)
        return output

    def draw(self, output, rows):
        return _Doubtful(self._draw(output, rows), self._sequences, self)


class _Doubtful:
    def __init__(self, draw: SampleHandle, sequences: Any, faults: Faults) -> None:
        self.token_ids = draw.token_ids
        self._draw, self._sequences, self._faults = draw, sequences, faults

    def results(self):
        self._faults.at_collect(self._sequences)
        return self._draw.results()


def raise_for(first: int, at: int, error: type[BaseException], times: int = 10**9):
    """Raises for a step that gives token number `at` of a request whose prompt begins with `first`."""
    left = [times]

    def fault(sequences: Any) -> None:
        for sequence in sequences:
            prompt = sequence.request.prompt_ids
            given = sequence.start + sequence.length - len(prompt)
            if prompt[0] == first and given == at and left[0]:
                left[0] -= 1
                raise error("planted")

    return fault


def run_to_end(llm: LLM) -> dict[str, RequestOutput]:
    outs = {}
    while llm.has_unfinished:
        outs |= {out.request_id: out for out in llm.step() if out.finished}
        llm.check_integrity()
    return outs


PROMPTS = [[10 + i, *ids(20 + i, 20 + 13 * i)] for i in range(4)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    with engine(tiny_model, overlap=False) as llm:
        return [llm.generate([p], GREEDY)[0].outputs[0].token_ids for p in PROMPTS]


@pytest.mark.parametrize("at", [0, 1, 5, 11])
@pytest.mark.parametrize("when", ["at_launch", "at_collect"])
def test_e9_a_failing_step_costs_the_request_to_blame_only(llm, expected, when, at) -> None:
    faults = Faults(llm)
    setattr(faults, when, raise_for(12, at, RuntimeError))
    outs = llm.generate(PROMPTS, GREEDY)
    for place, (out, tokens) in enumerate(zip(outs, expected, strict=True)):
        if place == 2:
            assert out.error.code == "engine_error" and "planted" in out.error.what
            assert out.outputs[0].token_ids == tokens[:at]
        else:
            assert out.error is None and out.outputs[0].token_ids == tokens
    setattr(faults, when, lambda sequences: None)
    assert [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["at_launch", "at_collect"])
@pytest.mark.parametrize("at", [0, 4])
def test_a_step_that_fails_once_costs_nobody_anything(llm, expected, when, error, at) -> None:
    faults = Faults(llm)
    names = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    setattr(faults, when, raise_for(12, at, error, times=1))
    outs, interrupts = {}, 0
    while llm.has_unfinished:
        try:
            outs |= {out.request_id: out for out in llm.step() if out.finished}
        except KeyboardInterrupt:
            interrupts += 1
            assert llm._loop._flight is None and nothing_held(llm)
        llm.check_integrity()
    assert interrupts == (error is KeyboardInterrupt)
    assert [outs[name].outputs[0].token_ids for name in names] == expected


def test_random_aborts_failures_and_cleared_caches_change_no_answer(tiny_model) -> None:
    prompts = [ids(i, 5 + 11 * i) for i in range(8)]
    prompts += [prompts[-1][:64] + ids(40 + i, 9) for i in range(3)]
    params = [GREEDY.model_copy(update={"max_tokens": 3 + 2 * i}) for i in range(11)]
    params[3] = params[3].model_copy(update={"n": 3, "temperature": 1.0, "seed": 1})
    with engine(tiny_model, overlap=False) as llm:
        alone = [contents(llm.generate([p], s)[0]) for p, s in zip(prompts, params, strict=True)]
    rng, complete, cut = random.Random(5), 0, 0
    with engine(tiny_model, num_blocks=14, max_num_batched_tokens=70) as llm:
        faults = Faults(llm)

        def sometimes(sequences: Any) -> None:
            if rng.random() < 0.02:
                raise RuntimeError("planted")

        faults.at_launch = faults.at_collect = sometimes
        for _ in range(25):
            todo = rng.sample(range(len(prompts)), 6)
            asked: dict[str, int] = {}
            aborted: set[str] = set()
            outs: dict[str, RequestOutput] = {}
            while todo or llm.has_unfinished:
                while todo and rng.random() < 0.4:
                    place = todo.pop()
                    asked[llm.add_request(prompts[place], params[place])] = place
                if asked and rng.random() < 0.03:
                    ended = llm.abort(rng.choice(list(asked)))
                    if ended is not None:
                        aborted.add(ended.request_id)
                        outs[ended.request_id] = ended
                    llm.check_integrity()
                if rng.random() < 0.03:
                    llm.clear_cache()
                outs |= {out.request_id: out for out in llm.step() if out.finished}
                llm.check_integrity()
            assert set(outs) == set(asked) and nothing_held(llm)
            for name, out in outs.items():
                whole = alone[asked[name]]
                if name in aborted or out.error is not None:
                    cut += 1
                    for output, entire in zip(out.outputs, whole, strict=True):
                        assert output.token_ids == entire[0][: len(output.token_ids)]
                else:
                    complete += 1
                    assert contents(out) == whole
    assert complete > 80 and cut > 15


def test_dead_logits_with_a_step_in_flight_leave_nothing_in_the_cache(tiny_model) -> None:
    bad, good = ids(60, 30), ids(61, 30)
    params = GREEDY.model_copy(update={"max_tokens": 80})
    with engine(tiny_model) as llm:
        expected = llm.generate([good], params)[0].outputs[0].token_ids
        llm.clear_cache()
        names = [llm.add_request(prompt, params) for prompt in (bad, good)]
        llm.step()
        request = next(r for r in llm._scheduler.running if r.request_id == names[0])
        # Till the end of a block is computed by the step in flight.
        while request.num_launched_tokens < 64:
            llm.step()
        assert llm.cached_prefix([*bad, *request.output_ids]).kv_matched >= 32
        for tensor in llm._loop.runner.pool.recurrent:
            tensor[request.slot] = float("nan")
        outs = run_to_end(llm)
        assert outs[names[0]].error.code == "non_finite_logits"
        given = outs[names[0]].outputs[0].token_ids
        assert llm.cached_prefix([*bad, *given, 1]).kv_matched == 0
        assert outs[names[1]].outputs[0].token_ids == expected
        for node in llm._cache.walk():
            assert llm._loop.runner.pool.keys[0][node.block].isfinite().all()
        assert nothing_held(llm)


def test_a_cache_that_is_cleared_with_a_step_in_flight_keeps_nothing_wrong(llm, expected) -> None:
    for steps in range(1, 8):
        names = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
        for _ in range(steps):
            llm.step()
        llm.clear_cache()
        llm.check_integrity()
        outs = run_to_end(llm)
        assert [outs[name].outputs[0].token_ids for name in names] == expected


def test_an_engine_can_be_closed_with_a_step_in_flight(tiny_model) -> None:
    llm = engine(tiny_model)
    llm.add_request(ids(1, 40), GREEDY)
    llm.step()
    assert llm._loop._flight is not None
    llm.close()
    llm.close()
    assert llm._loop._flight is None and llm._loop.runner is None
    assert llm.step()[-1].finish_reason == FinishReason.ABORT
    assert not llm.has_unfinished
    with pytest.raises(EngineError, match="closed"):
        llm.step()


def test_an_id_may_be_used_again_with_a_step_of_its_first_use_in_flight(llm, expected) -> None:
    llm.add_request(PROMPTS[1], GREEDY)  # so that the step goes on
    llm.add_request(PROMPTS[0], GREEDY, request_id="x")
    llm.step()
    first = llm.abort("x")
    llm.add_request(PROMPTS[2], GREEDY, request_id="x")
    outs = run_to_end(llm)
    assert first.outputs[0].token_ids == expected[0][:1]
    assert outs["x"].outputs[0].token_ids == expected[2]


@pytest.mark.parametrize(
    "update", [{}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.3, "min_tokens": 4}], ids=str
)
def test_nobody_waits_for_tokens_whose_penalties_need_them(llm, update) -> None:
    ahead = count_ahead(llm)
    llm.generate([ids(1, 9)], GREEDY.model_copy(update=update))
    assert len(ahead) == 11


def test_a_token_is_awaited_from_behind_a_chunk_that_gives_none(llm, caplog) -> None:
    prompts = [ids(1, 90), ids(2, 20), ids(3, 100), ids(4, 30)]
    together = llm.generate(prompts, GREEDY)
    assert "failed" not in caplog.text
    llm._loop.overlap = False
    for prompt, out in zip(prompts, together, strict=True):
        llm.clear_cache()
        assert contents(llm.generate([prompt], GREEDY)[0]) == contents(out)
