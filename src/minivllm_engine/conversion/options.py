"""What a user can choose about a conversion."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from minivllm_engine.conversion.patterns import placeholders
from minivllm_engine.errors import ConfigError
from minivllm_engine.printable import printable

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "dtype": ("keep", "bf16", "fp16", "fp32"),
    "qkvz_layout": (None, "interleaved", "concat"),
    "q_gate_layout": (None, "per-head", "halves"),
}


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Choices of one conversion. All of them are kept in the manifest.

    Attributes:
        dtype: of matrices (tensors of two and more dimensions) in the target; "keep" leaves them.
            Vectors keep their type, and protected ones are fp32 always.
        qkvz_layout: of rows in `in_proj_qkvz` and `in_proj_ba`, which shapes do not tell:
            "interleaved" by key head (Qwen3-Next) or plain "concat" (vLLM). None: model_type decides.
        q_gate_layout: of rows in q_proj (or the q part of a fused qkv_proj): "per-head" is
            [q0 | gate0 | q1 | gate1 ...], "halves" is [all q | all gate]. None: "per-head".
        renames: (source pattern, target pattern or None), tried in order before the built-in rules. A
            source is a name as it is in the file, or where none there is so, one without wrappers and
            roots such as `model.`; a target may have its `model.` or not. `*` is one segment, `**` one
            or more, `{0-2,7}` one of these numbers; what they stand for is filled in on the right. None
            drops the tensor.
        allow_unmatched: globs of source names that may be left out though no rule knows them.
        allow_missing: globs of target names that may be absent: the target is then incomplete.
        max_shard_bytes: of tensor data in one target file; a larger tensor has a file of its own.

    Raises:
        ConfigError: a value is not one of its choices, or a rename is no pair of patterns.
    """

    dtype: Literal["keep", "bf16", "fp16", "fp32"] = "keep"
    qkvz_layout: Literal["interleaved", "concat"] | None = None
    q_gate_layout: Literal["per-head", "halves"] | None = None
    renames: tuple[tuple[str, str | None], ...] = ()
    allow_unmatched: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()
    max_shard_bytes: int = 5_000_000_000

    def __post_init__(self) -> None:
        for key, known in _CHOICES.items():
            if getattr(self, key) not in known:
                words = ", ".join(word for word in known if word)
                raise ConfigError(f"{key} is {getattr(self, key)!r}", hint=f"One of {words}.")
        if self.max_shard_bytes < 1:
            raise ConfigError(f"max_shard_bytes is {self.max_shard_bytes}", hint="1 or more.")
        for source, target in self.renames:
            _check_rename(source, target)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _check_rename(source: str, target: str | None) -> None:
    for pattern in (source, target or ""):
        shown = printable(repr(pattern))
        if not all(pattern.split(".")) and pattern != "":
            raise ConfigError(
                f"rename pattern {shown} has an empty segment",
                hint="Names have something between any two dots.",
            )
        if any("*" in segment and segment not in ("*", "**") for segment in pattern.split(".")):
            raise ConfigError(
                f"rename pattern {shown} has a * inside a segment",
                why="* stands for one whole segment between two dots, ** for one or more",
                hint="Write a line for each name of that segment.",
            )
    if not source or target == "":
        raise ConfigError(
            f"rename {printable(repr(source))}: {printable(repr(target))} lacks a pattern",
            hint="A line is SOURCE: TARGET, or SOURCE: null to drop a tensor.",
        )
    if target is not None and placeholders(target) > placeholders(source):
        raise ConfigError(
            f"rename pattern {printable(repr(target))} has more * than {printable(repr(source))}",
            why="each * on the right is filled in from one on the left, in order",
            hint="Write as many on the left.",
        )
