"""Carrying out a plan: shards, side files, verification, manifest and index in a partial directory."""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from minivllm_engine.checkpoint.mismatch import MANIFEST
from minivllm_engine.conversion.destination import (
    INDEX,
    STATE,
    Destination,
    is_filled,
    remove_checkpoint,
    remove_templates,
)
from minivllm_engine.conversion.explaining import not_covered
from minivllm_engine.conversion.manifest import (
    FinishedShard,
    fingerprint,
    index_content,
    manifest_content,
    read_manifest,
    read_state,
    sha256_of,
    source_hashes,
    write_json,
    write_state,
)
from minivllm_engine.conversion.plan import Plan
from minivllm_engine.conversion.planning import free_space
from minivllm_engine.conversion.reader import TensorReader, one_thread
from minivllm_engine.conversion.report import (
    Callback,
    Cast,
    Counter,
    Progress,
    Report,
    ShardReport,
    destination_errors,
    reading_errors,
)
from minivllm_engine.conversion.source_files import carried_name
from minivllm_engine.conversion.verify import Verifier, sample_of, settle_head
from minivllm_engine.conversion.writer import ShardWriter
from minivllm_engine.core.atomic_file import write_atomic
from minivllm_engine.core.errors import CheckpointError, ConversionError
from minivllm_engine.core.escape import escape
from minivllm_engine.core.units import format_size


class TargetBuilder:
    """The steps of one conversion over its partial directory, in the order of the methods."""

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        reader: TensorReader,
        word: str,
        progress: Callback | None,
    ) -> None:
        self._plan, self._directory, self._reader = plan, directory, reader
        self._word, self._progress = word, progress

    def write_shards(self) -> tuple[list[FinishedShard], frozenset[str]]:
        """Write all shards in order; return the names of those that were there."""
        done = self._resumable()
        missing = sum(s.num_bytes for s in self._plan.shards if s.name not in done)
        _check_space(self._plan, self._directory, missing)
        write_state(self._directory, self._word, list(done.values()))
        writer = ShardWriter(self._plan, self._reader)
        counter = Counter(self._progress, "write", len(self._plan.shards), missing)
        finished: list[FinishedShard] = []
        for number, shard in enumerate(self._plan.shards, 1):
            counter.enter_shard(number)
            if shard.name in done:
                finished.append(done[shard.name])
                continue
            finished.append(writer.write(shard, self._directory, counter))
            later = [s for name, s in done.items() if s not in finished]
            write_state(self._directory, self._word, [*finished, *later])
        return finished, frozenset(done)

    def _resumable(self) -> dict[str, FinishedShard]:
        """Shards of this very conversion whose hash is right; all other files there go."""
        state = read_state(self._directory)
        recorded = state[1] if state and state[0] == self._word else ()
        if state and state[0] != self._word:
            raise ConversionError(
                f"{self._directory} belongs to another conversion",
                why="source, options or mapping have changed since",
                hint="--overwrite to start again",
                code="destination",
            )
        total = sum(shard.num_bytes for shard in recorded)
        counter = Counter(self._progress, "resume", max(1, len(recorded)), total)
        done = {}
        for number, shard in enumerate(recorded, 1):
            counter.enter_shard(number)
            file = self._directory / shard.name
            if file.is_file() and sha256_of(file, counter.advance) == shard.sha256:
                done[shard.name] = shard
        for file in self._directory.iterdir():
            if file.is_dir() and not file.is_symlink():
                remove_templates(file)
            elif file.name not in done and file.name != STATE:
                file.unlink()
        return done

    def write_side_files(self) -> None:
        write_json(self._directory / "config.json", self._plan.config)
        for file in self._plan.source.side_files:
            copy = self._directory / carried_name(file)
            copy.parent.mkdir(exist_ok=True)
            with reading_errors():
                content = file.read_bytes()
            write_atomic(copy, content, durable=True)

    def verify(self, how: str) -> int:
        """Compare the target with its source; return the number of tensors compared.

        Raises:
            ConversionError: "verification": something differs. The shards will be written anew.
        """
        if how == "none":
            return 0
        verifier = Verifier(self._plan, self._directory, self._reader)
        names = sample_of(self._plan) if how == "sample" else verifier.names
        counter = Counter(
            self._progress, "verify", len(self._plan.shards), verifier.num_bytes(names)
        )
        differences = verifier.header_differences + verifier.compare(names, counter)
        if differences:
            write_state(self._directory, self._word, ())
            lines = [f"{escape(d.name)}: {d.detail}" for d in differences[:4]]
            raise ConversionError(
                f"{len(differences)} differences between what was written and the source",
                why="\n".join(lines),
                hint="Disk or memory may be failing. Run again with --resume --verify full.",
                code="verification",
            )
        return len(names)

    def write_manifest(
        self,
        shards: tuple[ShardReport, ...],
        casts: tuple[Cast, ...],
        verified: str,
        argv: tuple[str, ...],
    ) -> None:
        """Write the manifest, then the index: what makes a directory of shards a checkpoint comes last."""
        files = self._plan.source.files
        total = sum(file.stat().st_size for file in files)
        counter = Counter(self._progress, "hash", len(files), total)
        content = manifest_content(
            self._plan,
            word=self._word,
            argv=argv,
            sources=source_hashes(self._plan, counter.advance),
            shards=shards,
            casts=casts,
            verified=verified,
        )
        write_json(self._directory / MANIFEST, content)
        if len(shards) > 1:
            write_json(self._directory / INDEX, index_content(self._plan))


def _check_space(plan: Plan, directory: Path, missing: int) -> None:
    largest = max((shard.num_bytes for shard in plan.shards), default=0)
    needed, free = missing + largest if missing else 0, free_space(directory)
    if needed > free:
        raise ConversionError(
            f"the disk of {directory} has {format_size(free)} free, {format_size(needed)} are needed",
            why=f"{format_size(missing)} to write, and room for one more shard",
            hint="Free some space, or give a directory on another disk.",
            code="no_space",
        )


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
            destination.publish(overwrite=overwrite)
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
        for half in directory.rglob("*.tmp"):
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
