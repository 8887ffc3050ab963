"""The least that a decode step must move through a device's memory, from the model's config alone."""

from minivllm_engine.memory.sizes import kv_bytes_per_token, parameter_bytes, slot_bytes
from minivllm_engine.model_config.config import ModelConfig

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def decode_weight_bytes(model: ModelConfig, dtype: str, *, tied: bool) -> int:
    """Count the bytes of the weights that a decode step reads, each once.

    Of an embedding that is not the head, a step reads a row a sequence, which counts as nothing.
    """
    return parameter_bytes(model, dtype, without=_HEAD if tied else _EMBEDDING)


def decode_step_bytes(
    model: ModelConfig,
    dtype: str,
    state_dtype: str,
    *,
    batch: int,
    context: float,
    tied: bool,
) -> float:
    """Count the bytes that a decode step of `batch` sequences must read and write.

    Weights are read once; conv and recurrent states are read and written; keys and values are read.

    Args:
        dtype, state_dtype: as in the memory plan.
        context: tokens in the KV cache of a sequence, on average.
        tied: the output head is the embedding.
    """
    states = 2 * slot_bytes(model, dtype, state_dtype)
    keys_values = context * kv_bytes_per_token(model, dtype)
    return decode_weight_bytes(model, dtype, tied=tied) + batch * (states + keys_values)
