"""Which config.json describes a model of this family, and why one of another is refused."""

import re
from collections.abc import Mapping
from typing import Any

from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape
from minivllm_engine.model_config.reader import ConfigReader

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
    """
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
    """The model_type of a config, if it is neither one of this family nor a known other one."""
    model_type = _model_type(content.get("text_config"), content)
    return None if model_type is None or _OWN.fullmatch(model_type) else model_type


def refuse_foreign(reader: ConfigReader) -> None:
    """
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
