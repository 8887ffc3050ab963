"""A conversion as plain data: what becomes what, what is wrong, and what it needs. No torch."""

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from minivllm_engine.conversion.options import ConvertOptions, Renames
from minivllm_engine.conversion.source import Source

# Version of the mapping: raised whenever a rule gives another result than before.
MAPPING = "qwen3_5@1"

ProblemKind = Literal[
    "unmatched",  # a source tensor that no rule knows; `name` is its name in the file
    "missing",  # a target tensor without a source; `name` is canonical
    "wrong_shape",  # a source tensor whose shape contradicts the config
    "two_sources",  # rows of a target that two source tensors give
    "ambiguous",  # a layout that shapes cannot tell: an option has to say
    "layers",  # layer types of the config against what the layers hold
]

PROBLEM_WORDS: dict[ProblemKind, str] = {
    "unmatched": "unmatched",
    "missing": "missing",
    "wrong_shape": "of a wrong shape",
    "two_sources": "with two sources",
    "ambiguous": "ambiguous",
    "layers": "layers in contradiction",
}


# The short words of this project for the types of safetensors.
SHORT_DTYPES = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}
LONG_DTYPES = {short: long for long, short in SHORT_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor's first dimension: `groups` runs of `size` rows, `stride` rows apart."""

    offset: int
    groups: int
    stride: int
    size: int

    @property
    def count(self) -> int:
        return self.groups * self.size

    def runs(self) -> list[tuple[int, int]]:
        """Yield each run as (first row, row after the last)."""
        starts = range(self.offset, self.offset + self.groups * self.stride, self.stride)
        return [(start, start + self.size) for start in starts]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one source tensor that become rows of one target tensor.

    Attributes:
        transform: "copy"; "minus_one" subtracts 1 in fp32 (norms stored as w for 1 + w);
            "conv_axis" moves [channels, kernel, 1] to [channels, 1, kernel].
    """

    source: str
    source_rows: Rows
    target: str
    target_rows: Rows
    transform: Literal["copy", "minus_one", "conv_axis"]


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A tensor of the target. dtype: fp64, fp32, bf16 or fp16; kept: fp32 whatever was asked for."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    kept: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    """A source tensor that is left out. rule: "text-only" (vision), "mtp", "rotary-buffer", "tied-head",
    "allow-unmatched" or "rename"."""

    source: str
    rule: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of the target: tensors in the order of its header."""

    name: str
    tensors: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the mapping table: all tensors that share a pattern and an operation.

    Attributes:
        source: pattern of names as they are in the file, `*` for numbers.
        count: source tensors.
        targets: patterns of canonical names; empty where they are dropped.
        rule: name of the rule, such as "qkvz-interleaved" or "text-only".
        op: what is done: "copy", "rename", "split rows", "join rows", "interleaved rows", "w - 1",
            "move axis", "drop".
        dtype: of the target ("bf16"), or "bf16 -> fp32" where it changes; empty where dropped.
        kept: stays fp32 whatever dtype was asked for.
        num_bytes: of the source tensors.
    """

    source: str
    count: int
    targets: tuple[str, ...]
    rule: str
    op: str
    dtype: str
    kept: bool
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the row as it stands in the document of a plan."""
        return {
            "source": self.source,
            "n": self.count,
            "target": list(self.targets),
            "rule": self.rule,
            "op": self.op,
            "dtype": self.dtype,
            "kept": self.kept,
            "bytes": self.num_bytes,
        }


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that forbids the conversion.

    Attributes:
        name: of one tensor, or a pattern with `{0,1,2}` where several layers share the problem.
        count: tensors concerned.
        detail: figures, or what would decide; may be empty.
        nearest: names that may be meant, nearest first, each with its distance: ("in_proj_ba", 1).
        remedy: what can be done.
    """

    kind: ProblemKind
    name: str
    count: int = 1
    detail: str = ""
    nearest: tuple[tuple[str, int], ...] = ()
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the problem as it stands in the document of a plan."""
        return {
            "name": self.name,
            "n": self.count,
            "detail": self.detail,
            "nearest": [name for name, _ in self.nearest],
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True)
class Needs:
    """What a conversion takes. disk_free is None where no destination was given."""

    disk: int
    disk_free: int | None
    ram: int


@dataclass(frozen=True)
class Plan:
    """Everything about a conversion before it starts.

    Attributes:
        style: names of what was recognised, such as ("multimodal", "qkvz-interleaved") or ("fla",).
        rows: the mapping table. problems: all there are; empty means it can start.
        candidates: whole mappings that may mend some of it; `explaining.proposal` tries them.
        pieces, targets, dropped, shards: the same in full, tensor by tensor.
        config: content of the target's config.json.
        notes: sentences a user should read (a file that was passed over, a rounded MLX norm, no
            tokenizer ...), in order.
        bytes_in, bytes_out: of tensor data read and written.
        bytes_head: what is written beyond that if a head that is taken for a copy of the embedding
            turns out to be none; counted in `needs`.
        missing: targets that are left out, as `allow_missing` says.
        head_differs: made for a head that turned out not to be the embedding.
    """

    source: Source
    options: ConvertOptions
    style: tuple[str, ...]
    rows: tuple[Row, ...]
    problems: tuple[Problem, ...]
    candidates: tuple[Renames, ...]
    pieces: tuple[Piece, ...]
    targets: tuple[TargetTensor, ...]
    dropped: tuple[Dropped, ...]
    shards: tuple[Shard, ...]
    config: dict[str, Any]
    notes: tuple[str, ...]
    bytes_in: int
    bytes_out: int
    bytes_head: int
    missing: tuple[str, ...]
    needs: Needs
    head_differs: bool = False

    @property
    def ok(self) -> bool:
        return not self.problems

    @cached_property
    def num_used(self) -> int:
        """Source tensors of which something is written."""
        return len({piece.source for piece in self.pieces})

    def to_json(self) -> dict[str, Any]:
        """Return the plan as one JSON document of kind "convert-plan" (rows, problems, totals, needs)."""
        by_kind: dict[str, list[dict[str, Any]]] = {
            kind: [] for kind in ("unmatched", "missing", "wrong_shape")
        }
        for problem in self.problems:
            by_kind.setdefault(problem.kind, []).append(problem.to_json())
        return {
            "schema_version": 1,
            "kind": "convert-plan",
            "mapping": MAPPING,
            "source": str(self.source.path),
            "style": list(self.style),
            "rules": [row.to_json() for row in self.rows],
            **by_kind,
            "totals": {
                "used": self.num_used,
                "dropped": len(self.dropped),
                "bytes_in": self.bytes_in,
                "bytes_out": self.bytes_out,
                "bytes_head": self.bytes_head,
                "shards": len(self.shards),
            },
            "needs": asdict(self.needs),
            "left_missing": list(self.missing),
            "notes": list(self.notes),
            "ok": self.ok,
        }


def file_name(index: int, count: int) -> str:
    """Name the file of shard `index` (from 0) of `count`."""
    return "model.safetensors" if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"


def partial_path(dst: Path) -> Path:
    """Say where a conversion to `dst` is built before it is renamed."""
    return dst.with_name(dst.name + ".partial")
