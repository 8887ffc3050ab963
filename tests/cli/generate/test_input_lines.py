"""Lines of the input: what each kind becomes, and what is wrong with the odd ones."""

import json
from typing import Any

import pytest

from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.protocol.line_parser import LineParser
from minivllm_engine.protocol.lines import BadLine, RequestLine


def _parse(line: Any, parser: LineParser | None = None, number: int = 7) -> RequestLine | BadLine:
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    return (parser or LineParser()).parse(number, number - 1, raw)


def _good(line: Any, parser: LineParser | None = None) -> RequestLine:
    found = _parse(line, parser)
    assert isinstance(found, RequestLine), found
    return found


def _bad(line: Any, parser: LineParser | None = None) -> tuple[str, int, str]:
    found = _parse(line, parser)
    assert isinstance(found, BadLine), found
    return found.code, found.column, found.message


_HI = [{"role": "user", "content": "Hi"}]


def _batch(*, completions: bool = False, **body: Any) -> dict[str, Any]:
    url = "/v1/completions" if completions else "/v1/chat/completions"
    prompt = {} if completions else {"messages": _HI}
    return {"custom_id": "r", "method": "POST", "url": url, "body": {**prompt, **body}}


class TestKinds:
    def test_prompt(self) -> None:
        line = _good({"id": "a1", "prompt": "Hi", "max_tokens": 16, "temperature": 0, "topic": "x"})
        assert (line.id, line.kind, line.prompt, line.meta) == (
            "a1",
            "prompt",
            "Hi",
            {"topic": "x"},
        )
        assert (line.params.max_tokens, line.params.temperature) == (16, 0)

    def test_messages_with_template_arguments(self) -> None:
        kwargs = {"enable_thinking": False}
        line = _good({"messages": _HI, "chat_template_kwargs": kwargs, "tools": [{"name": "t"}]})
        assert (line.id, line.kind) == ("line-000007", "messages")
        assert (line.template_kwargs, line.tools) == (kwargs, [{"name": "t"}])

    def test_token_ids_with_nested_sampling(self) -> None:
        line = _good({"prompt_token_ids": [1, 2], "sampling": {"top_p": 0.8, "seed": 7}, "n": 2})
        assert (line.kind, line.prompt, line.params.seed, line.params.n) == ("tokens", [1, 2], 7, 2)

    def test_an_openai_batch_line(self) -> None:
        body = {"model": "x", "messages": _HI, "max_completion_tokens": 64, "user": "u"}
        url = "/v1/chat/completions"
        line = _good({"custom_id": "r-1", "method": "POST", "url": url, "body": body})
        assert (line.id, line.kind, line.params.max_tokens) == ("r-1", "messages", 64)
        assert line.batch is not None
        assert line.batch.model == "x"

    def test_openai_logprobs(self) -> None:
        assert _good({"prompt": "x", "logprobs": True, "top_logprobs": 4}).params.logprobs == 4
        assert _good({"prompt": "x", "logprobs": True}).params.logprobs == 0
        assert _good({"prompt": "x", "logprobs": False}).params.logprobs is None
        assert _good({"prompt": "x", "logprobs": 3}).params.logprobs == 3

    def test_text_lines_are_taken_whole(self) -> None:
        line = _good(b' {"not": json} ', LineParser(as_text=True))
        assert (line.kind, line.prompt) == ("text", ' {"not": json} ')

    def test_the_line_beats_the_default_and_the_force_beats_the_line(self) -> None:
        parser = LineParser(defaults={"logprobs": 1, "seed": 1}, forced={"temperature": 0})
        params = _good({"prompt": "x", "seed": 2, "temperature": 1}, parser).params
        assert (params.logprobs, params.seed, params.temperature) == (1, 2, 0)

    def test_null_means_absent(self) -> None:
        line = _good({"id": None, "prompt": "x", "messages": None, "seed": None, "sampling": None})
        assert (line.id, line.params.seed) == ("line-000007", None)

    def test_numbers_are_ids_too(self) -> None:
        assert _good({"id": 5, "prompt": "x"}).id == 5


