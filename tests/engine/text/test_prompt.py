"""Prompts in their forms: what a library throws at a text, and texts that cannot fit."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm_engine.checkpoint.index import resolve_model
from minivllm_engine.core.errors import RequestError
from minivllm_engine.text.prompt import PromptTooLong, read_prompt
from minivllm_engine.text.tokenizer import Tokenizer
from support.byte_tokenizer import byte_backend, byte_tokenizer
from support.fuzzing import examples

DEMO = Tokenizer.from_dir(resolve_model("demo"))


class Backend:
    """A tokenizer whose `encode` does something else."""

    def __init__(self, encode: Callable[..., Any]) -> None:
        self.encode = encode
        self._backend = byte_backend()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def test_b1_a_panic_of_the_library_costs_one_request(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RequestError) as caught:
        read_prompt(" " * 12_000_000 + "x", DEMO)
    assert caught.value.what == "the tokenizer fails on this text" and caught.value.why
    assert read_prompt("Hi", DEMO)[0] == DEMO.encode("Hi")
    capfd.readouterr()  # Rust has said something, too


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_b1_what_is_meant_for_the_program_passes(error: type[BaseException]) -> None:
    def encode(*_: Any, **__: Any) -> None:
        raise error

    with pytest.raises(error):
        read_prompt("x", Tokenizer(Backend(encode), {}, None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt", ["é" * 3000, {"prompt": "x" * 2000}, [{"role": "user", "content": "x" * 2000}]]
)
def test_b2_a_text_that_cannot_fit_is_refused_without_being_encoded(prompt: Any) -> None:
    def encode(*_: Any, **__: Any) -> None:
        raise AssertionError("it was encoded")

    tokenizer = Tokenizer(Backend(encode), {}, "{{ messages[0].content }}")  # type: ignore[arg-type]
    with pytest.raises(PromptTooLong) as caught:
        read_prompt(prompt, tokenizer, 100)
    assert caught.value.code == "prompt_too_long"
    assert caught.value.num_tokens >= 2000 // len("<|endoftext|>") - 1


@settings(max_examples=examples(100), deadline=None)
@given(st.text(), st.integers(1, 40))
def test_b2_no_text_has_fewer_tokens_than_its_least(text: str, times: int) -> None:
    for tokenizer in (byte_tokenizer(), DEMO):
        for one in (text * times, unicodedata.normalize("NFD", text * times)):
            assert tokenizer.least_tokens(one) <= len(tokenizer.encode(one))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "Removed",
                "invert": False,
            }
        },
    ],
)
def test_b2_nothing_is_said_of_text_that_may_lose_bytes(
    change: dict[str, Any], tmp_path: Path
) -> None:
    content = json.loads(byte_backend().to_str()) | change
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    assert Tokenizer(backend, {}, None).least_tokens(" " * 5000) == 0


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        (5, "a prompt is text, token ids or an object"),
        ({}, "a prompt needs one of"),
        ({"prompt": "x", "enable_thinking": True}, "enable_thinking: unknown key beside prompt"),
        ({"prompt_token_ids": [1], "tools": []}, "tools: unknown key beside prompt_token_ids"),
        ([{"role": "user", "content": "x"}, {"content": "x"}], "messages[1] has no role"),
        ({"messages": []}, "messages is empty"),
    ],
)
def test_what_is_no_prompt(prompt: Any, what: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_prompt(prompt, byte_tokenizer())
    assert caught.value.what.startswith(what)
