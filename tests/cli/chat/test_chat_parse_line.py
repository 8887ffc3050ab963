"""What counts as a message and what as a command."""

import pytest

from minivllm_cli.chat.parse_line import Leave, Run, Say, classify, opens_block


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", Say("hello")),
        ("  hello ", Say("hello")),
        ("", None),
        (" \n ", None),
        ("exit", Leave()),
        (" quit ", Leave()),
        ("exit now", Say("exit now")),
        ("Exit", Say("Exit")),
        ("/help", Run("/help", "")),
        (" /set  temperature 0.5 ", Run("/set", "temperature 0.5")),
        ("/", Run("/", "")),
        ("//usr/bin", Say("/usr/bin")),
        ("//", Say("/")),
        ("/api/chat\nmore", Say("/api/chat\nmore")),
        ("a\n/exit\n", Say("a\n/exit")),
        ("exit\nquit", Say("exit\nquit")),
        ('a\n/api/chat\n\n"""x', Say('a\n/api/chat\n\n"""x')),
        ("    indented\nmore", Say("    indented\nmore")),
        ('"""/exit"""', Say("/exit")),
        ('"""\none\n\n  two\n"""', Say("one\n\n  two")),
        ('""""""', None),
        ('"""open', Say('"""open')),
    ],
)
def test_classification(text, expected):
    assert classify(text) == expected


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ('"""', True),
        ('"""a', True),
        ('"""a\nb', True),
        ('"""a"""', False),
        ('"""\na\n"""', False),
        ('"""\na\n""" ', False),
        ('"""""', True),
        ('""""""', False),
        ('say """', False),
        ("", False),
    ],
)
def test_blocks(text, is_open):
    assert opens_block(text) is is_open
