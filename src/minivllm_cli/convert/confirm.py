"""The one question of `convert-weights`: may what is at DST be replaced?"""

import sys
from pathlib import Path

from minivllm_cli.console import Console, strip_controls
from minivllm_cli.problems import CliError
from minivllm_engine.units import format_size


def confirm_overwrite(console: Console, places: list[Path], *, yes: bool) -> None:
    """Ask before `places` are replaced, unless there is nothing in them or the answer was given.

    Raises:
        CliError: the answer is no, or nobody can be asked.
    """
    full = [place for place in places if _has_content(place)]
    if yes or not full:
        return
    what = " and ".join(f"{place} ({_content(place)})" for place in full)
    if not sys.stdin or not sys.stdin.isatty():
        raise CliError(
            f"--overwrite would replace {what}",
            why="stdin is no terminal, so nobody can be asked",
            hint="--overwrite -y",
        )
    console.write(strip_controls(f"replace {what}? [y/N] "))
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CliError("nothing was replaced", hint="another DST, or --overwrite -y")


def _has_content(place: Path) -> bool:
    return place.exists() and (not place.is_dir() or any(place.iterdir()))


def _content(place: Path) -> str:
    files = [file for file in place.rglob("*") if file.is_file()] if place.is_dir() else [place]
    size = format_size(sum(file.lstat().st_size for file in files))
    return f"{len(files):,} file{'' if len(files) == 1 else 's'}, {size}"
