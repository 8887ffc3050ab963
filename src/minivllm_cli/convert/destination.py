"""DST before anything is written: is it a fit place, and may what is there be replaced?"""

import os
import sys
from pathlib import Path

from minivllm_cli.command import Invocation
from minivllm_cli.console.streams import strip_controls
from minivllm_cli.convert.flags import ConvertFlags
from minivllm_cli.errors import CliError
from minivllm_engine.conversion import Source
from minivllm_engine.conversion.destination import Destination, is_filled
from minivllm_engine.conversion.file_errors import destination_errors
from minivllm_engine.core.units import count_text, format_size


def check_destination(dst: Path, source: Source, flags: ConvertFlags) -> Destination:
    """The paths of a conversion to `dst`.

    Raises:
        CliError: it is a directory that cannot be renamed over.
        ConversionError: something is there, or it is where the source is.
    """
    real = Path(os.path.realpath(dst))
    if real == Path.cwd() or not real.name:
        what = "the current directory" if real.name else "the root directory"
        raise CliError(
            f"DST {dst} is {what}",
            why="a target is built beside DST and renamed to it when it is complete",
            hint="the path of a new directory",
        )
    destination = Destination.of(dst)
    destination.check(source, resume=flags.resume, overwrite=flags.overwrite)
    return destination


@destination_errors()
def confirm_overwrite(run: Invocation, destination: Destination, *, yes: bool) -> None:
    """Ask before DST, or what an earlier run left beside it, is replaced.

    Nobody is asked where there is nothing, or where the answer was given.

    Raises:
        CliError: the answer is no, or nobody can be asked.
    """
    full = [place for place in (destination.path, destination.partial) if is_filled(place)]
    if yes or not full:
        return
    what = " and ".join(f"{place} ({_content(place)})" for place in full)
    if not sys.stdin or not sys.stdin.isatty():
        raise CliError(
            f"--overwrite would replace {what}",
            why="stdin is no terminal, so nobody can be asked",
            hint="--overwrite -y",
        )
    run.interrupts.activity = "asking"
    run.console.write(strip_controls(f"replace {what}? [y/N] "))
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CliError(
            "nothing was replaced",
            why="the question was not answered with y or yes",
            hint="another DST, or --overwrite -y",
        )


def _content(place: Path) -> str:
    files = [file for file in place.iterdir() if file.is_file()]
    size = format_size(sum(file.lstat().st_size for file in files))
    return f"{count_text(len(files), 'file')}, {size}"
