"""What fits: pure arithmetic from the model's config and a memory size, before any weight is loaded."""

import logging
import os
from dataclasses import dataclass

from minivllm_engine.config import EngineConfig
from minivllm_engine.errors import CapacityError, ConfigError
from minivllm_engine.model_config import ModelConfig
from minivllm_engine.units import format_size

logger = logging.getLogger(__name__)

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_MODEL_LEN = 32 * 1024
DEFAULT_CPU_TOKEN_BUDGET = 2048


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of the pools, all decided. One more slot and block than counted are allocated: the sinks.

    Attributes:
        dtype, state_dtype: "fp32", "bf16" or "fp16"; of weights, KV and conv states; of recurrent states.
        slot_bytes: conv and recurrent state of one sequence, all DeltaNet layers.
        memory: bytes that all pools together may take.
        block_bytes: K and V of `block_size` tokens, all attention layers.
    """

    dtype: str
    state_dtype: str
    memory: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    num_snapshots: int
    slot_bytes: int
    block_bytes: int

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools together, sinks included."""
        slots = (self.max_num_seqs + 1 + self.num_snapshots) * self.slot_bytes
        return slots + (self.num_blocks + 1) * self.block_bytes


def physical_memory() -> int:
    """RAM of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def slot_bytes(model: ModelConfig, dtype: str, state_dtype: str) -> int:
    """Bytes of one sequence's conv and recurrent state, over all DeltaNet layers."""
    conv = model.conv_dim * (model.linear_conv_kernel_dim - 1) * ITEM_BYTES[dtype]
    heads, v, k = (
        model.linear_num_value_heads,
        model.linear_value_head_dim,
        model.linear_key_head_dim,
    )
    return model.num_linear_layers * (conv + heads * v * k * ITEM_BYTES[state_dtype])


def kv_bytes_per_token(model: ModelConfig, dtype: str) -> int:
    """Bytes of one token's K and V, over all attention layers."""
    width = 2 * model.num_key_value_heads * model.head_dim
    return model.num_attention_layers * width * ITEM_BYTES[dtype]


def plan_memory(model: ModelConfig, config: EngineConfig, ram: int) -> MemoryPlan:
    """Size the pools of an engine on a CPU with `ram` bytes.

    A default that does not fit is lowered with one warning; a value that was set is refused.

    Raises:
        CapacityError: what was set does not fit; the error names what would.
        ConfigError: `max_model_len` is beyond what the model's positions are made for.
    """
    options, block_size = config.engine, config.cache.block_size
    dtype = "fp32" if options.dtype == "auto" else options.dtype
    state_dtype = model.state_dtype if options.state_dtype == "auto" else options.state_dtype
    per_slot = slot_bytes(model, dtype, state_dtype)
    per_block = kv_bytes_per_token(model, dtype) * block_size
    longest = options.max_model_len or min(model.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
    if longest > model.max_position_embeddings:
        raise ConfigError(
            f"engine.max_model_len {longest} is beyond the model's positions",
            why=f"its config.json has max_position_embeddings {model.max_position_embeddings}",
            hint=f"--set engine.max_model_len={model.max_position_embeddings}",
        )
    memory = options.cpu_memory or min(4 * 2**30, ram // 4)
    num_snapshots = 0
    if config.cache.prefix_cache:
        asked = config.cache.snapshot_memory
        num_snapshots = (memory // 10 if asked is None else asked) // max(per_slot, 1)
        num_snapshots = min(num_snapshots, 4096)
    budget = memory - num_snapshots * per_slot
    num_seqs = _fit_slots(config, per_slot, per_block, budget)
    num_blocks = config.cache.num_blocks
    if num_blocks is None:
        useful = num_seqs * -(-longest // block_size)
        left = budget - (num_seqs + 1) * per_slot
        num_blocks = min(useful, left // per_block - 1) if per_block else useful
    return MemoryPlan(
        dtype=dtype,
        state_dtype=state_dtype,
        memory=memory,
        max_num_seqs=num_seqs,
        max_model_len=_fit_length(
            config, longest, num_blocks, smallest=(num_seqs + 1) * per_slot + 2 * per_block
        ),
        max_num_batched_tokens=options.max_num_batched_tokens or DEFAULT_CPU_TOKEN_BUDGET,
        block_size=block_size,
        num_blocks=num_blocks,
        num_snapshots=num_snapshots,
        slot_bytes=per_slot,
        block_bytes=per_block,
    )


def _fit_slots(config: EngineConfig, per_slot: int, per_block: int, budget: int) -> int:
    """Sequences whose state slots leave room for at least two blocks of KV: the sink and one more."""
    asked = config.engine.max_num_seqs
    fitting = (budget - 2 * per_block) // per_slot - 1 if per_slot else DEFAULT_MAX_NUM_SEQS
    if asked is not None:
        if per_slot and asked > fitting:
            raise _too_many(f"max_num_seqs {asked}", asked, fitting, per_slot, budget)
        return asked
    # By default at most half of the memory goes to slots, so that KV gets the other half.
    comfortable = (budget // 2) // per_slot - 1 if per_slot else DEFAULT_MAX_NUM_SEQS
    if comfortable >= DEFAULT_MAX_NUM_SEQS:
        return DEFAULT_MAX_NUM_SEQS
    lowered = max(comfortable, min(fitting, 1))
    if lowered < 1:
        raise _too_many("one sequence", 1, 0, per_slot, budget)
    logger.warning(
        "engine.max_num_seqs lowered from %d to %d: a state slot takes %s of the %s for all pools",
        DEFAULT_MAX_NUM_SEQS,
        lowered,
        format_size(per_slot),
        format_size(budget),
    )
    return lowered


def _too_many(what: str, asked: int, fitting: int, per_slot: int, budget: int) -> CapacityError:
    need = format_size((asked + 1) * per_slot)
    return CapacityError(
        f"{what} needs {asked} state slots ({need}); {max(fitting, 0)} fit",
        why=f"all pools together get {format_size(budget)}; a slot takes {format_size(per_slot)}",
        hint=f"--set engine.max_num_seqs={fitting}"
        if fitting > 0
        else f"--set engine.cpu_memory={-(-4 * per_slot // 2**20)}MiB",
    )


def _fit_length(config: EngineConfig, longest: int, num_blocks: int, *, smallest: int) -> int:
    """The longest sequence that the KV blocks can hold, at most `longest`.

    `smallest` is the memory with which the pools would hold one block beside the sinks.
    """
    holds = num_blocks * config.cache.block_size
    if holds >= longest:
        return longest
    if holds < 2 or config.engine.max_model_len is not None:
        raise CapacityError(
            f"engine.max_model_len {longest} needs {-(-longest // config.cache.block_size)} KV blocks; "
            f"{max(num_blocks, 0)} fit",
            why=f"a block holds {config.cache.block_size} tokens",
            hint=f"--set engine.max_model_len={holds}"
            if holds >= 2
            else f"--set engine.cpu_memory={-(-smallest // 2**20)}MiB",
        )
    logger.warning(
        "engine.max_model_len lowered from %d to %d: the KV pool has %d blocks of %d tokens",
        longest,
        holds,
        num_blocks,
        config.cache.block_size,
    )
    return holds
