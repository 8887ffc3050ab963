"""Bytes of everything a model and its engine hold, by arithmetic from the model's config."""

import math
import platform
from functools import lru_cache

from minivllm_engine.checkpoint.names import expected_tensors
from minivllm_engine.core.snapshot_interval import DELTA_RULE_CHUNK
from minivllm_engine.model_config.config import ModelConfig

X86 = ("x86_64", "AMD64")
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Whatever the model's dtype, these decide the decay or follow the delta rule, and stay fp32.
_ALWAYS_FP32 = (".A_log", ".dt_bias", ".linear_attn.norm.weight")
_HEAD = "lm_head.weight"
# On a CPU weights of so many numbers are laid out anew for its vector units; see ops/packed.py.
LEAST_PACKED = 1 << 19

# Bounds that the operations put on their scratch memory; see ops/ and sampler.py.
_DELTA_RULE_STEPS, _DELTA_RULE_GRAIN = 1024, 8
_ATTENTION_NUMBERS, _ATTENTION_KEYS = 1 << 18, 64
_SAMPLER_NUMBERS, _SAMPLER_BYTES = 8 << 20, 60
_HEAD_ROWS = 16
_PER_TOKEN = 160  # ids, positions, places, cos and sin

# What capturing takes once (a workspace of the matrix library, code that is loaded), and what the driver
# keeps for a kernel in an instantiated graph; measured on an H200: 111 MB for 5 graphs of a small model, 154
# MB for 35 of the 0.8B shape. Kernels of a layer in a decode step, those of its MLP and norms included.
_CAPTURE_BYTES = 128 << 20
_GRAPH_BYTES_PER_KERNEL = 8 << 10
_KERNELS_PER_LAYER, _KERNELS_OF_PROMPTS = 12, 20


@lru_cache(maxsize=64)  # asked hundreds of times where a plan is searched for
def weight_bytes(model: ModelConfig, dtype: str, *, tied: bool) -> int:
    """Count the bytes of all weights in memory, and of what the layers derive from them and keep.

    Args:
        dtype: of the weights in memory.
        tied: the output head is the embedding.
    """
    return parameter_bytes(model, dtype, without=_HEAD if tied else None) + _derived_bytes(
        model, dtype
    )


def packed_head_bytes(model: ModelConfig, dtype: str) -> int:
    """Count the bytes of a tied head on a CPU that is laid out apart from the embedding."""
    numbers = model.vocab_size * model.hidden_size
    packs = numbers >= LEAST_PACKED and dtype != "fp16" and platform.machine() in X86
    return numbers * ITEM_BYTES[dtype] if packs else 0


@lru_cache(maxsize=64)
def parameter_bytes(model: ModelConfig, dtype: str, *, without: str | None) -> int:
    """Count the bytes of all tensors of a checkpoint in memory, `without` the one of that canonical name."""
    total = 0
    for name, dims in expected_tensors(model).items():
        if name == without:
            continue
        item = 4 if name.endswith(_ALWAYS_FP32) else ITEM_BYTES[dtype]
        total += math.prod(size for _, size in dims) * item
    return total


def _derived_bytes(model: ModelConfig, dtype: str) -> int:
    """fp32 scales of the norms, fp32 conv_weight of the convolutions (where they are not), fp64 gates."""
    norms = (2 * model.num_hidden_layers + 1) * model.hidden_size * 4
    heads = model.num_attention_heads + model.num_key_value_heads
    attention = model.num_attention_layers * heads * model.head_dim * 4
    conv_weight = 0 if dtype == "fp32" else model.linear_conv_kernel_dim * model.conv_dim * 4
    gates = 2 * model.linear_num_value_heads * 8
    return norms + attention + model.num_linear_layers * (conv_weight + gates)


def slot_bytes(model: ModelConfig, dtype: str, state_dtype: str) -> int:
    """Count the bytes of a sequence's conv and recurrent states, or of a snapshot, over all layers."""
    return model.num_linear_layers * (
        _conv_bytes(model, dtype) + _recurrent_numbers(model) * ITEM_BYTES[state_dtype]
    )


def conv_state_bytes(model: ModelConfig, dtype: str) -> int:
    """Return the part of `slot_bytes` that is conv state."""
    return model.num_linear_layers * _conv_bytes(model, dtype)


