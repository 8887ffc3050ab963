"""The server under OpenAI's own client, on the demo model: the answers are those of `LLM.generate`."""

import json
from typing import Any

import httpx
import openai
import pytest

from cli.serve.conftest import KEY, Served
from minivllm_engine import LLM, SamplingParams

ZEBRA = [{"role": "user", "content": "Define zebra."}]
ABACUS = [{"role": "user", "content": "Define abacus."}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    with LLM("demo", engine={"cpu_memory": "64MiB", "max_num_seqs": 8}) as llm:
        yield llm


def answer_of(llm: LLM, prompt: Any, **params: Any) -> Any:
    (out,) = llm.generate([prompt], SamplingParams(**params))
    return out


def test_a_chat_is_answered_as_by_the_library(client: openai.OpenAI, llm: LLM) -> None:
    expected = answer_of(llm, {"messages": ZEBRA}, temperature=0)
    found = client.chat.completions.create(model="demo", messages=ZEBRA, temperature=0)
    (choice,) = found.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "stop"
    assert choice.message.content == expected.text
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens
    assert found.usage.completion_tokens == expected.usage.completion_tokens
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.model == "demo" and found.object == "chat.completion"


@pytest.mark.parametrize("n", [1, 3])
def test_the_pieces_of_a_stream_are_the_answer(client: openai.OpenAI, llm: LLM, n: int) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "seed": 7, "max_tokens": 24, "n": n}
    expected = answer_of(llm, {"messages": ABACUS}, **options)
    texts, reasons, roles, usages = [""] * n, [None] * n, [0] * n, []
    with client.chat.completions.create(
        model="demo",
        messages=ABACUS,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    ) as stream:
        for chunk in stream:
            if chunk.usage is not None:
                usages.append(chunk.usage)
                assert chunk.choices == []
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index] += choice.delta.role == "assistant"
                assert reasons[choice.index] is None, "nothing comes after the end"
                reasons[choice.index] = choice.finish_reason
    assert texts == [one.text for one in expected.outputs]
    assert roles == [1] * n and set(reasons) <= {"stop", "length"}
    (usage,) = usages
    assert usage.completion_tokens == expected.usage.completion_tokens


def test_usage_comes_only_when_it_is_asked_for(client: openai.OpenAI) -> None:
    asked = {"model": "demo", "messages": ZEBRA, "max_tokens": 3, "stream": True}
    for options, wanted in (({}, False), ({"include_usage": False}, False)):
        chunks = list(client.chat.completions.create(**asked, stream_options=options))
        assert any(chunk.usage is not None for chunk in chunks) == wanted
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**asked, stream_options=options))
    assert all(chunk.usage is not None for chunk in chunks)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 3


def test_logprobs_of_a_stream_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": ZEBRA, "temperature": 0, "max_tokens": 12}
    asked |= {"logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    pieces = [
        entry
        for chunk in client.chat.completions.create(stream=True, **asked)
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content
    ]
    assert [one.token for one in pieces] == [one.token for one in whole]
    assert [one.logprob for one in pieces] == pytest.approx(
        [one.logprob for one in whole], abs=1e-4
    )
    assert len(whole) == 12 and all(len(one.top_logprobs) == 3 for one in whole)
    text = b"".join(bytes(one.bytes) for one in whole).decode()
    assert text.startswith("Any of several")


