"""Where a continuation begins: always at a boundary of the whole text's tokens, and never nowhere."""

from pathlib import Path

import pytest

import minivllm_engine
from minivllm_engine.core.errors import RequestError
from minivllm_engine.text.continuations import read_score
from minivllm_engine.text.tokenizer import Tokenizer

CONTEXTS = ("Answer:", "the", "Mean", "defin", "a large", "A tool for ", "", "water\n")
ENDS = (" A", "A", "re", "ing", "ition", "n", "\n", " of the", "é", "河")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(Path(minivllm_engine.__file__).parent / "demo")


def test_the_ids_are_those_of_the_whole_text_and_one_is_scored_at_least(tokenizer) -> None:
    across = 0
    for context in CONTEXTS:
        own = tuple(tokenizer.encode(context))
        ready = read_score({"prompt": context, "continuations": list(ENDS)}, tokenizer)
        assert ready.prompt_ids == own
        for end, one in zip(ENDS, ready.continuations, strict=True):
            assert (*one.context_ids, *one.token_ids) == tuple(tokenizer.encode(context + end))
            assert one.token_ids
            assert one.context_ids == own[: len(one.context_ids)]
            assert one.num_bytes == len(end.encode())
            across += len(one.context_ids) < len(own)
    assert across >= 8, "hardly a token spans a join: the texts prove nothing"


def test_behind_messages_and_ids_both_are_encoded_apart(tokenizer) -> None:
    messages = [{"role": "user", "content": "Define water."}]
    chat = tokenizer.encode_chat(messages)
    ready = read_score({"messages": messages, "continuations": ["ition"]}, tokenizer)
    (one,) = ready.continuations
    assert one.context_ids == tuple(chat)
    assert one.token_ids == tuple(tokenizer.encode("ition"))
    ids = tokenizer.encode("defin")
    (one,) = read_score(
        {"prompt_token_ids": ids, "continuations": ["ition"], "prefix_token_id": 3}, tokenizer
    ).continuations
    assert one.context_ids == (3, *ids)
    (one,) = read_score(
        {"prompt": "defin", "continuation_token_ids": [[5, 6]]}, tokenizer
    ).continuations
    assert (one.context_ids, one.token_ids) == (tuple(ids), (5, 6))
    assert one.num_bytes == len(tokenizer.token_bytes(5) + tokenizer.token_bytes(6))


def test_what_cannot_fit_is_refused_before_it_is_encoded(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(tokenizer, "_encode", lambda text: pytest.fail("it was encoded"))
    with pytest.raises(RequestError, match=r"\d+ prompt tokens > max_model_len 64$") as found:
        read_score({"prompt": "water " * 100_000, "continuations": ["x"]}, tokenizer, 64)
    assert found.value.code == "prompt_too_long"
