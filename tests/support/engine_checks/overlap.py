"""Requests that come, end and fail while steps are in flight: the others never notice."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.core.outputs import FinishReason, RequestOutput
from support.engine_checks import (
    assert_nothing_held,
    finish_all,
    greedy_params,
    random_prompts,
    start_anew,
)
from support.oracle import OracleAnswer, agrees

NEW_TOKENS = 12
LENGTHS = (1, 2, 3, 9, 17, 33, 63, 64, 65, 66, 90, 129)


def answer_alone(llm: LLM, prompt: list[int], max_tokens: int = NEW_TOKENS) -> OracleAnswer:
    """What the engine says to a prompt that nobody is beside and nothing was before."""
    start_anew(llm)
    params = greedy_params(max_tokens).model_copy(update={"logprobs": 2})
    output = llm.generate([prompt], params)[0].outputs[0]
    best = tuple((p.top[0].logprob, p.top[1].logprob) for p in output.logprobs)
    return OracleAnswer(tuple(output.token_ids), best)


@dataclass
class Schedule:
    """Random arrivals and aborts. Greedy requests are held against their answers alone."""

    llm: LLM
    rng: random.Random
    prompts: list[list[int]]
    alone: list[OracleAnswer]
    asked: dict[str, int] = field(default_factory=dict)
    cut: dict[str, tuple[int, ...]] = field(default_factory=dict)
    finished: dict[str, RequestOutput] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    ties: int = 0

    def add(self) -> None:
        number, kind = self.rng.randrange(len(self.prompts)), self.rng.random()
        prompt, answer = self.prompts[number], self.alone[number]
        if kind < 0.2:
            # A bystander: drawn, with penalties at times, in the same steps.
            params = SamplingParams(
                temperature=0.9,
                max_tokens=self.rng.randint(1, NEW_TOKENS),
                repetition_penalty=self.rng.choice([1.0, 1.2]),
                n=self.rng.choice([1, 1, 2]),
                ignore_eos=True,
            )
            self.llm.add_request(prompt, params)
            self.seen["sampled"] += 1
            return
        params = greedy_params(self.rng.choice([1, 5, NEW_TOKENS, NEW_TOKENS]))
        stop: tuple[int, ...] = ()
        if kind < 0.5:
            # An end that the host learns of when the next step is under way already.
            stop = (answer.ids[self.rng.randrange(NEW_TOKENS)],)
            params = params.model_copy(update={"stop_token_ids": stop})
        name = self.llm.add_request(prompt, params)
        self.asked[name], self.cut[name] = number, stop

    def abort(self) -> None:
        if self.llm._loop.request_states:
            name = self.rng.choice(sorted(self.llm._loop.request_states))
            in_flight = self.llm._loop._flight is not None
            out = self.llm.abort(name)
            # Of several outputs some may have ended before.
            assert out is not None
            assert FinishReason.ABORT in {output.finish_reason for output in out.outputs}
            self.seen["aborted in flight" if in_flight else "aborted"] += 1
            if name in self.asked:
                self.finished[name] = out

    def step(self) -> None:
        for out in self.llm.step():
            if out.finished and out.request_id in self.asked:
                self.finished[out.request_id] = out

    def run(self, count: int) -> None:
        start_anew(self.llm)
        left = count
        while left or self.llm.has_unfinished:
            while left and self.rng.random() < 0.5:
                self.add()
                left -= 1
            if self.rng.random() < 0.06:
                self.abort()
                self.llm.check_integrity()
            self.step()
            self.llm.check_integrity()
        assert set(self.finished) == set(self.asked)
        for name, out in self.finished.items():
            self._check(name, out)
        assert_nothing_held(self.llm)

    def _check(self, name: str, out: RequestOutput) -> None:
        assert out.error is None
        output, answer = out.outputs[0], self.alone[self.asked[name]]
        same = agrees(output, answer)
        self.ties += not same
        self.seen["greedy"] += 1
        stop = self.cut[name]
        if stop and same and output.finish_reason is not FinishReason.ABORT:
            self.seen["stopped"] += output.finish_reason is FinishReason.STOP
            first = answer.ids.index(stop[0])
            before = [i for i in output.token_ids if i == stop[0]]
            assert len(output.token_ids) <= first + 1 and len(before) <= 1


def check_random_schedules(llm: LLM, *, schedules: int, requests: int) -> None:
    """Arrivals, aborts and stops at random while steps are in flight; few blocks, so that some wait."""
    prompts = random_prompts(21, LENGTHS)
    prompts.append(prompts[-1][:100] + prompts[-2][:20])  # begins like another one
    alone = [answer_alone(llm, prompt) for prompt in prompts]
    seen: Counter[str] = Counter()
    ties = 0
    for number in range(schedules):
        llm.use_graphs(number % 4 != 3)
        schedule = Schedule(llm, random.Random(number), prompts, alone)
        schedule.run(requests)
        seen += schedule.seen
        ties += schedule.ties
    llm.use_graphs(True)
    print(dict(seen), f"{ties} left at a tie")
    assert ties <= max(1, seen["greedy"] / 1000)
    for kind in ("greedy", "sampled", "stopped", "aborted in flight"):
        assert seen[kind] > 0, f"no request was {kind}"


def check_stop_strings(llm: LLM) -> None:
    """A stop string ends one output while the step after it is in flight; the others go on."""
    prompts = random_prompts(31, [5, 9, 30, 70])
    alone = [answer_alone(llm, prompt) for prompt in prompts]
    start_anew(llm)
    # Of the byte tokenizer the first ids are the bytes.
    place, byte = next(
        (i, id_) for i, answer in enumerate(alone) for id_ in answer.ids[1:8] if 33 <= id_ < 127
    )
    stop, end = chr(byte), alone[place].ids.index(byte) + 1
    params = [greedy_params(NEW_TOKENS) for _ in prompts]
    params[place] = greedy_params(NEW_TOKENS, stop=(stop,))
    outs = llm.generate(prompts, params)
    assert outs[place].finish_reason is FinishReason.STOP
    assert stop not in outs[place].text
    assert outs[place].outputs[0].token_ids == list(alone[place].ids[:end])
    for out, answer in zip(outs, alone, strict=True):
        assert out.error is None
        agrees(out.outputs[0], answer)
    assert_nothing_held(llm)


def check_failures_in_flight(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step fails as it is launched, with the one before it in flight: one request is to blame, and the
    others have their answers.
    """
    prompts = random_prompts(41, [10, 11, 12, 70])
    alone = [answer_alone(llm, prompt) for prompt in prompts]
    start_anew(llm)
    runner, poison, failures = llm._loop.open_runner(), prompts[2][0], []
    run = runner.run

    def failing(batch, awaited):
        output = run(batch, awaited)
        for sequence in batch.sequences:
            request = sequence.request
            at = sequence.start + sequence.length - len(request.prompt_ids)
            if request.prompt_ids[0] == poison and at == 4:
                failures.append(awaited is not None)
                raise RuntimeError("planted")
        return output

    monkeypatch.setattr(runner, "run", failing)
    names = [llm.add_request(prompt, greedy_params(NEW_TOKENS)) for prompt in prompts]
    finished = finish_all(llm)
    monkeypatch.undo()
    bad = finished[names.pop(2)]
    assert bad.error is not None and "planted" in bad.error.what
    assert len(bad.outputs[0].token_ids) == 4
    assert failures[0], "the first failure had no step in flight before it"
    for name, answer in zip(names, alone[:2] + alone[3:], strict=True):
        assert finished[name].error is None
        assert len(finished[name].outputs[0].token_ids) == NEW_TOKENS
        agrees(finished[name].outputs[0], answer)
    assert_nothing_held(llm)


def check_one_answer(llm: LLM, prompt: object, params: SamplingParams, count: int) -> list[int]:
    """The same request `count` times at once gives exactly one answer. Returns its ids."""
    start_anew(llm)
    outs = llm.generate([prompt] * count, params)
    assert not any(out.error for out in outs)
    answers = {tuple(out.outputs[0].token_ids) for out in outs}
    assert len(answers) == 1, f"{len(answers)} answers to {count} equal requests"
    assert_nothing_held(llm)
    return list(answers.pop())
