"""Requests of any shape: a prompt or an error with a code, and what transformers would render."""
# ruff: noqa: E501

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm_engine.core.errors import EngineError, RequestError
from minivllm_engine.protocol.line_parser import LineParser
from minivllm_engine.protocol.lines import BadLine, RequestLine
from minivllm_engine.text.prompt import read_prompt
from minivllm_engine.text.tokenizer import Tokenizer
from support.byte_tokenizer import CHAT_TEMPLATE, byte_backend
from support.fuzzing import attempt, examples
from support.qwen35_tokenizer import CHAT_TEMPLATE as QWEN

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
PARTS = "{% for m in messages %}{{ m.role }}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
TEMPLATES = [
    Tokenizer(byte_backend(), {}, template)
    for template in (CHAT_TEMPLATE, QWEN.read_text(), TOOLS, PARTS)
]

texts = st.text(max_size=8)
anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3)
arguments = anything | st.dictionaries(texts, anything, max_size=2).map(json.dumps) | texts
calls = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function")},
        optional={
            "function": st.fixed_dictionaries({"name": texts}, optional={"arguments": arguments})
            | anything,
            "name": texts,
            "arguments": arguments,
        },
    ),
    max_size=2,
)
roles = st.sampled_from(["system", "user", "assistant", "tool", "developer"]) | texts
messages = st.lists(
    st.fixed_dictionaries(
        {"role": roles},
        optional={
            "content": texts | parts | st.none() | anything,
            "tool_calls": calls | anything,
            "reasoning_content": texts | anything,
            "name": anything,
        },
    )
    | st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": texts | parts}
    ),
    max_size=4,
)
requests = st.fixed_dictionaries(
    {"messages": messages | anything},
    optional={
        "tools": st.lists(st.dictionaries(texts, anything, max_size=2), max_size=2) | anything,
        "chat_template_kwargs": st.dictionaries(
            texts | st.just("enable_thinking"), anything, max_size=2
        )
        | anything,
        "enable_thinking": st.booleans() | anything,
        "continue_final_message": st.booleans() | anything,
    },
)


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(TEMPLATES), requests | messages)
def test_any_prompt_gives_ids_or_an_error_with_a_code(tokenizer: Tokenizer, prompt: Any) -> None:
    found = attempt(lambda: read_prompt(prompt, tokenizer, 100_000))
    if isinstance(found, EngineError):
        assert isinstance(found, RequestError) and found.code and found.what
        return
    ids, is_chat = found
    assert is_chat or not ids
    assert tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=False)) == ids


keys = st.sampled_from(
    (
        *("id", "prompt", "messages", "prompt_token_ids", "sampling", "tools", "stop", "logprobs"),
        *("n", "max_tokens", "top_logprobs", "seed", "logit_bias", "custom_id", "url", "method"),
        *("body", "continue_final_message", "enable_thinking", "chat_template_kwargs"),
        *("max_new_tokens", "response_format", "tool_choice"),
    )
)
batch = st.fixed_dictionaries(
    {
        "custom_id": texts | anything,
        "url": st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
        "body": st.dictionaries(keys | texts, anything | messages, max_size=5),
    }
)


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(keys | texts, anything | messages, max_size=5) | batch | anything)
def test_any_line_is_a_request_or_says_what_is_wrong(document: Any) -> None:
    line = LineParser().parse(1, 0, json.dumps(document).encode())
    if isinstance(line, BadLine):
        assert line.code and line.message and line.column >= 1
        return
    for part in line.parts:
        assert (
            isinstance(part, RequestLine) and part.params.n * len(line.parts) == line.num_sequences
        )


def plain(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


turns = st.lists(
    st.tuples(
        st.sampled_from(["user", "assistant"]),
        st.lists(texts, min_size=1, max_size=3),
        st.booleans(),
    ),
    max_size=4,
)


@settings(max_examples=examples(100), deadline=None)
@given(turns, st.sampled_from([None, True, False]), st.booleans())
def test_conversations_are_rendered_as_by_transformers(
    turns: list[tuple[str, list[str], bool]], thinking: bool | None, goes_on: bool
) -> None:
    """Parts where the template reads them; an answer to go on with where there is one."""
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_backend())
    theirs.chat_template = QWEN.read_text()
    messages = [
        {
            "role": role,
            "content": [plain(text) for text in several] if as_parts else "".join(several),
        }
        for role, several, as_parts in [("user", ["x"], False), *turns]
    ]
    goes_on = goes_on and messages[-1]["role"] == "assistant"
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    ours = attempt(
        lambda: TEMPLATES[1].render_chat(messages, continue_final_message=goes_on, **kwargs)
    )
    if isinstance(ours, EngineError):
        assert goes_on, ours  # which transformers refuses too, or would continue with nothing
        return
    how = {"continue_final_message": True} if goes_on else {"add_generation_prompt": True}
    assert ours == theirs.apply_chat_template(messages, tokenize=False, **how, **kwargs)