def test_text_completions_take_text_ids_and_lists_of_them(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode("Define zebra.")
    found = client.completions.create(
        model="demo", prompt=["Define zebra.", "Define abacus."], max_tokens=6, temperature=0, n=2
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    expected = [
        answer_of(llm, text, max_tokens=6, temperature=0).text
        for text in ("Define zebra.", "Define abacus.")
    ]
    assert [choice.text for choice in found.choices] == [
        text for text in expected for _ in range(2)
    ]
    of_ids = client.completions.create(model="demo", prompt=ids, max_tokens=6, temperature=0)
    assert of_ids.choices[0].text == expected[0]
    pieces = client.completions.create(
        model="demo", prompt=ids, max_tokens=6, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in pieces) == expected[0]


def test_a_prompt_is_scored_by_echo_without_a_token(client: openai.OpenAI, llm: LLM) -> None:
    text = "Define zebra."
    out = answer_of(llm, text, max_tokens=1, prompt_logprobs=1)
    found = client.completions.create(
        model="demo", prompt=text, max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    (choice,) = found.choices
    assert choice.text == text and found.usage.completion_tokens == 0
    assert "".join(choice.logprobs.tokens) == text
    expected = [None if one is None else one.sampled.logprob for one in out.prompt_logprobs]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected[1:], abs=1e-4)
    offsets = choice.logprobs.text_offset
    assert [
        text[at : at + len(one)] for at, one in zip(offsets, choice.logprobs.tokens, strict=True)
    ] == (choice.logprobs.tokens)
    more = client.completions.create(
        model="demo", prompt=text, max_tokens=3, echo=True, logprobs=1, temperature=0
    )
    assert more.choices[0].text.startswith(text)
    assert len(more.choices[0].logprobs.tokens) == len(choice.logprobs.tokens) + 3


def test_what_the_cache_gave_is_told(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Define zebra. " * 30}]
    asked: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 2}
    client.chat.completions.create(**asked)
    details = client.chat.completions.create(**asked).usage.prompt_tokens_details
    assert details.cached_tokens >= 64 and details.model_extra["state_at"] == details.cached_tokens


def test_without_max_tokens_an_answer_may_fill_the_context(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="demo", messages=ZEBRA, temperature=0, extra_body={"ignore_eos": True}, max_tokens=70
    )
    assert found.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="a b " * 3000)
    assert caught.value.code == "prompt_too_long"


def test_an_answer_in_a_form_is_parsed_by_the_client(client: openai.OpenAI, llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"word": {"type": "string", "maxLength": 12}, "legs": {"enum": [2, 4]}},
        "required": ["word", "legs"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": ZEBRA,
        "temperature": 0,
        "max_tokens": 250,
    }
    found = client.chat.completions.create(response_format=form, **asked).choices[0]
    assert found.finish_reason == "stop"
    parsed = json.loads(found.message.content)
    assert set(parsed) == {"word", "legs"} and parsed["legs"] in (2, 4)
    pieces = client.chat.completions.create(response_format=form, stream=True, **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert text == found.message.content
    choice = client.chat.completions.create(
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}}, **asked
    )
    assert choice.choices[0].message.content in ("yes", "no")
    bad = {"name": "x", "schema": {"type": "array", "uniqueItems": True}}
    form = {"type": "json_schema", "json_schema": bad}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(response_format=form, **asked)
    assert caught.value.code == "unsupported_schema"


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"temprature": 1}, "invalid_field", "temprature"),
        ({"temperature": 99, "top_p": 7}, "invalid_field", "top_p"),
        ({"n": 17}, "invalid_field", "n"),
        ({"stop": ["x"] * 17}, "invalid_field", "stop"),
        ({"messages": []}, "empty_prompt", "messages"),
        ({"messages": [{"content": "x"}]}, "invalid_field", "messages"),
        ({"response_format": {"type": "json"}}, "invalid_field", "response_format"),
        ({"tool_choice": "required"}, "invalid_field", "tool_choice"),
        ({"stream": "yes"}, "invalid_field", "stream"),
        ({"logit_bias": {"999999": 1}}, "invalid_field", None),
    ],
    ids=str,
)
def test_a_wrong_field_is_told_with_its_name(
    client: openai.OpenAI, changes: dict[str, Any], code: str, param: str | None
) -> None:
    body = {"model": "demo", "messages": ZEBRA, "max_tokens": 2, **changes}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_models_and_errors_of_routes(client: openai.OpenAI, server: Served) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").model_extra["max_model_len"] > 0
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=ZEBRA)
    assert caught.value.code == "model_not_found"
    head = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=head) as http:
        assert http.get("/v1//models").json()["data"][0]["id"] == "demo"
        assert http.get("/v1/chat/completions").status_code == 405
        assert http.post("/nowhere", json={}).json()["error"]["code"] == "no_such_route"
        assert http.post("/v1/completions", content=b"x").status_code == 415
        for content in (b"{", b"[1]", b'{"a": 1, "a": 2}', b"\xff", b'{"a":' * 300):
            bad = http.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_json")
        given = http.get("/v1/models", headers={"x-request-id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"
        other = http.get("/v1/models", headers={"x-request-id": "no good\tone"})
        assert len(other.headers["x-request-id"]) == 32
        ignored = http.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 1, "frobnicate": 1}
        )
        assert ignored.headers["x-minivllm-ignored"] == "frobnicate"


def test_keys_and_hosts(server: Served) -> None:
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer nope"}, {"x-api-key": "nope"}):
            refused = http.get("/v1/models", headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert http.get("/v1/models", headers={"x-api-key": KEY}).status_code == 200
        elsewhere = http.get("/v1/models", headers={"x-api-key": KEY, "host": "evil.example"})
        assert elsewhere.status_code == 403


def test_tokens_there_and_back(server: Served, llm: LLM) -> None:
    with httpx.Client(base_url=server.url, headers={"x-api-key": KEY}) as http:
        found = http.post("/tokenize", json={"prompt": "Define zebra."}).json()
        assert found["tokens"] == llm.tokenizer.encode("Define zebra.")
        assert found["count"] == len(found["tokens"])
        chat = http.post("/tokenize", json={"messages": ZEBRA}).json()["tokens"]
        assert len(chat) > found["count"]
        back = http.post("/detokenize", json={"tokens": found["tokens"]}).json()
        assert back == {"prompt": "Define zebra."}
        assert http.post("/detokenize", json={"tokens": "x"}).status_code == 400


def test_figures_are_counted(client: openai.OpenAI, server: Served) -> None:
    def figures() -> dict[str, float]:
        with httpx.Client(base_url=server.url, headers={"x-api-key": KEY}) as http:
            lines = http.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    label = '{model_name="demo"}'
    before = figures()
    found = client.chat.completions.create(model="demo", messages=ZEBRA, max_tokens=4)
    after = figures()
    name = f"vllm:generation_tokens_total{label}"
    assert after[name] - before[name] == found.usage.completion_tokens == 4
    name = f"vllm:time_to_first_token_seconds_count{label}"
    assert after[name] - before.get(name, 0) == 1
    assert after[f"vllm:num_requests_running{label}"] == 0