def _conv_bytes(model: ModelConfig, dtype: str) -> int:
    return model.conv_dim * (model.linear_conv_kernel_dim - 1) * ITEM_BYTES[dtype]


def _recurrent_numbers(model: ModelConfig) -> int:
    heads, v = model.linear_num_value_heads, model.linear_value_head_dim
    return heads * v * model.linear_key_head_dim


def kv_bytes_per_token(model: ModelConfig, dtype: str) -> int:
    """Count the bytes of one token's K and V, over all attention layers."""
    width = 2 * model.num_key_value_heads * model.head_dim
    return model.num_attention_layers * width * ITEM_BYTES[dtype]


def kv_saved(model: ModelConfig) -> float:
    """Return the share of KV memory that is saved because only the attention layers keep any, 0 to 1."""
    return 1 - model.num_attention_layers / model.num_hidden_layers


def activation_bytes(
    model: ModelConfig, dtype: str, state_dtype: str, *, num_tokens: int, num_rows: int
) -> int:
    """Bound the bytes that the tensors of one step hold at a time, caches and weights apart.

    It is what the eager reference operations keep alive in the worst layer of a step of `num_tokens`
    tokens, or while `num_rows` rows of logits are sampled, if that is more. Scratch memory inside a kernel
    or a library is not counted. An upper bound: tests hold it against measured peaks.
    """
    layers = _layer_bytes(model, dtype, state_dtype, num_tokens, num_rows)
    item, copy = ITEM_BYTES[dtype], _copy_bytes(dtype)
    numbers = num_rows * model.vocab_size
    drawn = min(numbers, max(_SAMPLER_NUMBERS, model.vocab_size))
    logits = max(num_rows, _HEAD_ROWS) * model.vocab_size * item
    return max(layers, logits + numbers * (copy + 4) + drawn * _SAMPLER_BYTES)


def _copy_bytes(dtype: str) -> int:
    """Bytes a number takes more where fp32 is computed from it: fp32 itself is not copied."""
    return 0 if dtype == "fp32" else 4


def _layer_bytes(
    model: ModelConfig, dtype: str, state_dtype: str, num_tokens: int, num_rows: int
) -> int:
    item, copy, hidden = ITEM_BYTES[dtype], _copy_bytes(dtype), model.hidden_size
    stream = num_tokens * (hidden * (3 * item + copy) + _PER_TOKEN)
    kinds = [num_tokens * (3 * model.intermediate_size + hidden) * item]
    if model.num_linear_layers:
        kinds += _deltanet_bytes(model, item, copy, state_dtype, num_tokens, num_rows)
    if model.num_attention_layers:
        kinds.append(_attention_bytes(model, item, num_tokens))
    return stream + max(kinds)


