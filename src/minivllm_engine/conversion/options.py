"""What a user can choose about a conversion."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from minivllm_engine.conversion.patterns import Mistake, mistake_in_glob, mistake_in_pair
from minivllm_engine.core.errors import ConfigError
from minivllm_engine.core.escape import escape

# Lines of a mapping: (source pattern, target pattern or None).
Renames = tuple[tuple[str, str | None], ...]

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
        ConfigError: a value is not one of its choices, a rename is no pair of patterns, or a pattern
            cannot be meant.
    """

    dtype: Literal["keep", "bf16", "fp16", "fp32"] = "keep"
    qkvz_layout: Literal["interleaved", "concat"] | None = None
    q_gate_layout: Literal["per-head", "halves"] | None = None
    renames: Renames = ()
    allow_unmatched: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()
    max_shard_bytes: int = 5_000_000_000

    def __post_init__(self) -> None:
        for key, known in _CHOICES.items():
            if getattr(self, key) not in known:
                words = [word for word in known if word]
                raise ConfigError(
                    f"{key} is {escape(repr(getattr(self, key)))}",
                    why=f"{len(words)} choices are known",
                    hint=f"One of {', '.join(words)}.",
                )
        if self.max_shard_bytes < 1:
            raise ConfigError(
                f"max_shard_bytes is {self.max_shard_bytes}",
                why="a file holds one tensor at least",
                hint="1 or more.",
            )
        for source, target in self.renames:
            mistake = mistake_in_pair(source, target)
            if mistake is not None:
                raise _refused(
                    "rename pattern", source if mistake.side == "source" else target, mistake
                )
        for option in ("allow_unmatched", "allow_missing"):
            for glob in getattr(self, option):
                mistake = mistake_in_glob(glob)
                if mistake is not None:
                    raise _refused("--" + option.replace("_", "-"), glob, mistake)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _refused(where: str, pattern: str | None, mistake: Mistake) -> ConfigError:
    return ConfigError(
        f"{where} {escape(repr(pattern))}: {escape(mistake.what)} (character {mistake.at + 1})",
        why=escape(mistake.why),
        hint=escape(mistake.hint),
    )
