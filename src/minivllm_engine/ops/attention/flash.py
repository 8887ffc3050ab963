"""Grouped-query attention by flash-attn 2.8, over the paged KV cache: see reference.py for the letters.

For who has flash-attn installed and asks for it. On an H200 our own kernels decode faster (benchmarks/h200).
CI tests the adapter with a stand-in, since the library takes an hour to build; where it is installed,
`make test-gpu` tests both.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate

import torch

from minivllm_engine.core.errors import BackendUnavailable, ConfigError
from minivllm_engine.ops.attention.reference import KVShape
from minivllm_engine.tensors.device_copy import cast, on_device
from minivllm_engine.tensors.model_input import ModelInput

_BLOCK_GRAIN = 256
_HEAD_GRAIN, _LARGEST_HEAD = 8, 256
_INSTALL = "pip install 'flash-attn>=2.8,<3' --no-build-isolation"
_OTHER_BACKEND = "--set engine.attention_backend=triton"


@dataclass(frozen=True, slots=True)
class _FlashAttention:
    """The two functions of flash-attn that are used."""

    packed: Callable[..., torch.Tensor]
    decode: Callable[..., torch.Tensor]


@functools.cache
def _flash_attention() -> _FlashAttention:
    """Raises BackendUnavailable where flash-attn is missing, cannot be loaded, or is of another version."""
    try:
        module = import_module("flash_attn")
    except (ImportError, OSError) as error:
        raise BackendUnavailable(
            "flash-attn is not installed, or cannot be loaded",
            why=f"importing flash_attn: {error}",
            hint=f"{_INSTALL}, or {_OTHER_BACKEND}",
        ) from error
    version = str(getattr(module, "__version__", "unknown"))
    if not (version.startswith("2.") and version.split(".")[1].isdigit()) or (
        int(version.split(".")[1]) < 8
    ):
        raise BackendUnavailable(
            "flash-attn is of a version that is not supported",
            why=f"it is {version}; 2.8 or a later 2.x is needed",
            hint=f"{_INSTALL}, or {_OTHER_BACKEND}",
        )
    return _FlashAttention(module.flash_attn_varlen_func, module.flash_attn_with_kvcache)


def check_flash(shape: KVShape, dtype: torch.dtype) -> None:
    """See that flash-attn is there and takes this cache.

    Raises:
        ConfigError: block size, dtype or head size is one that flash-attn does not take.
        BackendUnavailable: flash-attn is missing, cannot be loaded, or is of another version.
    """
    if shape.block_size % _BLOCK_GRAIN:
        raise ConfigError(
            f"flash-attn does not take blocks of {shape.block_size} tokens",
            why=f"its paged cache needs a multiple of {_BLOCK_GRAIN}",
            hint=f"--set cache.block_size={_BLOCK_GRAIN}, or {_OTHER_BACKEND}",
        )
    if dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(
            f"flash-attn does not compute in {dtype}".replace("torch.", ""),
            why="it takes fp16 and bf16",
            hint=f"--set engine.dtype=bf16, or {_OTHER_BACKEND}",
        )
    if shape.head_dim % _HEAD_GRAIN or shape.head_dim > _LARGEST_HEAD:
        raise ConfigError(
            f"flash-attn does not take heads of {shape.head_dim}",
            why=f"it takes multiples of {_HEAD_GRAIN} up to {_LARGEST_HEAD}",
            hint=_OTHER_BACKEND,
        )
    _flash_attention()


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Sequences with several tokens each.

    Attributes:
        query_bounds: [n + 1] int32, the first row of each, counted from the first of them all.
        key_bounds: [n + 1] int32, sums of their contexts.
        longest, longest_context: of the sequences.
    """

    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    longest: int
    longest_context: int


@dataclass(frozen=True, slots=True)
class FlashAttentionPlan:
    """Which keys each token of a step sees; the same for all attention layers.

    The tensors of decodes are worked out on the device from those of the batch. A graph that is replayed
    with other positions or blocks has to contain the making of the plan.

    Attributes:
        num_decodes: sequences with one token, the first rows of the batch.
        contexts: [num_decodes] int32, tokens that each of them sees, its own included.
        block_tables: [num_seqs, max_blocks] int32.
        chunks: the other sequences, or None.
    """

    num_decodes: int
    contexts: torch.Tensor
    block_tables: torch.Tensor
    chunks: _Chunks | None

    @classmethod
    def build(cls, batch: ModelInput, shape: KVShape, dtype: torch.dtype) -> "FlashAttentionPlan":
        """Plan a step. `dtype` is that of queries and cache. Raises what `check_flash` raises."""
        check_flash(shape, dtype)
        cut = batch.num_decodes
        chunks = None
        if cut < len(batch.lengths):
            lengths = batch.lengths[cut:]
            contexts = [s + n for s, n in zip(batch.starts[cut:], lengths, strict=True)]
            bounds = [*accumulate(lengths, initial=0), *accumulate(contexts, initial=0)]
            parts = on_device(bounds, torch.int32, batch.slots.device).chunk(2)
            chunks = _Chunks(parts[0], parts[1], max(lengths), max(contexts))
        return cls(
            cut,
            cast(batch.positions[:cut] + 1, torch.int32),
            cast(batch.block_tables, torch.int32),
            chunks,
        )


def paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: FlashAttentionPlan
) -> torch.Tensor:
    """Attend causally for all tokens of a step, whose own keys and values are in the cache already.

    Args:
        q: [num_tokens, H, d]; rows may lie apart, each is contiguous.
        keys, values: [num_blocks, block_size, G, d], of q's dtype; block_size a multiple of 256.
        plan: made for this step.

    Returns:
        [num_tokens, H, d] in q's dtype.
    """
    flash, cut, parts = _flash_attention(), plan.num_decodes, []
    if cut:
        decoded = flash.decode(
            q[:cut].unsqueeze(1),
            keys,
            values,
            cache_seqlens=plan.contexts,
            block_table=plan.block_tables[:cut],
            causal=True,
        )
        parts.append(decoded.squeeze(1))
    if plan.chunks is not None:
        chunks = plan.chunks
        attended = flash.packed(
            q[cut:],
            keys,
            values,
            cu_seqlens_q=chunks.query_bounds,
            cu_seqlens_k=chunks.key_bounds,
            max_seqlen_q=chunks.longest,
            max_seqlen_k=chunks.longest_context,
            causal=True,
            block_table=plan.block_tables[cut:],
        )
        parts.append(attended)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
