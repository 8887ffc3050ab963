"""Whose layouts a source has: told from names and shapes, and by an option where those are mute."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm_engine.checkpoint.rules import CANONICAL, FOREIGN, TensorRule
from minivllm_engine.conversion.naming import NamedTensor
from minivllm_engine.conversion.options import ConvertOptions
from minivllm_engine.conversion.plan import Problem
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape

FUSED_DELTANET = frozenset(("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"))
_CONV = "linear_attn.conv1d.weight"


@dataclass(frozen=True, slots=True)
class Styles:
    """What was recognised. active: words that rules and transforms ask for."""

    active: frozenset[str]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def recognise(
    tensors: Sequence[NamedTensor], config: Mapping[str, Any], options: ConvertOptions
) -> Styles:
    """Tell the styles of a source from those of its tensors that are not left out.

    Raises:
        CheckpointError: layers of a kind that cannot be expressed, or a mixture of two conventions.
    """
    layers: defaultdict[int, dict[str, NamedTensor]] = defaultdict(dict)
    for tensor in tensors:
        if tensor.bare.layer is not None:
            layers[tensor.bare.layer][tensor.bare.tensor] = tensor
    names = {name for held in layers.values() for name in held}
    active: set[str] = set()
    problems: list[Problem] = []
    notes: list[str] = []
    if names & {"attn.A_log", "attn.q_conv1d.weight"}:
        _refuse_fla_attention(layers)
        active.add("fla")
        if "mlp.gate_proj.weight" in names and "mlp.up_proj.weight" not in names:
            active.add("fla-gate-up")
    if _is_mlx(layers):
        active.add("mlx")
        notes += _mlx_note(layers)
    if any(name.startswith("self_attn.q_gate_proj.") for name in names):
        active.add("q-gate-separate")
    if options.q_gate_layout == "halves":
        active.add("halves")
    fused = sorted(FUSED_DELTANET & names, reverse=True)
    if fused:
        layout = options.qkvz_layout or _layout_of(config)
        if layout is None:
            problems.append(_unknown_layout(fused[0], layers))
        active.add(layout or "interleaved")
    return Styles(frozenset(active), tuple(problems), tuple(notes))


def find_rule(tensor: NamedTensor, active: frozenset[str]) -> TensorRule | None:
    """Find the rule of a tensor's name under these styles, or None where no rule knows it."""
    key = (tensor.bare.layer is not None, tensor.bare.tensor)
    rules = [rule for rule in (*FOREIGN, *CANONICAL) if (rule.in_layer, rule.tensor) == key]
    styled = [rule for rule in rules if rule.style in active]
    plain = [rule for rule in rules if rule.style is None]
    return next(iter(styled + plain), None)


def _refuse_fla_attention(layers: Mapping[int, Mapping[str, NamedTensor]]) -> None:
    for layer, held in layers.items():
        if "attn.q_proj.weight" not in held or "attn.A_log" in held:
            continue
        if "attn.q_conv1d.weight" in held:
            raise CheckpointError(
                f"layer {layer} holds no A_log: it is another layer of Flash Linear Attention",
                why="only its Gated DeltaNet is the recurrence of this family",
                hint="Use a model whose model_type is gated_deltanet.",
            )
        raise CheckpointError(
            f"layer {layer} is an attention layer of Flash Linear Attention",
            why="it has no output gate, usually no q and k norm, and rotates whole heads: "
            "it cannot be expressed as attention of this family",
            hint="Only models whose layers are all Gated DeltaNet can be converted from FLA.",
        )


def _is_mlx(layers: Mapping[int, Mapping[str, NamedTensor]]) -> bool:
    convs = [held[_CONV] for held in layers.values() if _CONV in held]
    moved = [tensor for tensor in convs if _axis_moved(tensor.entry.shape)]
    if moved and len(moved) < len(convs):
        other = next(tensor for tensor in convs if tensor not in moved)
        raise CheckpointError(
            "the convolutions follow two conventions",
            why=f"{escape(moved[0].entry.name)} is {list(moved[0].entry.shape)} (MLX), "
            f"{escape(other.entry.name)} is {escape(list(other.entry.shape))}",
            hint="Convert one checkpoint at a time.",
        )
    return bool(moved)


def _axis_moved(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[1] > 1 and shape[2] == 1


def _mlx_note(layers: Mapping[int, Mapping[str, NamedTensor]]) -> list[str]:
    norms = [tensor for held in layers.values() for name, tensor in held.items() if "norm" in name]
    if all(tensor.entry.dtype in ("F32", "F64") for tensor in norms):
        return [
            "an MLX export: 1 is taken off its norms again, and the convolution's axis moved back"
        ]
    return [
        "an MLX export in 16 bits: 1 is taken off its norms again, but was added with rounding: "
        "they are off by up to 0.004. The Hugging Face checkpoint is better"
    ]


def _layout_of(config: Mapping[str, Any]) -> str | None:
    levels = [config, config.get("text_config")]
    types = {level.get("model_type") for level in levels if isinstance(level, Mapping)}
    return "interleaved" if "qwen3_next" in types else None


def _unknown_layout(name: str, layers: Mapping[int, Mapping[str, NamedTensor]]) -> Problem:
    numbers = sorted(layer for layer, held in layers.items() if name in held)
    first = layers[numbers[0]][name].entry.name
    return Problem(
        "ambiguous",
        first if len(numbers) == 1 else first.replace(f".{numbers[0]}.", ".*.", 1),
        len(numbers),
        "its rows may be interleaved by key head (Qwen3-Next) or lie one after the other (vLLM), and "
        "neither shapes nor model_type tell: --qkvz-layout interleaved or --qkvz-layout concat",
        remedy="--qkvz-layout concat (or interleaved); --verify-logits FILE tells which is right",
    )
