"""Converts again and again, killed with SIGKILL at one step after another; run as a program.

    python kill_at_every_step.py SRC DST REFERENCE [overwrite]

A step is a call that changes the disk (a rename, a deletion, a new directory), or a tensor. After
each kill the destination must be absent, as it was before, or complete, and a second run must bring it to
REFERENCE. Prints the number of steps.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minivllm_engine.conversion import ConvertOptions, check, convert, open_source, plan_conversion
from support.converted import files_of

OPTIONS = ConvertOptions(max_shard_bytes=300_000, dtype="bf16")


CALLS = ("replace", "rename", "unlink", "rmdir", "mkdir")


def killer(count: int) -> Callable[..., None]:
    """A step of a program that is killed at the step after `count`."""
    left = count

    def step(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


def with_steps(step: Callable[[], None]) -> None:
    """Let every call that changes the disk be a step; after one is before the next."""

    def stepped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            step()
            return function(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, stepped(getattr(os, name)))


def in_child(work: Callable[[], None]) -> int:
    """The signal that ended the child, or 0; its own failure is the parent's."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def main(src: Path, dst: Path, reference: Path, overwrite: bool) -> None:
    torch.set_num_threads(1)
    # What a kill leaves is in the page cache; only a power cut would need the disk itself.
    os.fsync = lambda _: None
    plan = plan_conversion(open_source(src), OPTIONS)
    wanted = files_of(reference)
    old = files_of(dst) if overwrite else None

    def first_run(count: int) -> None:
        step = killer(count)
        with_steps(step)
        convert(plan, dst, overwrite=overwrite, progress=step)

    def second_run() -> None:
        convert(plan, dst, resume=True, overwrite=overwrite)

    count = 0
    while in_child(partial(first_run, count)):
        if dst.is_dir():
            found = files_of(dst)
            found.pop(".conversion.json", None)
            assert found in (wanted, old), f"half a target after {count} steps"
            if found == old:
                assert (dst / "minivllm_manifest.json").is_file()
        assert in_child(second_run) == 0
        assert files_of(dst) == wanted, f"step {count}"
        assert check(open_source(src), dst).ok
        left = sorted(path.name for path in dst.parent.iterdir() if path.name.startswith(dst.name))
        assert left == [dst.name], left
        for file in dst.iterdir():
            file.unlink()
        dst.rmdir()
        if old is not None:
            dst.mkdir()
            for name, content in old.items():
                (dst / name).write_bytes(content)
            (dst / "minivllm_manifest.json").write_text("{}")
        count += 1
    assert files_of(dst) == wanted
    print(count)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), overwrite=len(sys.argv) > 4)
