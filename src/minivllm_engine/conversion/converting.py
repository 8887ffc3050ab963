"""Carrying out a plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from minivllm_engine.conversion.plan import Plan
from minivllm_engine.conversion.report import Progress, Report


def convert(
    plan: Plan,
    dst: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    verify: Literal["none", "sample", "full"] = "sample",
    argv: tuple[str, ...] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Write the target of `plan` to `dst`: built in `dst`.partial, renamed when it is complete.

    An exception (KeyboardInterrupt too, which passes through) leaves `dst`.partial for `resume`.

    Args:
        resume: skip the shards in `dst`.partial whose hash is right; a `dst` that this very
            conversion has completed before is checked and left as it is.
        overwrite: replace a checkpoint at `dst`, and throw away a `dst`.partial.
        verify: compare what was written with the source, read back from the disk: one tensor for
            each line of the table, or all.
        argv: kept in the manifest.
        progress: called after every tensor.

    Raises:
        ConversionError: code "not_covered" (the plan has problems), "destination" (not empty, equal to or
            inside the source, or holding what is no checkpoint), "no_space" (before or while
            writing), "non_finite" (values that are, or would become, not finite; by name),
            "verification" (what was written differs), "write_failed".
        CheckpointError: the source changed or cannot be read.
    """
    raise NotImplementedError
