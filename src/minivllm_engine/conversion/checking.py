"""Comparing a finished conversion with its source."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm_engine.checkpoint.index import CheckpointIndex, resolve_model
from minivllm_engine.checkpoint.mismatch import MANIFEST
from minivllm_engine.checkpoint.shard_index import read_shard_index
from minivllm_engine.conversion.building import index_content
from minivllm_engine.conversion.destination import INDEX
from minivllm_engine.conversion.file_errors import reading_errors
from minivllm_engine.conversion.hashing import sha256_of
from minivllm_engine.conversion.head import settle_head
from minivllm_engine.conversion.manifest import manifest_options, read_manifest
from minivllm_engine.conversion.plan import Plan
from minivllm_engine.conversion.planning import plan_conversion
from minivllm_engine.conversion.progress import Callback, Counter
from minivllm_engine.conversion.reading import TensorReader
from minivllm_engine.conversion.report import Difference, Progress
from minivllm_engine.conversion.source import Source
from minivllm_engine.conversion.threads import one_thread
from minivllm_engine.conversion.verifying import Verifier
from minivllm_engine.conversion.way_out import not_covered
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.model_config.generation_config import read_json_object


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check` compared, and found."""

    num_shards: int
    num_tensors: int
    num_bytes: int
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "kind": "convert-check",
            "shards": self.num_shards,
            "tensors": self.num_tensors,
            "bytes": self.num_bytes,
            "differences": [
                {"kind": d.kind, "name": d.name, "detail": d.detail} for d in self.differences
            ],
            "ok": self.ok,
        }


@reading_errors()
def check(
    source: Source, dst: str | Path, *, progress: Callable[[Progress], None] | None = None
) -> CheckReport:
    """Read `dst` again, verify its hashes, invert the mapping and compare with `source`; scan values.

    The options of the conversion are taken from the manifest in `dst`. Writes nothing.

    Raises:
        CheckpointError: `dst` has no manifest, or the source cannot be read.
        ConversionError: code "not_covered": the source no longer has a plan without problems.
    """
    dst = Path(dst).expanduser()
    manifest = read_manifest(dst)
    plan = plan_conversion(source, manifest_options(manifest, dst / MANIFEST))
    with one_thread(), TensorReader.of(source) as reader:
        plan = settle_head(plan, dst, reader, progress)
        if not plan.ok:
            raise not_covered(plan)
        differences = [*_compare_files(plan, dst, manifest, progress)]
        verifier = Verifier(plan, dst, reader)
        counter = Counter(progress, "check", len(plan.shards), verifier.num_bytes(verifier.names))
        differences += verifier.header_differences
        differences += verifier.compare(verifier.names, counter)
        differences += _not_loadable(plan, dst, found_wrong=bool(differences))
    return CheckReport(len(plan.shards), len(plan.targets), plan.bytes_out, tuple(differences))


def _not_loadable(plan: Plan, dst: Path, *, found_wrong: bool) -> Iterator[Difference]:
    """What is as it was made to be, and will not be loaded all the same.

    Args:
        found_wrong: something differs already, which the loader would only say again.
    """
    for name in plan.missing:
        yield Difference("incomplete", name, "left out by --allow-missing: it will not be loaded")
    if plan.missing or found_wrong:
        return
    try:
        CheckpointIndex.open(resolve_model(dst)).check(ModelConfig.from_dir(dst))
    except CheckpointError as error:
        why = error.why.splitlines()[0] if error.why else ""
        yield Difference("refused", dst.name, f"{error.what}: {why}" if why else error.what)


def _compare_files(
    plan: Plan, dst: Path, manifest: Mapping[str, Any], progress: Callback | None
) -> Iterator[Difference]:
    recorded = {shard["name"]: shard for shard in manifest["shards"]}
    present = [shard for shard in plan.shards if (dst / shard.name).is_file()]
    total = sum((dst / shard.name).stat().st_size for shard in present)
    counter = Counter(progress, "hash", len(plan.shards), total)
    for number, shard in enumerate(plan.shards, 1):
        counter.enter_shard(number)
        if shard not in present:
            yield Difference("missing", shard.name, "the file is not there")
        elif shard.name not in recorded:
            yield Difference("hash", shard.name, "the manifest does not name it")
        elif sha256_of(dst / shard.name, counter.advance) != recorded[shard.name]["sha256"]:
            yield Difference("hash", shard.name, "is not the file that the manifest names")
    known = {shard.name for shard in plan.shards}
    for file in sorted(dst.glob("*.safetensors")):
        if file.name not in known:
            yield Difference("unexpected", file.name, "belongs to no shard")
    if len(plan.shards) > 1:
        yield from _compare_index(plan, dst)
    yield from _compare_config(plan, dst)
    for file in plan.source.side_files:
        copy = dst / file.name
        if not copy.is_file():
            yield Difference("side_file", file.name, "is not there")
        elif copy.read_bytes() != file.read_bytes():
            yield Difference("side_file", file.name, "differs from the source's")


def _compare_index(plan: Plan, dst: Path) -> Iterator[Difference]:
    try:
        found = read_shard_index(dst / INDEX).weight_map
    except CheckpointError as error:
        yield Difference("missing", INDEX, error.what)
        return
    if dict(found) != index_content(plan)["weight_map"]:
        yield Difference("config", INDEX, "does not say where the tensors lie")


def _compare_config(plan: Plan, dst: Path) -> Iterator[Difference]:
    try:
        found = read_json_object(dst / "config.json")
    except CheckpointError as error:
        yield Difference("config", "config.json", str(error.why))
        return
    if found != plan.config:
        text, wanted = found.get("text_config"), plan.config["text_config"]
        keys = [key for key in wanted if not isinstance(text, dict) or text.get(key) != wanted[key]]
        yield Difference(
            "config", "config.json", f"differs in {', '.join(keys) or 'its outer keys'}"
        )
