"""The one question of `convert-weights`: may what is at DST be replaced?"""

import sys
from pathlib import Path

from minivllm_cli.command import Invocation
from minivllm_cli.console import strip_controls
from minivllm_cli.problems import CliError
from minivllm_engine.conversion.plan import partial_path
from minivllm_engine.units import format_size


def confirm_overwrite(run: Invocation, dst: Path, *, yes: bool) -> None:
    """Ask before `dst`, or what an earlier run left beside it, is replaced.

    Nobody is asked where there is nothing, or where the answer was given.

    Raises:
        CliError: the answer is no, or nobody can be asked.
    """
    full = [place for place in (dst, partial_path(dst)) if _has_content(place)]
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
        raise CliError("nothing was replaced", hint="another DST, or --overwrite -y")


def _has_content(place: Path) -> bool:
    return place.exists() and (not place.is_dir() or any(place.iterdir()))


def _content(place: Path) -> str:
    files = [file for file in place.rglob("*") if file.is_file()] if place.is_dir() else [place]
    size = format_size(sum(file.lstat().st_size for file in files))
    return f"{len(files):,} file{'' if len(files) == 1 else 's'}, {size}"
