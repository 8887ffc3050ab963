"""The shipped model through the engine: its answers are known, so damage to a state shows as a wrong word."""

from collections.abc import Callable, Iterator

import pytest
import torch

from demo_training.checks import Check, RecallChecks, ask_all, fixture_checks, score
from demo_training.entries import Dictionary, load_entries
from demo_training.evaluate import EngineAnswerer
from demo_training.report import AT_LEAST
from minivllm_engine import LLM, SamplingParams
from minivllm_engine.core.request import Request

GREEDY = SamplingParams(temperature=0, max_tokens=96)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", engine={"max_num_seqs": 32, "cpu_memory": "128MiB"}) as llm:
        yield llm


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    return fixture_checks(Dictionary(load_entries()))


@pytest.fixture(scope="module")
def figures(llm: LLM, checks: list[Check]) -> dict[str, tuple[int, int]]:
    """(exact, all) for each kind of check, asked turn by turn."""
    answerer = EngineAnswerer(llm)
    figures = score(checks, ask_all(checks, answerer))
    assert answerer.errors == 0
    return figures


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("define", 400),
        ("define_untrained", 100),
        ("chain_turn_2", 60),
        ("chain_turn_3", 60),
        ("unknown", 100),
    ],
)
def test_answers_reach_their_target(figures, kind: str, count: int) -> None:
    exact, total = figures[kind]
    assert total == count
    assert exact >= AT_LEAST[kind] * total


def test_recall_from_context_reaches_its_target(figures) -> None:
    # Each kind alone is too small a sample for a share of 98 %.
    recall = [pair for kind, pair in figures.items() if kind.startswith("recall_")]
    exact, total = map(sum, zip(*recall, strict=True))
    assert total >= 100
    assert exact >= 0.97 * total


def test_known_words_are_not_refused(figures) -> None:
    refused, total = figures["define_refused"]
    assert refused <= 0.01 * total


def share_right(checks: list[Check], damage: Callable[[LLM, Request], None]) -> float:
    """Share of right answers when `damage` is done once, at the last block boundary of each prompt."""
    right = 0
    with LLM("demo", engine={"max_num_seqs": 1, "max_num_batched_tokens": 64}) as llm:
        for check in checks:
            llm.add_request({"messages": [{"role": "user", "content": check.users[0]}]}, GREEDY)
            boundary = (len(llm._scheduler.waiting[0].prompt_ids) - 1) // 64 * 64
            while llm.has_unfinished:
                outs = llm.step()
                running = llm._scheduler.running
                if running and running[0].num_computed_tokens == boundary:
                    damage(llm, running[0])
            right += outs[-1].text == check.expected[0]
    return right / len(checks)


@pytest.fixture(scope="module")
def recall_over_a_boundary(llm: LLM) -> list[Check]:
    """Recall prompts with a block boundary one to three tokens before their end.

    What was said long ago the model finds through its attention layers; the state carries what it has
    just read, so the boundary has to lie there.
    """

    def past_boundary(check: Check) -> int:
        messages = [{"role": "user", "content": check.users[0]}]
        return len(llm.tokenizer.encode_chat(messages)) % 64

    recall = RecallChecks(Dictionary(load_entries()), seed=80)
    candidates = (check for pairs in range(4, 17) for check in recall.pairs(pairs, 40))
    return [check for check in candidates if past_boundary(check) in (1, 2, 3)][:20]


def test_recall_over_a_boundary_is_right_without_damage(recall_over_a_boundary) -> None:
    assert len(recall_over_a_boundary) >= 15
    assert share_right(recall_over_a_boundary, lambda llm, request: None) >= 0.9


def test_negative_control_a_zeroed_state_breaks_recall(recall_over_a_boundary) -> None:
    def zero_recurrent(llm: LLM, request: Request) -> None:
        for tensor in llm._loop.runner.pool.recurrent:
            tensor[request.slot] = 0

    assert share_right(recall_over_a_boundary, zero_recurrent) <= 0.2


def test_negative_control_a_dropped_conv_state_changes_the_output(llm, checks) -> None:
    def logprobs(drop: bool) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=0)
        llm.add_request({"messages": [{"role": "user", "content": checks[0].users[0]}]}, params)
        while llm.has_unfinished:
            outs = llm.step()
            if drop and llm._scheduler.running:
                (request,) = llm._scheduler.running
                for tensor in llm._loop.runner.pool.conv:
                    tensor[request.slot] = 0
        return [position.sampled.logprob for position in outs[-1].outputs[0].logprobs]

    clean, dropped = logprobs(False), logprobs(True)
    assert clean[0] == dropped[0]
    assert any(abs(a - b) > 0.1 for a, b in zip(clean, dropped, strict=False))


def test_answers_do_not_depend_on_dead_memory(llm, checks) -> None:
    prompts = [{"messages": [{"role": "user", "content": check.users[0]}]} for check in checks[:16]]
    before = llm.generate(prompts, GREEDY)
    llm.clear_cache()
    llm._loop.runner.pool.fill_(float("nan"))
    after = llm.generate(prompts, GREEDY)
    assert [out.text for out in before] == [out.text for out in after]
    assert torch.isnan(llm._loop.runner.pool.keys[0]).any()
