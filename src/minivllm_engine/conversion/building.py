"""Building a target in its partial directory: shards, side files, verification, manifest, index."""

from pathlib import Path
from typing import Any

from minivllm_engine.checkpoint.mismatch import MANIFEST
from minivllm_engine.conversion.destination import INDEX, STATE
from minivllm_engine.conversion.durable import write_durably, write_json
from minivllm_engine.conversion.hashing import sha256_of
from minivllm_engine.conversion.manifest import (
    FinishedShard,
    manifest_content,
    read_state,
    source_hashes,
    write_state,
)
from minivllm_engine.conversion.plan import Plan
from minivllm_engine.conversion.planning import free_space
from minivllm_engine.conversion.progress import Callback, Counter
from minivllm_engine.conversion.reading import TensorReader
from minivllm_engine.conversion.report import Cast, ShardReport
from minivllm_engine.conversion.verifying import Verifier, sample_of
from minivllm_engine.conversion.writing import ShardWriter
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
        """All shards in order, and the names of those that were there."""
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
            if file.name not in done and file.name != STATE:
                file.unlink()
        return done

    def write_side_files(self) -> None:
        write_json(self._directory / "config.json", self._plan.config)
        for file in self._plan.source.side_files:
            write_durably(self._directory / file.name, _content_of(file))

    def verify(self, how: str) -> int:
        """The number of source tensors compared.

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
        """Manifest, then index: what makes a directory of shards a checkpoint comes last."""
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


def index_content(plan: Plan) -> dict[str, Any]:
    """The index of a target in several files."""
    weight_map = {name: shard.name for shard in plan.shards for name in shard.tensors}
    return {
        "metadata": {"total_size": plan.bytes_out},
        "weight_map": dict(sorted(weight_map.items())),
    }


def _content_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read",
            why=error.strerror or str(error),
            hint="See that it is there and that you may read it.",
        ) from None


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