class TestBadLines:
    @pytest.mark.parametrize(
        ("raw", "column", "message"),
        [
            (b"null", 1, "not a JSON object but null"),
            (b"  [1,2]", 3, "not a JSON object but an array"),
            (b'"text"', 1, "not a JSON object but a string"),
            (b"{'a': 1}", 2, "not JSON: Expecting property name enclosed in double quotes"),
            (b'{"prompt": "x"', 15, "not JSON: Expecting ',' delimiter"),
            (b'{"prompt": "x"} {}', 17, "not JSON: Extra data"),
            (b'{"prompt": "x}', 12, "not JSON: Unterminated string starting at column 12"),
            (b'{"prompt": "a\tb"}', 14, "not JSON: Invalid control character at column 14"),
            (b'{"prompt": "x", "prompt": "y"}', 17, "duplicate key 'prompt'"),
            (b'{"prompt": "x", "m": {"a": 1, "a": 2}}', 31, "duplicate key 'a'"),
            (b'{"prompt": "x", "seed": NaN}', 25, "NaN is not JSON"),
            (b'{"prompt": "x", "y": -Infinity}', 22, "-Infinity is not JSON"),
            (b'{"prompt": "x", "y": 1e999}', 22, "number 1e999 is out of range"),
            (b'{"prompt": "caf\xe9"}', 16, "not UTF-8 (byte 0xe9)"),
            (b'{"prompt": "\xc3\xa9\xff"}', 14, "not UTF-8 (byte 0xff)"),
            (b"\xff\xfe{\x00", 1, "not UTF-8 (byte 0xff)"),
            (b"[" * 100_000, 1, "not JSON: nested too deeply"),
            (
                b'{"prompt": "x", "y": %s}' % (b"[" * 200 + b"]" * 200),
                1,
                "not JSON: nested too deeply",
            ),
        ],
    )
    def test_h16_lines_that_are_no_json_object(self, raw: bytes, column: int, message: str) -> None:
        assert _bad(raw) == ("invalid_json_line", column, message)

    @pytest.mark.parametrize(
        ("line", "column", "message"),
        [
            ({}, 1, "no prompt, messages or prompt_token_ids"),
            ({"prompt": "x", "messages": _HI}, 17, "prompt and messages exclude each other"),
            ({"prompt": 3}, 2, "prompt should be a string"),
            ({"messages": "Hi"}, 2, "messages: not a list of objects"),
            ({"messages": ["Hi"]}, 2, "messages[0] should be an object"),
            ({"messages": [{"content": "Hi"}]}, 2, "messages[0] has no role"),
            ({"messages": [{"role": "user"}]}, 2, "messages[0] has no content"),
            (
                {"messages": [{"role": "user", "content": 3}]},
                2,
                "messages[0].content should be a string",
            ),
            ({"prompt_token_ids": [1, "2"]}, 2, "prompt_token_ids should be an array of token ids"),
            ({"prompt_token_ids": [True]}, 2, "prompt_token_ids should be an array of token ids"),
            ({"prompt_token_ids": [-1]}, 2, "prompt_token_ids should be an array of token ids"),
            ({"prompt": "x", "tools": {}}, 17, "tools should be an array of objects"),
            (
                {"prompt": "x", "chat_template_kwargs": 1},
                17,
                "chat_template_kwargs should be an object",
            ),
            ({"prompt": "x", "sampling": 1}, 17, "sampling should be an object"),
            ({"prompt": "x", "sampling": {"seeed": 1}}, 30, "unknown key sampling.seeed"),
            ({"prompt": "x", "seed": 1, "sampling": {"seed": 2}}, 17, "seed is given twice"),
            ({"prompt": "x", "max_token": 5}, 17, "unknown key 'max_token'"),
            ({"promt": "x"}, 2, "unknown key 'promt'"),
            ({"id": True, "prompt": "x"}, 2, "id should be a string or a number"),
            ({"id": "", "prompt": "x"}, 2, "id should be a string or a number"),
        ],
    )
    def test_fields_that_are_wrong(self, line: dict[str, Any], column: int, message: str) -> None:
        assert _bad(line) == ("invalid_field", column, message)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("temperature", -1),
            ("temperature", "hot"),
            ("top_k", -2),
            ("max_tokens", 0),
            ("max_tokens", True),
            ("n", 0),
            ("stop", [1]),
            ("logprobs", 1000),
            ("min_p", 2),
            ("ignore_eos", "yes"),
        ],
    )
    def test_sampling_that_is_wrong(self, key: str, value: Any) -> None:
        code, column, message = _bad({"prompt": "x", key: value})
        assert (code, column) == ("invalid_field", 17)
        assert message.startswith(f"{key}: ")

    @pytest.mark.parametrize("line", [{"prompt": ""}, {"messages": []}, {"prompt_token_ids": []}])
    def test_h12_empty_prompts(self, line: dict[str, Any]) -> None:
        assert _bad(line)[0] == "empty_prompt"

    def test_near_misses_have_a_suggestion_and_other_keys_are_meta(self) -> None:
        found = _parse({"prompt": "x", "max_token": 5})
        assert isinstance(found, BadLine)
        assert found.hint == "did you mean max_tokens?"
        meta = {"topic": "a", "prompt_tokens": 3, "idx": 1, "model": "m", "source": {"deep": [1]}}
        assert _good({"prompt": "x", **meta}).meta == meta

    @pytest.mark.parametrize(
        ("key", "value", "hint"),
        [
            ("max_new_tokens", 5, "use max_tokens"),
            ("stop_sequences", ["x"], "use stop"),
            ("bad_words", ["x"], None),
            ("guided_json", {"type": "object"}, None),
            ("system", "Be brief.", 'use a message with the role "system"'),
            ("sampling_params", {"seed": 1}, "use sampling"),
            ("tool_choice", "required", None),
            ("num_beams", 4, None),
            ("stream", True, None),
            ("reasoning_effort", "low", "use enable_thinking"),
        ],
    )
    def test_a2_parameters_of_other_tools_are_no_data(
        self, key: str, value: Any, hint: str | None
    ) -> None:
        for line in ({"prompt": "x", key: value}, _batch(**{key: value})):
            found = _parse(line)
            assert isinstance(found, BadLine)
            assert (found.code, found.hint) == ("invalid_field", hint)
            assert key in found.message

    @pytest.mark.parametrize(
        ("key", "value"),
        [("stream", False), ("bad_words", None)],
    )
    def test_a2_what_asks_for_nothing_may_stand_there(self, key: str, value: Any) -> None:
        assert _good({"prompt": "x", key: value}).meta == {key: value}
        _good(_batch(**{key: value}))

    def test_a2_prefill_and_thinking_have_keys_of_their_own(self) -> None:
        more = {"continue_final_message": True, "enable_thinking": False}
        messages = [*_HI, {"role": "assistant", "content": "A striped"}]
        for line in (
            {"messages": messages, **more},
            _batch(messages=messages, **more),
            _batch(messages=messages, add_generation_prompt=False, **more),
            {"messages": messages, "chat_template_kwargs": more},
        ):
            found = _good(line)
            assert (found.template_kwargs, found.meta) == (more, {})
        assert _good({"messages": _HI, "continue_final_message": False}).template_kwargs == {}

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ({"enable_thinking": "no"}, "enable_thinking should be true or false"),
            (
                {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
                "enable_thinking is given twice",
            ),
            ({"add_generation_prompt": False}, "add_generation_prompt False is not supported"),
        ],
    )
    def test_a2_switches_that_are_wrong(self, more: dict[str, Any], message: str) -> None:
        for line in ({"messages": _HI, **more}, _batch(**more)):
            code, _, found = _bad(line)
            assert (code, found) == ("invalid_field", message)

    @pytest.mark.parametrize(
        ("message", "what"),
        [
            (
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                },
                "messages[1].tool_calls[0].function.arguments is not JSON",
            ),
            ({"role": "user", "content": "x", "images": ["y"]}, "messages[1].images is not read"),
        ],
    )
    def test_c1_messages_are_named_by_their_place(self, message: Any, what: str) -> None:
        for line in ({"messages": [*_HI, message]}, _batch(messages=[*_HI, message])):
            assert _bad(line)[2].startswith(what)

    def test_ids_are_unique(self) -> None:
        parser = LineParser()
        _good({"id": "a", "prompt": "x"}, parser)
        found = _parse({"id": "a", "prompt": "y"}, parser, number=9)
        assert isinstance(found, BadLine)
        assert (found.code, found.id) == ("duplicate_custom_id", "line-000009")
        assert found.message == "id 'a' was used by an earlier line"
        number = _parse({"id": "line-000009", "prompt": "y"}, parser, number=10)
        assert number.id == "line-000010"


