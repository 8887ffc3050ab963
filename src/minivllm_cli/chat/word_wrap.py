"""Lines that break between words where the terminal ends, not within one."""

import os
import textwrap
from collections.abc import Callable
from typing import IO, Any

from rich.cells import get_character_cell_size

_TAB = 8
_ERASE_FROM = "\x1b[{}G\x1b[K"
Columns = Callable[[], int]


def terminal_columns(file: IO[Any]) -> Columns | None:
    """Return what tells how wide the terminal is at present, 0 where it does not say or is gone.

    None where `file` is no terminal, or one that cannot erase.
    """
    if not file.isatty() or os.environ.get("TERM") == "dumb":
        return None

    def columns() -> int:
        try:
            return os.get_terminal_size(file.fileno()).columns
        except OSError:  # it was closed: whoever writes there will find out
            return 0

    return columns


def wrapped(text: str, columns: int, indent: int = 0) -> str:
    """Break the lines of whole text at blanks; `indent` blanks begin what a line goes on with.

    A word that is longer than a line stays whole, so that it can be copied.
    """
    if columns <= indent:
        return text
    lines = [
        textwrap.wrap(
            line,
            columns,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        or [""]
        for line in text.split("\n")
    ]
    return "\n".join(piece for pieces in lines for piece in pieces)


class StreamedWords:
    """Text that comes in pieces and is shown at once.

    The word at the end of a line is taken back and begun anew on the next one when it grows over the
    edge. Wide characters (CJK) may stand on either side of a break. A word longer than a line is
    left to the terminal.
    """

    def __init__(self) -> None:
        self._column = 0
        self._word = ""
        self._word_column = 0

    def feed(self, text: str, columns: int) -> str:
        """Return what to write for `text`, which holds no control characters but newline and tab.

        Args:
            columns: the width of the terminal now; 0 where it does not say.
        """
        if columns <= 0:
            return text
        return "".join(self._add(character, columns) for character in text)

    def _add(self, character: str, columns: int) -> str:
        if character == "\n":
            self._begin_word(0)
            return character
        if character in " \t":
            return self._add_blank(character, columns)
        width = get_character_cell_size(character)
        if width > 1 and self._word:
            self._begin_word(self._column)
        broken = "" if self._column + width <= columns else self._break_line()
        if width == 1 or (width == 0 and self._word):
            self._word += character
        self._column += width
        if width > 1:
            self._begin_word(self._column)
        return broken + character

    def _add_blank(self, blank: str, columns: int) -> str:
        width = 1 if blank == " " else _TAB - self._column % _TAB
        if self._column + width > columns:  # the break that is to come stands for it
            self._begin_word(columns)
            return ""
        self._begin_word(self._column + width)
        return blank

    def _break_line(self) -> str:
        word, width = self._word, self._column - self._word_column
        if word and self._word_column == 0:
            self._begin_word(0)
            return ""  # the terminal goes on below
        taken_back = _ERASE_FROM.format(self._word_column + 1) if word else ""
        self._begin_word(0)
        self._word, self._column = word, width
        return taken_back + "\n" + word

    def _begin_word(self, column: int) -> None:
        self._word, self._word_column, self._column = "", column, column
