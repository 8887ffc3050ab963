"""Number types of sources: which can be converted, and what the others are."""

from minivllm_engine.checkpoint.safetensors_header import FLOAT_TYPES
from minivllm_engine.conversion.matching import Matching
from minivllm_engine.conversion.source import Source
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape, listed
from minivllm_engine.core.units import count_text

_QUANTISED = ("F8", "F6", "F4", "I8", "U8", "I4", "U4")


def check_types(source: Source, matching: Matching) -> None:
    """Every tensor of which something is read has to be of floats.

    Raises:
        CheckpointError: some are not; says what they are, and what can be done.
    """
    heads = {tensor.source for tensor in matching.dropped if tensor.rule == "tied-head"}
    read = heads | {match.tensor.entry.name for match in matching.matches}
    wrong = [e for e in source.tensors if e.name in read and e.dtype not in FLOAT_TYPES]
    if not wrong:
        return
    tensors = count_text(len(wrong), "tensor")
    what, remedy = _kind_of(wrong[0].dtype)
    raise CheckpointError(
        f"{wrong[0].file} holds {tensors} of type {listed(sorted({e.dtype for e in wrong}))}",
        why=f"such as {escape(wrong[0].name)}: {what}; only {', '.join(FLOAT_TYPES)} can be converted",
        hint=remedy,
    )


def _kind_of(dtype: str) -> tuple[str, str]:
    """(what a tensor of this type is, what can be done)."""
    if dtype.upper().startswith(_QUANTISED):
        return (
            "quantised, by its type",
            "Dequantise the checkpoint first, or use the one that it was made from.",
        )
    if dtype == "BOOL":
        return "true and false, a mask and no weight", "Save the weight itself under this name."
    if dtype.startswith(("C", "complex")):
        return (
            "complex numbers, of which this family has none",
            "Save it in real floats, if that is what it stands for.",
        )
    if dtype.startswith(("I", "U")):
        return "whole numbers", "Save it in floats: tensor.float()."
    return "an unknown type", "Save it in floats: tensor.float()."