def _deltanet_bytes(
    model: ModelConfig, item: int, copy: int, state_dtype: str, num_tokens: int, num_rows: int
) -> list[int]:
    """Of a layer: while it convolves, while it runs the chunked rule, while it decodes."""
    conv, values, heads = model.conv_dim, model.value_dim, model.linear_num_value_heads
    projected = num_tokens * ((conv + values + 2 * heads) * item + heads * 24)
    convolving = num_tokens * conv * (2 * 4 + item + copy)
    steps = min(max(num_tokens, DELTA_RULE_CHUNK), _DELTA_RULE_STEPS)
    per_step = (
        6 * model.key_dim + 3 * values + 2 * DELTA_RULE_CHUNK * (heads + model.linear_num_key_heads)
    )
    together = min(num_rows, steps // _DELTA_RULE_GRAIN)
    states = 3 * together * _recurrent_numbers(model) * 4
    rule = num_tokens * (conv + values) * item + steps * per_step * 4 + states
    gathered = num_rows * _recurrent_numbers(model) * (4 + (ITEM_BYTES[state_dtype] % 4))
    norm = num_tokens * values * (3 * 4 + item)
    return [projected + part for part in (convolving, rule, gathered, norm)]


def _attention_bytes(model: ModelConfig, item: int, num_tokens: int) -> int:
    heads, both = model.num_attention_heads, model.num_attention_heads + model.num_key_value_heads
    projected = num_tokens * 2 * both * model.head_dim * item
    rotated = num_tokens * both * model.head_dim * item
    queries = num_tokens * heads * model.head_dim * (3 * 4 + item)
    scores = 3 * max(_ATTENTION_NUMBERS, num_tokens * heads * _ATTENTION_KEYS) * 4
    return projected + rotated + queries + scores


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes that decode graphs are captured for: 1, 2, 4, multiples of 8, and `largest` itself."""
    sizes = [n for n in (1, 2, 4, *range(8, largest, 8)) if n < largest]
    return (*sizes, largest)


# Steps of prompt chunks are padded to so many tokens, and to so many sequences where there is room for them.
_BUCKET_TOKENS = (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_BUCKET_SEQS = (1, 8, 32, 128)
_BUCKET_TOKENS_PER_SEQ = 16


@lru_cache(maxsize=8)
def prompt_buckets(max_num_batched_tokens: int, max_num_seqs: int) -> tuple[tuple[int, int], ...]:
    """List tokens and sequences that steps of prompt chunks are padded to, and have graphs for, ascending.

    The last one is the largest in both, and takes any step of at most 8,192 tokens and 128 sequences.
    """
    most_tokens, most_seqs = (
        min(max_num_batched_tokens, _BUCKET_TOKENS[-1]),
        min(max_num_seqs, _BUCKET_SEQS[-1]),
    )
    tokens = [n for n in _BUCKET_TOKENS if n < most_tokens] + [most_tokens]
    seqs = [n for n in _BUCKET_SEQS if n < most_seqs] + [most_seqs]
    buckets = []
    for most in tokens:
        room = max(most // _BUCKET_TOKENS_PER_SEQ, 1)
        few = [n for n in seqs if n <= room] if most > 64 else [1]
        buckets += [(most, n) for n in few]
    if buckets[-1] != (most_tokens, most_seqs):
        buckets.append((most_tokens, most_seqs))
    return tuple(buckets)


def graph_bytes(
    model: ModelConfig,
    dtype: str,
    state_dtype: str,
    largest: int,
    buckets: tuple[tuple[int, int], ...] = (),
) -> int:
    """Estimate the bytes that graphs keep for themselves: of decodes of up to `largest`, and of prompts.

    The tensors of the largest one up to the logits, which the others share, and what the driver holds.

    Args:
        buckets: tokens and sequences of steps of prompts that have graphs.
    """
    shared = _layer_bytes(model, dtype, state_dtype, largest, largest)
    for tokens, seqs in buckets:
        shared = max(shared, _prompt_bytes(model, dtype, tokens, seqs))
    kernels = len(graph_sizes(largest)) * _KERNELS_PER_LAYER + len(buckets) * _KERNELS_OF_PROMPTS
    return _CAPTURE_BYTES + kernels * model.num_hidden_layers * _GRAPH_BYTES_PER_KERNEL + shared


def _prompt_bytes(model: ModelConfig, dtype: str, num_tokens: int, num_seqs: int) -> int:
    """What the kernels keep alive in the largest layer of a step of prompts."""
    item, hidden, values = ITEM_BYTES[dtype], model.hidden_size, model.value_dim
    heads, state = model.linear_num_value_heads, _recurrent_numbers(model)
    kinds = [num_tokens * (3 * model.intermediate_size + hidden) * item]
    if model.num_linear_layers:
        # Projections, what is convolved, and the values of the chunked rule four times.
        numbers = 2 * model.conv_dim + 5 * values + heads * (DELTA_RULE_CHUNK + 2)
        lanes, chunks = num_seqs + 1, num_tokens // DELTA_RULE_CHUNK + num_seqs + 1
        rule = num_tokens * heads * model.linear_key_head_dim * item + chunks * state * item
        kinds.append(num_tokens * (numbers * item + heads * 12) + rule + 2 * lanes * state * 4)
    if model.num_attention_layers:
        both = model.num_attention_heads + model.num_key_value_heads
        kinds.append(num_tokens * 4 * both * model.head_dim * item)
    return num_tokens * (3 * hidden * item + _PER_TOKEN) + max(kinds)


def decode_buffer_bytes(model: ModelConfig, dtype: str, max_num_seqs: int) -> int:
    """Count the bytes of what steps on a GPU write at a fixed place: logits of decodes, and of prompts.

    What they read there, block tables above all, is a thousandth of it.
    """
    rows = max_num_seqs + min(max_num_seqs, _BUCKET_SEQS[-1])
    return rows * model.vocab_size * ITEM_BYTES[dtype]
