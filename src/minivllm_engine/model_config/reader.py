"""Typed reading of a model's config.json, and which models it may describe.

Every failure names the file, the key and the value.
"""

import re
from collections.abc import Mapping
from typing import Any

from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Far beyond any model, and small enough for a product that a machine word holds.
LARGEST = 2**30
_REPAIR = "Correct it there, or use the config.json that was saved with these weights."


class ConfigReader:
    """The content of one config.json, nested (`text_config`) or flat.

    Attributes:
        source: what messages call the file.
        text: the level that describes the text model.
        top: the outermost level; the same as `text` in a flat file.
    """

    def __init__(self, content: Mapping[str, Any], source: str) -> None:
        text = content.get("text_config", content)
        if not isinstance(text, Mapping):
            raise CheckpointError(
                f"{source}: text_config is not an object",
                why=f"but {escape(repr(text))}",
                hint=_REPAIR,
            )
        self.source = source
        self.text: Mapping[str, Any] = text
        self.top = content

    def get(self, *keys: str) -> Any:
        """Return the first of `keys` that is set (not null), on the text level before the top level."""
        levels = (self.text, self.top)
        return next(
            (level[key] for level in levels for key in keys if level.get(key) is not None), None
        )

    def wrong(
        self, key: str, value: object, expected: str, hint: str | None = None
    ) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: {key} is {escape(repr(value))}",
            why=f"expected {expected}",
            hint=hint or _REPAIR,
        )

    def integer(self, key: str, value: object, *, at_least: int = 1, at_most: int = LARGEST) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.wrong(key, value, f"a whole number, {at_least} or more")
        if value > at_most:
            raise self.wrong(key, value, f"at most {at_most:,}")
        return value

    def number(
        self,
        key: str,
        value: object,
        *,
        above: float = 0,
        at_least: float = 0,
        at_most: float = 1e30,
    ) -> float:
        least = f"at least {at_least:g}" if at_least else f"above {above:g}"
        expected = f"a number {least}, at most {at_most:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, expected)
        if not (value > above and at_least <= value <= at_most):
            raise self.wrong(key, value, expected)
        return float(value)

    def boolean(self, key: str, value: object) -> bool:
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return bool(value)

    def dtype(self, *keys: str, allowed: tuple[str, ...]) -> str | None:
        """Return the first of `keys` as "fp32", "bf16" or "fp16", or None where there is none."""
        value = self.get(*keys)
        if value is None:
            return None
        name = _DTYPES.get(str(value).removeprefix("torch."))
        if name not in allowed:
            known = ", ".join(repr(long) for long, short in _DTYPES.items() if short in allowed)
            raise self.wrong(keys[0], value, f"one of {known}")
        return name


# Its own names, and those of producers whose configs are adapted before they are read as one of it.
_OWN = re.compile(r"qwen3_[568](_text)?|miniqwen|gated_deltanet")

# Relatives that share most keys of the family and would be misread.
_MOE = "mixture-of-experts models are not supported"
_RELATIVES = {
    "qwen3_5_moe": _MOE,
    "qwen3_5_moe_text": _MOE,
    "qwen3_next": _MOE,
    "qwen4_exp": "its hyper-connections and token indexer are not supported",
    "lara_mini": "its fused projections and sliding-window layers are not supported",
    "olmo_hybrid": "its post-norm attention layers are not supported",
    "kimi_linear": "Kimi Delta Attention, with a decay for each channel, is another recurrence",
}

# First words of the names of well-known architectures. A model that says to be one of them computes
# something else, even where its tensors have names and shapes that would fit.
_FOREIGN = re.compile(
    r"(afmoe|apertus|arcee|bamba|bart|bert|bitnet|blenderbot|bloom|chatglm|codegen|cohere|command|ctrl|dbrx"
    r"|deberta|deepseek|dots|ernie|exaone|falcon|flex|fuyu|gemma|glm|gptj?|granite|helium|hunyuan|internlm"
    r"|jamba|jetmoe|lfm|llama|longcat|mamba|mbart|minicpm|minimax|ministral|mistral|mixtral|moshi|mpt|nemotron"
    r"|olmo|opt|persimmon|phi|pixtral|plamo|qwen[12]?|qwen3(?!_[5-9])|recurrent_gemma|roberta|rwkv|seed|smollm"
    r"|solar|stablelm|starcoder|t5|xglm|xlnet|yi|zamba)(?![a-z]).*"
)


def refuse_other_families(reader: ConfigReader) -> None:
    """Refuse models of other families that share most keys with this one.

    Raises:
        CheckpointError: the config is that of a model which this engine cannot run, however its keys look.
    """
    for level in (reader.text, reader.top):
        model_type = level.get("model_type")
        if isinstance(model_type, str) and model_type in _RELATIVES:
            raise CheckpointError(
                f"{reader.source}: model_type {model_type!r} cannot be run",
                why=_RELATIVES[model_type],
                hint="Use a dense model of the Qwen3.5 family.",
            )
    if reader.get("num_experts"):
        raise reader.wrong(
            "num_experts",
            reader.get("num_experts"),
            f"none: {_MOE}",
            hint="Use a dense model of the family.",
        )
    if reader.get("attn_output_gate") is False:
        raise reader.wrong(
            "attn_output_gate", False, "true: attention without an output gate is not supported"
        )
    for key in ("output_gate_type", "hidden_act"):
        value = reader.get(key)
        if value is not None and value not in ("silu", "swish"):
            raise reader.wrong(key, value, "'silu': no other activation is supported")


def unknown_model_type(content: Mapping[str, Any]) -> str | None:
    """Return the model_type of a config, if it is neither one of this family nor a known other one."""
    model_type = _model_type(content.get("text_config"), content)
    return None if model_type is None or _OWN.fullmatch(model_type) else model_type


def refuse_foreign(reader: ConfigReader) -> None:
    """Refuse other architectures.

    Raises:
        CheckpointError: the config says to be one of another well-known architecture.
    """
    model_type = _model_type(reader.text, reader.top)
    if model_type is None or _OWN.fullmatch(model_type) or not _FOREIGN.fullmatch(model_type):
        return
    raise CheckpointError(
        f"{reader.source}: model_type {escape(repr(model_type))} is another architecture",
        why="it computes something else, whether or not its tensors have the shapes of this family",
        hint='If the weights are a Gated DeltaNet hybrid all the same, write "model_type": '
        '"qwen3_5_text" into that file.',
    )


def _model_type(*levels: object) -> str | None:
    """That of the text model, or else of the whole."""
    for level in levels:
        if isinstance(level, Mapping) and isinstance(level.get("model_type"), str):
            return str(level["model_type"])
    return None
