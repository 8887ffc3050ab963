"""Lines of a chat break between words where the terminal ends."""

import fcntl
import os
import pty
import re
import struct
import termios
from unicodedata import normalize

import pyte
import pytest

from cli.chat.terminal import CTRL_C, CTRL_D, ENTER
from minivllm_cli.chat.word_wrap import StreamedWords, terminal_columns, wrapped


def _shown(pieces: list[str], columns: int) -> list[str]:
    """What a terminal shows of streamed pieces."""
    screen = pyte.Screen(columns, 12)
    stream, words = pyte.Stream(screen), StreamedWords()
    for piece in pieces:
        stream.feed(words.feed(piece, columns).replace("\n", "\r\n"))
    return "\n".join(line.rstrip() for line in screen.display).rstrip().split("\n")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two", "three"]),
        ("123456789 abc", ["123456789", "abc"]),
        ("1234567890 abc", ["1234567890", "abc"]),
        ("1234567890\nabc", ["1234567890", "abc"]),
        ("1234567890 \nabc", ["1234567890", "abc"]),
        ("1234567 abc", ["1234567", "abc"]),
        ("1234567 ab c", ["1234567 ab", "c"]),
        ("a 1234567890123 b", ["a", "1234567890", "123 b"]),
        ("    indented", ["", "indented"]),
        ("1234 漢字漢字漢", ["1234 漢字", "漢字漢"]),
        ("1234 678漢字", ["1234 678漢", "字"]),
        ("123456 e\u0301xyz", ["123456", "e\u0301xyz"]),
        ("a\tbcd", ["a", "bcd"]),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_streamed_words_stay_whole(text, lines, size):
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert _shown(pieces, 10) == [normalize("NFC", line) for line in lines]


def test_whole_text_is_broken_at_blanks_with_a_hanging_indent():
    assert wrapped("ab  cd ef gh\n\nx", 8, 4) == "ab  cd\n    ef\n    gh\n\nx"
    assert wrapped("see /a/long-path/name", 10) == "see\n/a/long-path/name"


def test_a_terminal_that_is_gone_has_no_width(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "wb", buffering=0) as file:
        columns = terminal_columns(file)
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
        assert columns is not None and columns() == 50
        os.close(ours)
        assert columns() == 0
    assert wrapped("two words", 0) == "two words"


def test_notices_warnings_and_errors_break_between_words(chat):
    with chat.open("--max-tokens", "8", "--max-model-len", "128", columns=50, rows=60) as terminal:
        shown = terminal.ask("forever")
        assert "stopped at max_tokens; /continue goes on, /set\nmax_tokens N allows more" in shown
        shown = terminal.ask("echo " + "x" * 41)
        assert re.search("^warning: the context is 8.% full: .. tokens are\nleft$", shown, re.M)
        shown = terminal.ask("/help " + "y" * 20)
        assert shown == f"error: /help takes no argument, not\n'{'y' * 20}'"
        terminal.type(CTRL_C)
        terminal.wait_for("Ctrl-C again within 2 s leaves; so do Ctrl-D and\n/exit")
        terminal.wait_for_prompt()
        terminal.type(CTRL_D)
        assert terminal.wait_for_exit() == 0
        lines = terminal.lines
    end = lines.index("2 turns were not saved (/save FILE, or")
    assert lines[end + 1] == "--transcript FILE from the start)"


@pytest.mark.parametrize("columns", [80, 120])
def test_answers_figures_and_help_break_between_words(chat, columns):
    words = [f"word{'x' * (i % 7)}{i}" for i in range(60)]
    with chat.open(columns=columns, rows=60) as terminal:
        terminal.wait_for_prompt()
        terminal.type("echo " + " ".join(words) + ENTER)
        terminal.wait_until(lambda: any(x.endswith("stop") for x in terminal.lines), "figures")
        terminal.wait_for_prompt()
        lines = terminal.lines
        begin = next(i for i, line in enumerate(lines) if line.startswith("word0 "))
        end = next(i for i, line in enumerate(lines) if " tok/s" in line)
        assert " ".join(lines[begin:end]).split(" ") == words
        assert "· stop" in " ".join(lines[end : end + 2])
        shown = terminal.ask("/help")
    assert "drop lines typed ahead, clear the line, end an edit; twice" in " ".join(shown.split())
    gutter = re.search(r"^/help +", shown, re.MULTILINE)
    assert gutter
    further = [line for line in shown.split("\n")[1:] if line.startswith(" ")]
    assert bool(further) == (columns == 80)
    assert all(len(re.match(" +", line)[0]) == len(gutter[0]) for line in further), shown
