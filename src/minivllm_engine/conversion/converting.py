"""Carrying out a plan."""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from minivllm_engine.conversion.building import TargetBuilder
from minivllm_engine.conversion.destination import Destination, is_filled, remove_checkpoint
from minivllm_engine.conversion.file_errors import destination_errors
from minivllm_engine.conversion.hashing import sha256_of
from minivllm_engine.conversion.head import settle_head
from minivllm_engine.conversion.manifest import FinishedShard, fingerprint, read_manifest
from minivllm_engine.conversion.plan import Plan
from minivllm_engine.conversion.progress import Callback, Counter
from minivllm_engine.conversion.reading import TensorReader
from minivllm_engine.conversion.report import Cast, Progress, Report, ShardReport
from minivllm_engine.conversion.threads import one_thread
from minivllm_engine.conversion.way_out import not_covered
from minivllm_engine.core.errors import CheckpointError, ConversionError


@destination_errors()
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

    An exception (KeyboardInterrupt too, which passes through) leaves `dst`.partial for `resume`, but for
    "non_finite", which removes it.

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
            inside the source, or holding what is no checkpoint), "no_space" (known before
            writing), "non_finite" (values that are, or would become, not finite; by name),
            "verification" (what was written differs), "write_failed" (a full disk, and the like).
        CheckpointError: the source changed or cannot be read.
    """
    started = time.monotonic()
    destination = Destination.of(dst)
    if not plan.ok:
        raise not_covered(plan)
    destination.check(plan.source, resume=resume, overwrite=overwrite)
    with one_thread(), TensorReader.of(plan.source) as reader:
        known = plan.notes
        plan = settle_head(plan, destination.path, reader, progress)
        notes = tuple(note for note in plan.notes if note not in known)
        if not plan.ok:
            raise not_covered(plan)
        word = fingerprint(plan)
        if resume and not overwrite and is_filled(destination.path):
            return _already_there(plan, destination, word, progress, notes, started)
        if overwrite and not resume:
            remove_checkpoint(destination.partial)
        with destination.building() as directory, _left_behind(directory):
            builder = TargetBuilder(plan, directory, reader, word, progress)
            finished, resumed = builder.write_shards()
            builder.write_side_files()
            num_verified = builder.verify(verify)
            shards = tuple(
                ShardReport(shard.name, shard.num_bytes, shard.sha256, shard.name in resumed)
                for shard in finished
            )
            casts = _merged(finished)
            builder.write_manifest(shards, casts, verify, argv)
            destination.publish()
    return Report(
        dst=destination.path,
        shards=shards,
        num_tensors=len(plan.targets),
        bytes_out=plan.bytes_out,
        casts=casts,
        verified=verify,
        num_verified=num_verified,
        notes=notes,
        seconds=time.monotonic() - started,
    )


def _already_there(
    plan: Plan,
    destination: Destination,
    word: str,
    progress: Callback | None,
    notes: tuple[str, ...],
    started: float,
) -> Report:
    """Resuming what is complete: its hashes are verified, and nothing is written."""
    try:
        manifest = read_manifest(destination.path)
    except CheckpointError as error:
        raise _another(destination, error.what) from None
    if manifest.get("fingerprint") != word:
        raise _another(destination, "its manifest names another source, other options or rules")
    recorded = manifest["shards"]
    counter = Counter(progress, "resume", len(recorded), sum(s["bytes"] for s in recorded))
    for number, shard in enumerate(recorded, 1):
        counter.enter_shard(number)
        file = destination.path / shard["name"]
        if not file.is_file() or sha256_of(file, counter.advance) != shard["sha256"]:
            raise ConversionError(
                f"{file} is damaged",
                why="it is not the file that the manifest names",
                hint="--overwrite to convert again",
                code="verification",
            )
    destination.clean_up()
    return Report(
        dst=destination.path,
        shards=tuple(ShardReport(s["name"], s["bytes"], s["sha256"], True) for s in recorded),
        num_tensors=len(plan.targets),
        bytes_out=plan.bytes_out,
        casts=tuple(Cast(**cast) for cast in manifest["casts"]),
        verified="none",
        num_verified=0,
        notes=notes,
        seconds=time.monotonic() - started,
    )


def _another(destination: Destination, why: str) -> ConversionError:
    return ConversionError(
        f"{destination.path} is not empty and not the result of this conversion",
        why=why,
        hint="--overwrite -y to replace it",
        code="destination",
    )


@contextmanager
def _left_behind(directory: Path) -> Iterator[None]:
    """What a failure leaves in `directory`: nothing that no run could go on with, and no half file.

    Errors of the file system become errors that a user can act on.
    """
    try:
        yield
    except ConversionError as error:
        if error.code == "non_finite":
            # It would be the same the next time, and a source that is corrected is another one.
            remove_checkpoint(directory)
        raise
    except OSError as error:
        for half in directory.glob("*.tmp"):
            half.unlink()
        raise _disk_error(directory, error) from None


def _disk_error(directory: Path, error: OSError) -> ConversionError:
    what = f"{directory} cannot be written"
    hint = "Mend that, then run again with --resume: finished shards are kept."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"the disk of {directory} is full"
        hint = "Free some space, then run again with --resume: finished shards are kept."
    elif error.errno == errno.EFBIG:
        what = f"a file in {directory} cannot become as large as it has to"
        hint = (
            "Raise the limit of file sizes (ulimit -f), then run again with --resume; or start again "
            "with a smaller --max-shard-size and --overwrite."
        )
    return ConversionError(what, why=error.strerror or str(error), hint=hint, code="write_failed")


def _merged(finished: list[FinishedShard]) -> tuple[Cast, ...]:
    """One line a pattern, the worst of all shards."""
    worst: dict[tuple[str, str, str], Cast] = {}
    for cast in (cast for shard in finished for cast in shard.casts):
        key = (cast.pattern, cast.before, cast.after)
        if key not in worst or cast.max_relative_error > worst[key].max_relative_error:
            worst[key] = cast
    return tuple(worst.values())
