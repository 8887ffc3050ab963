"""Text from files in messages: one line, of visible characters, of bounded length."""

import pytest

from minivllm_engine.core.escape import escape, listed


@pytest.mark.parametrize(
    "text", ["", "model.layers.0.mlp", "a b 'c' \\ \"d\"", "权重 é ✓ 🙂", "x" * 200]
)
def test_what_is_visible_stays_as_it_is(text: str) -> None:
    assert escape(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("a\nerror: b", "a\\nerror: b"),
        ("a\r\tb\x00", "a\\r\\tb\\x00"),
        ("a\x9bb\x85", "a\\x9bb\\x85"),
        ("gnp.\u202etxt", "gnp.\\u202etxt"),
        ("\u200bz\u2028", "\\u200bz\\u2028"),
        ("\udcff", "\\udcff"),
    ],
)
def test_what_is_not_visible_is_escaped(text: str, shown: str) -> None:
    assert escape(text) == shown and escape(text).isprintable()


@pytest.mark.parametrize("size", [201, 5_000, 10_000_000])
@pytest.mark.parametrize("character", ["x", "\x1b"])
def test_long_text_loses_its_middle(size: int, character: str) -> None:
    shown = escape("start" + character * size + "end")
    assert len(shown) < 250 and shown.startswith("start") and shown.isprintable()
    assert shown.endswith(f"end ({size + 8:,} characters)")


def test_lists_say_how_many_more() -> None:
    assert listed([]) == ""
    assert listed(["a", "b\n"], 2) == "a, b\\n"
    assert listed("abcdef", 2) == "a, b and 4 more"
