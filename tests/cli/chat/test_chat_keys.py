"""Keys of the REPL, in a pseudo-terminal: sending, pasting, clearing, leaving, history."""

import shlex
import signal
import stat
import termios

import pytest

from cli.chat.terminal import (
    ALT_ENTER,
    CTRL_C,
    CTRL_D,
    CTRL_J,
    ENTER,
    PASTE_BEGIN,
    PASTE_END,
    TAB,
    UP,
    Terminal,
)


def _send(terminal: Terminal, text: str, expected: str) -> None:
    """Type `text` at the prompt, see it there, send it and wait for the next prompt."""
    terminal.wait_for_prompt()
    terminal.type(text)
    terminal.wait_for(expected)
    terminal.type(ENTER)
    terminal.wait_for(" · stop\n")
    terminal.wait_for_prompt()


def test_k5_a_paste_is_one_message(chat):
    pasted = 'a\n/api/chat\n\n"""x'
    with chat.open() as terminal:
        terminal.wait_for_prompt()
        terminal.type(PASTE_BEGIN + pasted.replace("\n", "\r") + PASTE_END)
        terminal.wait_for('"""x')
        terminal.watch(0.2)
        assert not chat.requests, "a paste is not sent by itself"
        terminal.type(ENTER)
        terminal.wait_for("· stop")
        terminal.wait_for_prompt()
        # The gutter of further lines is blank, so that they can be copied.
        assert '> a\n  /api/chat\n\n  """x\n' in terminal.text
        assert "..." not in terminal.text
        terminal.type("first line\r/exit\r\r  last line\r")  # a terminal that does not mark pastes
        terminal.wait_until(lambda: len(chat.requests) == 2, "the second request")
        terminal.wait_for_prompt()
        terminal.type("/api/chat")
        terminal.wait_until(lambda: terminal.cursor_line == "> /api/chat", "the command")
        terminal.type(ENTER)
        terminal.wait_for("unknown command /api/chat")
    assert chat.questions == [pasted, "first line\n/exit\n\n  last line"]


def test_lines_typed_while_the_model_loads_are_handled_one_by_one(chat):
    with chat.open(FAKE_LOAD_SECONDS="2") as terminal:
        terminal.wait_for("weights")
        terminal.type(f"echo one{ENTER}/set temperature 0.5{ENTER}echo two{ENTER}half")
        terminal.wait_for("> half")
        assert "temperature 0.5" in terminal.lines
        terminal.type(f"{CTRL_J}a line{ENTER}")
        terminal.wait_for("<half")
    assert chat.questions == ["echo one", "echo two", "half\na line"]


def test_line_breaks_can_be_typed(chat):
    with chat.open() as terminal:
        _send(terminal, f"one{ALT_ENTER}two{CTRL_J}three", "three")
        terminal.type('"""')
        terminal.type(ENTER)
        terminal.watch(0.2)
        terminal.type("/exit")
        terminal.watch(0.2)
        terminal.type(ENTER)
        terminal.watch(0.2)
        terminal.type('"""')
        terminal.watch(0.2)
        terminal.type(ENTER)
        terminal.wait_for("</exit>")
        terminal.wait_for_prompt()
        terminal.ask("/multi")
        terminal.type("four")
        terminal.wait_for("> four")
        terminal.type(ENTER)
        terminal.watch(0.2)
        terminal.type(f"five{ALT_ENTER}")
        terminal.wait_for("<four")
    assert chat.questions == ["one\ntwo\nthree", "/exit", "four\nfive"]


def test_ctrl_c_clears_the_line_and_twice_leaves(chat):
    with chat.open() as terminal:
        terminal.wait_for_prompt()
        terminal.type("half a thought")
        terminal.wait_for("half a thought")
        terminal.type(CTRL_C)
        terminal.wait_for_prompt()
        assert "half" not in terminal.text
        terminal.signal(signal.SIGINT)  # from elsewhere: as the key
        terminal.wait_for("Ctrl-C again within 2 s leaves")
        terminal.wait_for_prompt()
        terminal.watch(2.2)
        terminal.type(CTRL_C)
        terminal.watch(0.5)
        terminal.wait_for_prompt()
        terminal.type(CTRL_C)
        assert terminal.wait_for_exit() == 130
        assert "Abort" not in terminal.text
        assert "Traceback" not in terminal.text


@pytest.mark.parametrize("how", ["/exit", "/quit", "/bye", "exit", "quit"])
def test_k34_words_that_leave(chat, how):
    with chat.talk() as talk, pytest.raises(EOFError):
        talk.ask(how)
    with chat.talk() as talk:
        assert "takes no argument" in talk.ask("/exit now")


