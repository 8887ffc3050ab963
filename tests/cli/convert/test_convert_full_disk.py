"""A disk without room, seen from the command line: the code, the words, what is left, and the next run."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.convert.conftest import Run
from cli.program import Finished, Program

_SMALL = ("--max-shard-size", "90kB")
_LIMITED = [sys.executable, str(Path(__file__).with_name("limited_minivllm.py"))]

# What stops the conversion: a limit that only a later file exceeds, the disk early and late (in the
# manifest, when all shards are there).
WAYS = {
    "limit": ("limit", "85000"),
    "first file": ("full", "0"),
    "third file": ("full", "10"),
    "manifest": ("full", "-"),
}


def contents(path: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes()
        for file in path.iterdir()
        if file.name != "minivllm_manifest.json"  # it has the arguments
    }


@contextmanager
def full_after(count: int) -> Iterator[None]:
    """A disk that has no room after so many files were forced to it."""
    fsync, left = os.fsync, [count]

    def full_fsync(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full_fsync)
        yield


def run_short_of_room(program: Program, here: Run, how: str, number: str, *args: str) -> Finished:
    if how == "limit":
        program.command = [*_LIMITED, number]
        return program.run("convert-weights", "src", "dst", *_SMALL, *args)
    with full_after(int(number)):
        return here("src", "dst", *_SMALL, *args)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_half_is_published_and_the_next_run_goes_on(
    way: str, program: Program, here: Run, src: Path, tmp_path: Path
) -> None:
    how, number = WAYS[way]
    assert here("src", "whole", *_SMALL).code == 0
    whole = contents(tmp_path / "whole")
    shards = sum(name.endswith(".safetensors") for name in whole)
    if number == "-":
        # Each shard and each state takes two, then there are the side files.
        number = str(2 * (2 * shards + 1) + 3)
    done = run_short_of_room(program, here, how, number)
    assert (done.code, done.stdout) == (1, b""), done.err
    assert b"Traceback" not in done.stderr
    error, why, remedy = done.err_lines[-3:]
    if how == "limit":
        assert error.startswith("error: a file in ") and why == "why: File too large"
        assert "ulimit -f" in remedy and "--max-shard-size" in remedy
    else:
        assert error.endswith("dst.partial is full") and why == "why: No space left on device"
    assert remedy.startswith("try: ") and "--resume" in remedy
    assert not (tmp_path / "dst").exists()
    partial = tmp_path / "dst.partial"
    assert not list(partial.glob("*.tmp")) and not (partial / "minivllm_manifest.json").exists()
    kept = len(list(partial.glob("*.safetensors")))
    assert (kept == 0) == (way == "first file") and (kept == shards) == (way == "manifest")
    if how == "limit":
        # The other way that the error names stays below it.
        assert here("src", "small", "--max-shard-size", "20kB").code == 0
        assert max(len(content) for content in contents(tmp_path / "small").values()) < 85_000
    again = here("src", "dst", *_SMALL, "--resume")
    assert (again.code, again.out) == (0, "dst\n"), again.err
    assert kept == 0 or f"({kept} from an earlier run)" in again.err
    assert contents(tmp_path / "dst") == whole
    assert not partial.exists()
    assert here("src", "dst", "--check").code == 0


def test_an_old_target_outlives_a_full_disk(
    program: Program, here: Run, src: Path, tmp_path: Path
) -> None:
    assert here("src", "dst", *_SMALL).code == 0
    before = contents(tmp_path / "dst")
    done = run_short_of_room(program, here, "full", "12", "--overwrite", "-y", "--dtype", "bf16")
    assert done.code == 1
    assert contents(tmp_path / "dst") == before
    assert here("src", "dst", "--check").code == 0
    # DST is filled with another conversion: starting again replaces both.
    assert here("src", "dst", *_SMALL, "--overwrite", "-y", "--dtype", "bf16").code == 0
    assert not list(tmp_path.glob("dst?*"))
