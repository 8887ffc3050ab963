"""The demo model's answers are those of the CPU: in fp32 but for ties, in bf16 but for near ties."""

from collections.abc import Iterator

import pytest

from demo_training.checks import fixture_checks
from demo_training.entries import Dictionary, load_entries
from minivllm_engine import LLM, SamplingParams
from support.device_engine import Rig
from support.engine_checks.overlap import check_one_answer
from support.on_card import needs_card
from support.oracle import Oracle, agrees

pytestmark = needs_card

NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def chats() -> list[dict]:
    """Every kind of question that the model is made for."""
    checks = fixture_checks(Dictionary(load_entries()))[::40]
    return [{"messages": [{"role": "user", "content": check.users[0]}]} for check in checks]


@pytest.fixture(scope="module")
def fp32(rig: Rig) -> Iterator[LLM]:
    with rig.engine("demo", max_num_seqs=16, largest_graph=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def bf16(rig: Rig) -> Iterator[LLM]:
    with rig.engine("demo", dtype="bf16", max_num_seqs=64, largest_graph=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(fp32: LLM, chats: list[dict]) -> list:
    oracle = Oracle("demo", NEW_TOKENS, device="cpu")
    return [oracle(fp32.tokenizer.encode_chat(chat["messages"])) for chat in chats]


def left_at_a_tie(llm: LLM, chats: list[dict], answers: list, **bounds: float) -> int:
    llm.clear_cache()
    outs = llm.generate(chats, GREEDY)
    assert not any(out.error for out in outs)
    return sum(
        not agrees(out.outputs[0], answer, **bounds)
        for out, answer in zip(outs, answers, strict=True)
    )


@pytest.mark.parametrize("graphs", [True, False], ids=["graph", "eager"])
def test_in_fp32(fp32: LLM, chats: list[dict], answers: list, graphs: bool) -> None:
    fp32.use_graphs(graphs)
    assert left_at_a_tie(fp32, chats, answers) <= 1


@pytest.mark.parametrize("graphs", [True, False], ids=["graph", "eager"])
def test_in_bf16(bf16: LLM, chats: list[dict], answers: list, graphs: bool) -> None:
    """Logprobs within 0.5 of those in fp32; where the best two lie closer than that, either is right.

    On a CPU bf16 is up to 0.24 off, and leaves a sixth of such answers at a tie.
    """
    bf16.use_graphs(graphs)
    left = left_at_a_tie(bf16, chats, answers, tie=0.5, tolerance=0.5)
    print(f"{left} of {len(chats)} left at a tie")
    assert left <= len(chats) / 3


@pytest.mark.parametrize("temperature", [0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no_cache"])
def test_64_equal_requests_have_one_answer(bf16: LLM, temperature: float, cached: bool) -> None:
    """bf16, graph, all 64 in one batch."""
    bf16.use_graphs(True)
    params = SamplingParams(
        temperature=temperature, seed=7, max_tokens=32, ignore_eos=True, prefix_cache=cached
    )
    chat = {"messages": [{"role": "user", "content": "Define aardvark."}]}
    assert len(check_one_answer(bf16, chat, params, 64)) == 32
    assert bf16.stats().state_slots_peak == 64