@pytest.mark.parametrize("how", ["/exit", CTRL_D])
def test_k34_leaving(chat, how):
    with chat.open() as terminal:
        terminal.wait_for_prompt()
        terminal.type(how if how == CTRL_D else how + ENTER)
        assert terminal.wait_for_exit() == 0
        assert terminal.lines[0].startswith("scripted · context 4,096 tokens")
        typed = "" if how == CTRL_D else how
        assert terminal.text.split("\n")[1:] == [f"> {typed}".rstrip()]


def test_k33_history(chat):
    with chat.open() as terminal:
        assert str(chat.history) in "".join(terminal.ask("/help").split())
        terminal.ask("echo to remember")
        _send(terminal, " echo not to", "echo not to")
        terminal.type(UP)
        terminal.wait_for("> echo to remember")
        terminal.type(CTRL_C + CTRL_D)
        terminal.wait_for_exit()
    assert stat.S_IMODE(chat.history.stat().st_mode) == 0o600
    assert "+echo to remember\n" in chat.history.read_text()
    assert "not to" not in chat.history.read_text()
    with chat.open() as terminal:
        terminal.wait_for_prompt()
        terminal.type(UP)
        terminal.wait_for("> echo to remember")
        terminal.type(CTRL_C)
        assert "is empty now" in terminal.ask("/history clear")
        terminal.type(UP + UP)
        terminal.watch(0.3)
        assert "remember" not in terminal.screen.display[terminal.screen.cursor.y]
    assert "remember" not in chat.history.read_text()


def test_k33_no_history_reads_and_writes_nothing(chat):
    chat.history.parent.mkdir(parents=True)
    chat.history.write_text("\n# then\n+from an earlier chat\n")
    before = chat.history.read_bytes()
    with chat.open("--no-history") as terminal:
        assert "off (--no-history)" in terminal.ask("/help")
        terminal.ask("echo secret")
        terminal.type(UP + UP)
        terminal.watch(0.3)
        assert terminal.at_prompt
        assert "there is no history" in terminal.ask("/history clear")
    assert chat.history.read_bytes() == before


def test_tab_completes_commands_with_help(chat):
    with chat.open() as terminal:
        terminal.wait_for_prompt()
        terminal.type("/s" + TAB)
        terminal.wait_for("/system")
        terminal.wait_for("set a sampling key")
        terminal.type(CTRL_C)
        terminal.wait_for_prompt()
        terminal.type("/set tempe" + TAB)
        terminal.wait_for("/set temperature")
        terminal.type(" 0.5")
        terminal.wait_for("> /set temperature 0.5")
        terminal.type(ENTER)
        terminal.wait_for("\ntemperature 0.5")


def test_what_is_typed_during_an_answer_is_handled_line_by_line_after_it(chat):
    with chat.open() as terminal:
        terminal.wait_for_prompt()
        terminal.type("slow count 8" + ENTER)
        terminal.wait_for("1 2")
        for line in ("echo one", "/stats off", "", '"""', "two", "lines", '"""', "half"):
            terminal.type(line + (ENTER if line != "half" else ""))
        terminal.wait_for("<two")
        terminal.wait_for("> half")
        assert "1 2 3 4 5 6 7 8" in terminal.lines, "keys are not echoed into an answer"
        assert "statistics off" in terminal.lines
        terminal.type(" a line" + ENTER)
        terminal.wait_for("<half a line>")
        terminal.wait_for_prompt()
        terminal.type("slow count 12" + ENTER)
        terminal.wait_for("8 9")
        terminal.type(f"echo three{ENTER}/exit{ENTER}echo four{ENTER}")
        assert terminal.wait_for_exit() == 0
    assert chat.questions == [
        "slow count 8",
        "echo one",
        "two\nlines",
        "half a line",
        "slow count 12",
        "echo three",
    ]


def test_ctrl_c_drops_lines_typed_ahead_and_says_so(chat):
    with chat.open() as terminal:
        terminal.wait_for_prompt()
        terminal.type(f"slow forever{ENTER}")
        terminal.wait_for("abab")
        terminal.type(f"echo one{ENTER}{ENTER}/stats off{ENTER}half")
        terminal.watch(0.2)
        terminal.type(CTRL_C)
        terminal.wait_for("3 typed-ahead lines dropped")
        terminal.wait_for_prompt()
        assert terminal.ask("echo next").startswith("next\n")
    assert chat.questions == ["slow forever", "echo next"]


