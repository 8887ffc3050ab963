"""Tables as text, laid out by Rich: whole off a terminal, folded within its width on one."""

import io
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

_WIDEST = 100_000  # of a file or a pipe, which take a line of any length


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: its heading; no column of a table with a heading needs one.
        right: numbers stand to the right.
        width: cells of the terminal that it takes at least; 0 for as many as its longest text.
    """

    name: str = ""
    right: bool = False
    width: int = 0


def table_text(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None = None,
    heading: bool = True,
    indent: int = 0,
) -> str:
    """Lay out rows of one cell a column, one line a row, each ended by a newline.

    Args:
        width: of the terminal, where longer cells are folded; None cuts and folds nothing.
        heading: begin with the names of the columns. Without it, and with widths that suffice, a table can be
            written row by row.
        indent: spaces before each line.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=heading)
    for column in columns:
        table.add_column(
            Text(column.name),
            justify="right" if column.right else "left",
            min_width=column.width,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    file = io.StringIO()
    # Without markup and colour: cells hold names of files and tensors, which are not Rich's to read.
    RichConsole(file=file, width=width or _WIDEST, color_system=None, markup=False).print(table)
    return "".join(f"{' ' * indent}{line}".rstrip() + "\n" for line in file.getvalue().splitlines())


def output_width(to_terminal: bool) -> int | None:
    """Tell the columns of the terminal on stdout, or None if it is a file or a pipe."""
    return shutil.get_terminal_size().columns if to_terminal else None
