"""The line editor: keys, paste, history, completion; and the terminal's modes where no line is read."""

import os
import select
import signal
import sys
import termios
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, get_app
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import DummyHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output

from minivllm_cli.chat.history_file import HistoryFile
from minivllm_cli.chat.parse_line import opens_block

PASTE_SECONDS = 0.03
_REFLOW_VARIABLES = {
    *("TMUX", "VTE_VERSION", "KITTY_WINDOW_ID", "WT_SESSION", "TERM_PROGRAM", "KONSOLE_VERSION"),
    *("ALACRITTY_WINDOW_ID", "WEZTERM_PANE"),
}
_REFLOW_TERMS = ("foot", "alacritty", "xterm-kitty", "xterm-ghostty")
_PROMPT, _EDIT_PROMPT = "> ", "edit> "
_ENTER = KeyPress(Keys.ControlM, "\r")


class PromptInterrupt(Exception):
    """Ctrl-C on an empty line, or what gives an edit up."""


class Prompt:
    """Reads what the user types. stdin and `stream` must be terminals.

    Args:
        stream: the terminal to draw on (not `sys.stdout`, which is redirected).
        history: where texts are kept; None neither reads nor keeps any.
        completions: (text, help) for a line that is typed so far, or None for a file name.
        vi: vi keys instead of emacs keys.

    Attributes:
        newline_on_enter: Enter breaks the line and Alt-Enter sends, instead of the reverse.
    """

    def __init__(
        self,
        stream: TextIO,
        history: HistoryFile | None,
        completions: Callable[[str], Sequence[tuple[str, str]] | None],
        *,
        vi: bool,
    ) -> None:
        self.newline_on_enter = False
        self._input = create_input(sys.stdin)
        self._output = create_output(stdout=stream)
        if isinstance(self._output, Vt100_Output):
            # Where the cursor is need not be asked: the answer would hold up each Enter for a round
            # trip, and terminals that give none would get a warning on their screen.
            self._output.enable_cpr = False
        self._has_read = False
        self._edits = False
        self._enter = _HeldEnter()
        self._session: PromptSession[str] = PromptSession(
            _PROMPT,
            input=self._input,
            output=self._output,
            history=history or DummyHistory(),
            multiline=True,
            vi_mode=vi,
            key_bindings=self._bindings(),
            completer=_Completer(completions),
            complete_while_typing=False,
            auto_suggest=AutoSuggestFromHistory(),
            enable_suspend=True,
            enable_open_in_editor=True,
            # Spaces, so that text copied from the screen holds no marks.
            prompt_continuation=lambda width, line_number, is_soft_wrap: " " * width,
        )
        self._session.app.key_processor.before_key_press += self._enter.before_next_key
        if _reflows(os.environ):
            _erase_reflowed_rows(self._session.app)

    def read(self) -> str:
        """Read one text, of one or more lines.

        Raises:
            PromptInterrupt: Ctrl-C on an empty line.
            EOFError: Ctrl-D on an empty line, or the terminal is gone.
        """
        return self._read(_PROMPT)

    def edit(self, text: str) -> str:
        """Let the user change `text`, at a prompt of its own.

        Raises:
            PromptInterrupt: Ctrl-C or Ctrl-D, whatever stands there: the edit is given up.
            EOFError: the terminal is gone.
        """
        self._edits = True
        try:
            return self._read(_EDIT_PROMPT, text)
        finally:
            self._edits = False

    def _read(self, message: str, prefilled: str = "") -> str:
        self._enter.drop()
        self._enter.typed_ahead = self._take_what_waits()
        store_typeahead(self._input, self._enter.typed_ahead)
        try:
            return self._session.prompt(message, default=prefilled)
        finally:
            self._mark_pastes()

    @contextmanager
    def pastes_marked(self) -> Iterator[None]:
        """Have the terminal mark what is pasted also while nothing is read: during an answer."""
        self._mark_pastes()
        try:
            yield
        finally:
            self._output.disable_bracketed_paste()
            self._output.flush()

    def confirm(self, question: str) -> bool:
        """Ask for a yes or no; anything but a yes is a no."""
        session: PromptSession[str] = PromptSession(
            f"{question} [y/N] ",
            input=self._input,
            output=self._output,
            history=DummyHistory(),
            interrupt_exception=PromptInterrupt,
        )
        try:
            return session.prompt().strip().lower() in ("y", "yes")
        except (EOFError, PromptInterrupt):
            return False
        finally:
            self._mark_pastes()

    def _mark_pastes(self) -> None:
        # Reading a line ends with the marks switched off.
        self._output.enable_bracketed_paste()
        self._output.flush()

    def drop_typed_ahead(self) -> int:
        """Forget keys that wait for the next prompt; how many lines they made. Not while one is read."""
        return _num_lines(self._take_what_waits())

    def _take_what_waits(self) -> list[KeyPress]:
        """Take the keys that came while nobody read."""
        keys = get_typeahead(self._input)
        while not self._input.closed and select.select([self._input.fileno()], [], [], 0)[0]:
            keys += self._input.read_keys()
        if not self._has_read:
            # While the model was loaded the terminal made newlines, else a Ctrl-J, of Enter.
            self._has_read = True
            keys = [_ENTER if press.key == Keys.ControlJ else press for press in keys]
        return keys

    def _bindings(self) -> KeyBindings:
        bindings = KeyBindings()
        typing = has_focus(DEFAULT_BUFFER)

        @bindings.add("enter", filter=typing)
        def enter(event: KeyPressEvent) -> None:
            if self.newline_on_enter or opens_block(event.current_buffer.text):
                event.current_buffer.insert_text("\n")
            else:
                self._enter.press(event)

        @bindings.add("escape", "enter", filter=typing)
        def alt_enter(event: KeyPressEvent) -> None:
            if self.newline_on_enter:
                event.current_buffer.validate_and_handle()
            else:
                event.current_buffer.insert_text("\n")

        @bindings.add("c-j", filter=typing)
        def ctrl_j(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @bindings.add("c-c", filter=typing)
        @bindings.add("<sigint>")
        def ctrl_c(event: KeyPressEvent) -> None:
            if event.current_buffer.text and not self._edits:
                event.current_buffer.reset()
            else:
                event.app.exit(exception=PromptInterrupt())

        @bindings.add("c-d", filter=typing & Condition(lambda: self._edits))
        def ctrl_d(event: KeyPressEvent) -> None:
            event.app.exit(exception=PromptInterrupt())

        return bindings


def _reflows(environ: Mapping[str, str]) -> bool:
    """Tell whether the terminal is known to break longer lines anew when it becomes narrower."""
    return not _REFLOW_VARIABLES.isdisjoint(environ) or environ.get("TERM") in _REFLOW_TERMS


def _erase_reflowed_rows(app: Application[str]) -> None:
    """On a resize begin to erase where the prompt begins now: its rows have become more by then."""
    on_resize = app._on_resize

    def resized() -> None:
        screen, cursor = app.renderer.last_rendered_screen, app.renderer._cursor_pos
        if screen is not None:
            columns = app.output.get_size().columns
            rows = [screen.data_buffer[y] for y in range(cursor.y)]
            ends = [
                max((x for x, cell in row.items() if cell.char != " "), default=0) for row in rows
            ]
            app.output.cursor_up(sum(end // columns for end in [*ends, cursor.x]))
        on_resize()

    app._on_resize = resized  # type: ignore[method-assign]


class _HeldEnter:
    """Holds an Enter back for a moment: if more arrives in it, this was a line break of pasted text.

    A terminal without bracketed paste sends pasted lines like typed ones, only faster.

    Attributes:
        typed_ahead: keys that were there before the prompt was. They all come at once, however slowly
            they were typed; an Enter among them sends.
    """

    def __init__(self) -> None:
        self.typed_ahead: list[KeyPress] = []
        self._cancel: Callable[[], None] | None = None

    def press(self, event: KeyPressEvent) -> None:
        if any(key is event.key_sequence[-1] for key in self.typed_ahead):
            event.current_buffer.validate_and_handle()
        else:
            self._hold(event.app)

    def _hold(self, app: Application[str]) -> None:
        assert app.loop is not None

        def send() -> None:
            self._cancel = None
            if not app.is_done:
                app.current_buffer.validate_and_handle()

        self._cancel = app.loop.call_later(PASTE_SECONDS, send).cancel

    def before_next_key(self, _sender: object) -> None:
        if self._cancel is not None:
            self.drop()
            get_app().current_buffer.insert_text("\n")

    def drop(self) -> None:
        if self._cancel is not None:
            self._cancel()
            self._cancel = None


def _num_lines(keys: Sequence[KeyPress]) -> int:
    """Count lines among typed keys that hold anything; the last one need not be ended."""
    count, filled = 0, False
    for press in keys:
        count += filled and press.key == Keys.ControlM
        filled = press.key != Keys.ControlM
    return count + filled


class _Completer(Completer):
    """Completes a line that begins with a slash."""

    def __init__(self, completions: Callable[[str], Sequence[tuple[str, str]] | None]) -> None:
        self._completions = completions
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor
        if not line.startswith("/") or "\n" in document.text:
            return
        word = line.rpartition(" ")[2]
        found = self._completions(line)
        if found is None:
            path = Document(word.removeprefix("@"))
            yield from self._paths.get_completions(path, event)
            return
        for text, help_text in found:
            if text.startswith(word):
                yield Completion(text, start_position=-len(word), display_meta=help_text)


@contextmanager
def keys_held_back() -> Iterator[Callable[[], None]]:
    """Keep keys from being echoed into an answer; what is typed waits for the next prompt.

    Ctrl-C and Ctrl-Z keep their meaning. The old modes come back at the end, or when what is yielded
    is called.
    """
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    changed = termios.tcgetattr(descriptor)
    # Enter stays a carriage return: the prompt takes a newline for Ctrl-J. Ctrl-D stays a key.
    changed[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
    changed[3] &= ~(termios.ECHO | termios.ICANON)
    # Ctrl-C would have the terminal forget what was typed, and nobody could say how much that was.
    changed[3] |= termios.NOFLSH

    def hold(*_: object) -> None:
        termios.tcsetattr(descriptor, termios.TCSANOW, changed)

    def restore() -> None:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)

    def suspend(*_: object) -> None:
        restore()  # a shell without a line editor takes the modes as they are
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, suspend)

    hold()
    # A shell that we come back from has left modes of its own.
    handlers = {signal.SIGTSTP: suspend, signal.SIGCONT: hold}
    old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield restore
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        restore()