def test_k5_what_is_pasted_during_an_answer_is_one_message(chat):
    pasted = "a\n/exit\n\n" + "long " * 400 + "\nb"
    with chat.open() as terminal:
        terminal.wait_for_prompt()
        terminal.type("slow count 8" + ENTER)
        terminal.wait_for("1 2")
        # The terminal is asked for marks again when the prompt has gone.
        assert terminal.raw.rindex(b"\x1b[?2004h") > terminal.raw.rindex(b"\x1b[?2004l")
        terminal.type(PASTE_BEGIN + pasted.replace("\n", "\r") + PASTE_END)
        terminal.wait_for("· stop")
        terminal.watch(0.3)
        assert len(chat.requests) == 1, "a paste is not sent by itself"
        terminal.type(ENTER)
        terminal.wait_until(lambda: len(chat.requests) == 2, "the second request")
        terminal.wait_for_prompt()
        terminal.type(CTRL_D)
        assert terminal.wait_for_exit() == 0
        assert terminal.raw.rindex(b"\x1b[?2004l") > terminal.raw.rindex(b"\x1b[?2004h")
    assert chat.questions[1] == pasted


def test_vi_keys(chat):
    with chat.open("--vi") as terminal:
        terminal.wait_for_prompt()
        terminal.type("echo Xab")
        terminal.wait_for("echo Xab")
        terminal.type("\x1b")
        terminal.watch(0.8)
        terminal.type("0fXxA!")
        terminal.wait_for("echo ab!")


def test_the_terminal_is_left_as_it_was_and_what_is_not_saved_is_said(chat):
    with chat.open() as terminal:
        before = termios.tcgetattr(terminal.descriptor)
        terminal.ask("echo one")
        terminal.type(CTRL_D)
        assert terminal.wait_for_exit() == 0
        assert termios.tcgetattr(terminal.descriptor) == before
        assert "1 turn was not saved (/save FILE" in terminal.text


def test_ctrl_z_leaves_the_terminal_to_the_shell(chat):
    env = chat.environ(TERM="xterm-256color", PS1="shell: ")
    with Terminal(["/bin/sh"], env, chat.home) as terminal:
        terminal.type(shlex.join(chat.command) + ENTER)
        terminal.wait_for_prompt()
        terminal.type("slow forever" + ENTER)
        terminal.wait_for("abab")
        terminal.type("\x1a")
        terminal.wait_until(lambda: terminal.cursor_line.endswith("shell:"), "the shell")
        terminal.type("echo is-$((1 + 1))" + ENTER)
        terminal.wait_for("is-2")
        assert "echo is-$((1 + 1))" in terminal.text, "keys are shown"
        terminal.type("fg" + ENTER)
        terminal.watch(0.5)
        terminal.type(CTRL_C)
        terminal.wait_for("[interrupted]")
        terminal.wait_for_prompt()
        terminal.type(CTRL_D)
        terminal.wait_until(lambda: terminal.cursor_line == "shell:", "the shell")


def _reflow(terminal: Terminal, columns: int) -> None:
    """Make the terminal narrower, breaking its lines anew as most do today."""
    rows = [line.rstrip() for line in terminal.screen.display]
    x, y = terminal.screen.cursor.x, terminal.screen.cursor.y
    pieces = [[row[i : i + columns] for i in range(0, len(row), columns)] or [""] for row in rows]
    place = sum(map(len, pieces[:y])) + x // columns, x % columns
    lines = [piece for row in pieces[: y + 1] for piece in row]
    terminal.resize(terminal.screen.lines, columns)
    text = "\r\n".join(lines) + f"\x1b[{place[0] + 1};{place[1] + 1}H"
    terminal._stream.feed(b"\x1b[H\x1b[2J" + text.encode())


def test_a_wrapped_prompt_leaves_nothing_behind_when_the_window_changes(chat):
    text = "echo " + " ".join(f"word{i}" for i in range(20))
    with chat.open(columns=60, TMUX="x") as terminal:
        terminal.wait_for_prompt()
        terminal.type(text)
        terminal.wait_for("word19")
        for columns in (40, 30):
            _reflow(terminal, columns)
            terminal.wait_until(
                lambda: terminal.text.replace("\n", "").replace("  ", "").endswith(text[-40:]),
                "the text drawn anew",
            )
            terminal.watch(0.3)
            assert terminal.text.count("> echo") == 1, terminal.text
            assert terminal.text.count("word3") == 1, terminal.text
        terminal.type(CTRL_C)
        terminal.wait_for_prompt()
        assert "word" not in terminal.text