class TestBatchLines:
    @pytest.mark.parametrize(
        ("change", "code"),
        [
            ({"method": "GET"}, "invalid_field"),
            ({"url": "/v1/embeddings"}, "url_mismatch"),
            ({"body": None}, "invalid_field"),
            ({"body": {}}, "invalid_field"),
            ({"custom_id": 3}, "invalid_field"),
            ({"priority": 3}, "invalid_field"),
        ],
    )
    def test_what_is_wrong_with_the_line(self, change: dict[str, Any], code: str) -> None:
        assert _bad({**_batch(), **change})[0] == code

    @pytest.mark.parametrize(
        "body",
        [{"stream": True}, {"tool_choice": "required"}, {"functions": []}],
    )
    def test_what_cannot_be_served_is_refused(self, body: dict[str, Any]) -> None:
        code, _, message = _bad(_batch(**body))
        assert code == "invalid_field"
        assert "not supported" in message

    @pytest.mark.parametrize(
        ("asked", "form"),
        [
            ({"structured": {"regex": "a+"}}, {"regex": "a+"}),
            ({"structured_outputs": {"json": {"type": "null"}}}, {"json_schema": {"type": "null"}}),
            ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
            ({"response_format": {"type": "json_object"}}, {"json_object": True}),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
                {"json_schema": True},
            ),
            ({"response_format": {"type": "text"}}, None),
        ],
        ids=str,
    )
    def test_the_form_of_an_answer_is_read_in_all_its_spellings(
        self, asked: dict[str, Any], form: dict[str, Any] | None
    ) -> None:
        for line in ({"prompt": "x", **asked}, {"prompt": "x", "sampling": asked}, _batch(**asked)):
            found = _good(line).params.structured
            assert (found and found.as_json()) == form

    @pytest.mark.parametrize(
        ("asked", "word"),
        [
            ({"response_format": "json"}, "response_format.type"),
            ({"response_format": {"type": "json_schema"}}, "with a schema"),
            ({"structured_outputs": {"json": {}, "regex": "a"}}, "with one of"),
            ({"structured_outputs": {"choice": []}}, "list of texts"),
            (
                {"structured": {"regex": "a"}, "response_format": {"type": "json_object"}},
                "given twice",
            ),
        ],
        ids=str,
    )
    def test_a_form_that_is_none_is_told(self, asked: dict[str, Any], word: str) -> None:
        for line in ({"prompt": "x", **asked}, _batch(**asked)):
            code, _, message = _bad(line)
            assert code == "invalid_field" and word in message

    def test_what_is_neutral_is_accepted(self) -> None:
        _good(_batch(stream=False, response_format={"type": "text"}, metadata={"a": 1}))

    @pytest.mark.parametrize(
        "more",
        [
            {"prompt_cache_key": "k", "verbosity": "low", "modalities": ["text"]},
            {"tool_choice": "auto", "parallel_tool_calls": False, "best_of": 1},
            {"service_tier": "flex", "store": False, "safety_identifier": "u", "prediction": None},
        ],
    )
    def test_c8_what_has_no_effect_on_text_is_accepted(self, more: dict[str, Any]) -> None:
        assert _good(_batch(**more)).params == SamplingParams()

    def test_c8_modalities_that_are_not_text_are_refused(self) -> None:
        assert "modalities" in _bad(_batch(modalities=["text", "audio"]))[2]

    def test_a_tool_choice_of_none_leaves_the_tools_out(self) -> None:
        assert _good(_batch(tools=[{"name": "t"}], tool_choice="none")).tools is None
        assert _good(_batch(tools=[{"name": "t"}], tool_choice="auto")).tools == [{"name": "t"}]

    @pytest.mark.parametrize(
        ("prompt", "parts"),
        [
            ("x", [("prompt", "x")]),
            (["x"], [("prompt", "x")]),
            (["x", "y"], [("prompt", "x"), ("prompt", "y")]),
            ([1, 2], [("tokens", [1, 2])]),
            ([[1, 2]], [("tokens", [1, 2])]),
            ([[1], "y"], [("tokens", [1]), ("prompt", "y")]),
        ],
    )
    def test_c8_prompts_as_arrays(self, prompt: Any, parts: list[tuple[str, Any]]) -> None:
        line = _good(_batch(completions=True, prompt=prompt, n=3))
        assert [(part.kind, part.prompt) for part in line.parts] == parts
        assert line.num_sequences == 3 * len(parts)

    @pytest.mark.parametrize(
        ("prompt", "code"),
        [
            ([], "invalid_field"),
            ([""], "empty_prompt"),
            (["x", 5], "invalid_field"),
            ([[]], "empty_prompt"),
            ([1, "x"], "invalid_field"),
            ([[True]], "invalid_field"),
            (["x"] * 1025, "invalid_field"),
        ],
    )
    def test_c8_arrays_that_are_no_prompts(self, prompt: Any, code: str) -> None:
        assert _bad(_batch(completions=True, prompt=prompt))[0] == code

    def test_a_body_has_the_prompt_of_its_url(self) -> None:
        assert "body.prompt" in _bad(_batch(prompt="x"))[2]
        assert "body.messages" in _bad(_batch(completions=True, prompt="x", messages=_HI))[2]

    def test_lines_must_agree_on_url_and_model(self) -> None:
        parser = LineParser()
        _good({**_batch(model="a"), "custom_id": "1"}, parser)
        assert _bad({**_batch(model="b"), "custom_id": "2"}, parser)[0] == "model_mismatch"
        other = {"url": "/v1/completions", "body": {"prompt": "x"}, "custom_id": "3"}
        assert _bad({**_batch(), **other}, parser)[0] == "url_mismatch"


_TEXT_PART = {"type": "text", "text": "hi"}


@pytest.mark.parametrize(
    "part", [5, None, "hi", [], {}, {"type": "image_url"}, {"type": "text", "text": 5}]
)
def test_parts_of_a_content_that_are_no_text_are_named(part: object) -> None:
    document = {"messages": [{"role": "user", "content": [_TEXT_PART, part]}]}
    line = LineParser().parse(1, 0, json.dumps(document).encode())
    assert isinstance(line, BadLine)
    assert line.code == "invalid_field"
    assert line.message.startswith("messages[0].content[1] should be ")


def test_an_integer_of_thousands_of_digits_gets_our_own_error() -> None:
    line = LineParser().parse(1, 0, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}")
    assert isinstance(line, BadLine)
    assert line.message == "an integer of 5,000 digits is too large"
    assert line.column == 25


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_tokens", True), ("stop", 5), ("stop", [5]), ("stop_token_ids", 5), ("logit_bias", 5)],
)
def test_wrong_values_are_explained_without_the_words_of_a_library(key: str, value: object) -> None:
    line = LineParser().parse(1, 0, json.dumps({"prompt": "x", key: value}).encode())
    assert isinstance(line, BadLine)
    for word in ("Value error", "tuple", "dictionary", "Input"):
        assert word not in line.message
