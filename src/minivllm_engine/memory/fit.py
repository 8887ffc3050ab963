"""Fitting an engine into a device's memory: every size decided, or how much is missing.

What was set is taken as it is. Defaults share what it leaves: half of the pools for state slots, a tenth
for snapshots, the rest for KV blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.errors import ConfigError
from minivllm_engine.core.units import count_text, format_size
from minivllm_engine.memory.devices import DeviceMemory
from minivllm_engine.memory.layout import SHORTEST_SEQUENCE, MemoryPlan
from minivllm_engine.memory.sizes import (
    activation_bytes,
    decode_buffer_bytes,
    graph_bytes,
    kv_bytes_per_token,
    packed_head_bytes,
    prompt_buckets,
    slot_bytes,
    weight_bytes,
)
from minivllm_engine.model_config.config import ModelConfig

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_MODEL_LEN = 32 * 1024
DEFAULT_TOKEN_BUDGET = {"cpu": 2048, "cuda": 8192}
_MOST_CPU_POOLS, _LEAST_CPU_POOLS = 4 << 30, 256 << 20
_CACHED_TIMES = 4  # what runs, and three times as much of what ran before, kept for reuse
_FREE_SNAPSHOTS = 256  # of a model without DeltaNet layers, whose snapshots take no memory


@dataclass(frozen=True, slots=True)
class Lowered:
    """A default that did not fit: config key, what it would have been, what it is, as people read it."""

    key: str
    wanted: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Fit:
    """What comes of fitting. With a `shortfall` the plan is what was asked for, and does not fit.

    Attributes:
        shortfall: bytes that are missing; 0 where it fits, or where memory is not what is missing.
        conflict: the KV blocks that were set hold less than the length that was set.
    """

    plan: MemoryPlan
    lowered: tuple[Lowered, ...] = ()
    shortfall: int = 0
    conflict: bool = False

    @property
    def ok(self) -> bool:
        return not self.shortfall and not self.conflict


def fit(model: ModelConfig, config: EngineConfig, device: DeviceMemory, *, tied: bool) -> Fit:
    """Decide every size that `config` leaves open.

    Args:
        config: `engine.max_model_len` lies within the model's positions.
        device: decides by its kind what the defaults are.
        tied: the output head is the embedding.
    """
    return _Fitting(model, config, device, tied).run()


@dataclass(frozen=True, slots=True)
class Planner:
    """Plan engines of one model on one device, each with a config of its own, without a word.

    Attributes:
        tied: the output head is the embedding.
    """

    model: ModelConfig
    device: DeviceMemory
    tied: bool

    def __call__(self, config: EngineConfig) -> Fit:
        """Return the plan, also where it does not fit.

        Raises:
            ConfigError: `max_model_len` is beyond the model's positions; the hint is the longest that fits.
        """
        asked, positions = config.engine.max_model_len, self.model.max_position_embeddings
        if asked is None or asked <= positions:
            return fit(self.model, config, self.device, tied=self.tied)

        def fits(length: int) -> bool:
            engine = config.engine.model_copy(update={"max_model_len": length})
            return self(config.model_copy(update={"engine": engine})).ok

        longest = largest(fits, positions, SHORTEST_SEQUENCE)
        raise ConfigError(
            f"engine.max_model_len {asked} is beyond the model's positions",
            why=f"its config.json has max_position_embeddings {positions}",
            hint=None if longest is None else f"--set engine.max_model_len={longest}",
        )


class _Fitting:
    """The figures that do not depend on what is decided, and the decisions, one a method."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, device: DeviceMemory, tied: bool
    ) -> None:
        engine, cache = config.engine, config.cache
        on_gpu = device.kind == "cuda"
        self.model, self.config, self.device = model, config, device
        automatic = model.dtype if on_gpu else "fp32"
        self.dtype = automatic if engine.dtype == "auto" else engine.dtype
        self.state_dtype = model.state_dtype if engine.state_dtype == "auto" else engine.state_dtype
        self.per_slot = slot_bytes(model, self.dtype, self.state_dtype)
        self.per_block = kv_bytes_per_token(model, self.dtype) * cache.block_size
        self.longest = engine.max_model_len or min(
            model.max_position_embeddings, DEFAULT_MAX_MODEL_LEN
        )
        self.num_tokens = engine.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET[device.kind]
        self.weights = weight_bytes(model, self.dtype, tied=tied)
        head = packed_head_bytes(model, self.dtype) if tied and not on_gpu else 0
        # Twice the speed of the head is worth so much memory, and no refusal.
        self.packs_head = 0 < head <= device.total // 16
        self.weights += head if self.packs_head else 0
        graphs = on_gpu and config.graph.enabled is not False and engine.can_capture
        self.max_graph_batch = config.graph.max_batch if graphs else 0
        self.lowered: list[Lowered] = []

    def run(self) -> Fit:
        engine, cache = self.config.engine, self.config.cache
        smallest = engine.max_num_seqs or 1
        conflict = cache.num_blocks is not None and cache.num_blocks * cache.block_size < (
            engine.max_model_len or SHORTEST_SEQUENCE
        )
        if conflict or self._left(smallest) < 0:
            least = self._least_blocks
            plan = self._plan(smallest, self._set_snapshots, least, self.longest)
            return Fit(plan, shortfall=max(0, -self._left(smallest)), conflict=conflict)
        num_seqs = self._num_seqs()
        snapshots = self._num_snapshots(num_seqs)
        num_blocks = self._num_blocks(num_seqs, snapshots)
        length = self._length(num_blocks)
        return Fit(self._plan(num_seqs, snapshots, num_blocks, length), tuple(self.lowered))

    # -- memory ----------------------------------------------------------------------------------

    def _activations(self, num_seqs: int) -> int:
        rows = min(num_seqs, self.num_tokens)
        step = activation_bytes(
            self.model, self.dtype, self.state_dtype, num_tokens=self.num_tokens, num_rows=rows
        )
        if self.device.kind == "cpu":
            return step
        return step + decode_buffer_bytes(self.model, self.dtype, num_seqs)

    def _graph_batch(self, num_seqs: int) -> int:
        return min(num_seqs, self.max_graph_batch)

    def _graphs(self, num_seqs: int) -> int:
        largest, reserve = self._graph_batch(num_seqs), self.config.graph.reserve
        if not largest:
            return 0
        if reserve is not None:
            return reserve
        buckets: tuple[tuple[int, int], ...] = ()
        if self.config.engine.can_capture_prompts:
            buckets = prompt_buckets(self.num_tokens, num_seqs)
        return graph_bytes(self.model, self.dtype, self.state_dtype, largest, buckets)

    def _room(self, num_seqs: int) -> int:
        """Bytes left for the pools by everything else; negative where that alone is too much."""
        device = self.device
        used = self.weights + self._activations(num_seqs) + self._graphs(num_seqs)
        if device.kind == "cpu":
            return device.total - used
        budget = int(device.total * self.config.engine.gpu_memory_utilization)
        return budget - device.held_by_others - device.reserved - device.context - used

    def _pools(self, num_seqs: int) -> int:
        """Bytes that the pools get."""
        if self.device.kind == "cuda":
            return self._room(num_seqs)
        return self.config.engine.cpu_memory or min(self._cpu_default, self._room(num_seqs))

    def _why(self, num_seqs: int) -> str:
        """Where the figure of `_pools` comes from, for people."""
        if self.device.kind == "cuda":
            return "what the budget leaves beside everything else"
        if self.config.engine.cpu_memory is not None:
            return "engine.cpu_memory"
        if self._room(num_seqs) < self._cpu_default:
            return "what weights and activations leave of the RAM"
        if self._cpu_default == min(_MOST_CPU_POOLS, self.device.total // 4):
            return f"a quarter of the RAM, {format_size(_MOST_CPU_POOLS)} at most"
        count = count_text(num_seqs, "sequence")
        return f"for {count}, and {_CACHED_TIMES - 1} times as much for prefixes that are kept"

    @property
    def _cpu_default(self) -> int:
        """Bytes for the pools of a CPU: what the sequences that were set can use, or a round sum."""
        most, count = min(_MOST_CPU_POOLS, self.device.total // 4), self.config.engine.max_num_seqs
        if count is None:
            return most
        sequence = self.per_slot + -(-self.longest // self.config.cache.block_size) * self.per_block
        least = self._slots(count) + self._set_snapshots * self.per_slot
        least += (self._least_blocks + 1) * self.per_block
        return min(most, max(_LEAST_CPU_POOLS, _CACHED_TIMES * count * sequence, least))

    def _left(self, num_seqs: int) -> int:
        """Bytes left once the pools hold `num_seqs` slots and what was set of the others.

        Negative where something is missing.
        """
        pools, room = self._pools(num_seqs), self._room(num_seqs)
        least = self._slots(num_seqs) + self._set_snapshots * self.per_slot
        least += (self._least_blocks + 1) * self.per_block
        # Where a memory for the pools was set, it must be there as well as suffice.
        return pools - least if pools <= room else min(pools - least, room - pools)

    def _slots(self, num_seqs: int) -> int:
        return (num_seqs + 1) * self.per_slot

    @property
    def _least_blocks(self) -> int:
        cache = self.config.cache
        if cache.num_blocks is not None:
            return cache.num_blocks
        return -(-(self.config.engine.max_model_len or SHORTEST_SEQUENCE) // cache.block_size)

    @property
    def _set_snapshots(self) -> int:
        cache = self.config.cache
        if not cache.prefix_cache or not cache.snapshot_memory:
            return 0
        return cache.snapshot_memory // self.per_slot if self.per_slot else _FREE_SNAPSHOTS

    # -- decisions -------------------------------------------------------------------------------

    def _num_seqs(self) -> int:
        """As many as take at most half of the pools, so that KV gets the other half."""
        if self.config.engine.max_num_seqs is not None:
            self._note_cpu_memory(self.config.engine.max_num_seqs)
            return self.config.engine.max_num_seqs

        def comfortable(count: int) -> bool:
            return self._left(count) >= 0 and 2 * self._slots(count) <= self._pools(count)

        count = largest(comfortable, DEFAULT_MAX_NUM_SEQS) or 1
        if count < DEFAULT_MAX_NUM_SEQS:
            self._lower(
                "engine.max_num_seqs",
                str(DEFAULT_MAX_NUM_SEQS),
                str(count),
                f"a state slot takes {format_size(self.per_slot)} of the "
                f"{format_size(self._pools(count))} for all pools",
            )
        self._note_cpu_memory(count)
        return count

    def _note_cpu_memory(self, num_seqs: int) -> None:
        if self.device.kind != "cpu" or self.config.engine.cpu_memory is not None:
            return
        if self._pools(num_seqs) < self._cpu_default:
            self._lower(
                "engine.cpu_memory",
                format_size(self._cpu_default),
                format_size(self._pools(num_seqs)),
                f"weights and activations take {format_size(self.device.total - self._room(num_seqs))} "
                f"of {format_size(self.device.total)} RAM",
            )

    def _num_snapshots(self, num_seqs: int) -> int:
        """A tenth of the pools, or what is left of them."""
        cache = self.config.cache
        if not cache.prefix_cache or cache.snapshot_memory is not None:
            return self._set_snapshots
        if not self.per_slot:
            return _FREE_SNAPSHOTS
        wanted = self._pools(num_seqs) // 10
        memory = min(wanted, self._left(num_seqs))
        if memory // self.per_slot < wanted // self.per_slot:
            self._lower(
                "cache.snapshot_memory",
                format_size(wanted),
                format_size(memory // self.per_slot * self.per_slot),
                "what was set leaves no more",
            )
        return memory // self.per_slot

    def _num_blocks(self, num_seqs: int, snapshots: int) -> int:
        """As many as running sequences and cached prefixes can use, or what is left."""
        if self.config.cache.num_blocks is not None:
            return self.config.cache.num_blocks
        useful = (num_seqs + snapshots) * -(-self.longest // self.config.cache.block_size)
        if not self.per_block:
            return useful
        left = self._pools(num_seqs) - self._slots(num_seqs) - snapshots * self.per_slot
        return min(useful, left // self.per_block - 1)

    def _length(self, num_blocks: int) -> int:
        """The longest sequence that the KV blocks hold."""
        size = self.config.cache.block_size
        if num_blocks * size >= self.longest:
            return self.longest
        length = num_blocks * size
        self._lower(
            "engine.max_model_len",
            str(self.longest),
            str(length),
            f"the KV pool has {count_text(num_blocks, 'block')} of {size} tokens",
        )
        return length

    def _lower(self, key: str, wanted: str, value: str, why: str) -> None:
        self.lowered.append(Lowered(key, wanted, value, why))

    def _plan(self, num_seqs: int, snapshots: int, num_blocks: int, length: int) -> MemoryPlan:
        return MemoryPlan(
            dtype=self.dtype,
            state_dtype=self.state_dtype,
            memory=self._pools(num_seqs),
            max_num_seqs=num_seqs,
            max_model_len=length,
            max_num_batched_tokens=self.num_tokens,
            block_size=self.config.cache.block_size,
            num_blocks=num_blocks,
            num_snapshots=snapshots,
            slot_bytes=self.per_slot,
            block_bytes=self.per_block,
            weight_bytes=self.weights,
            activation_bytes=self._activations(num_seqs),
            graph_bytes=self._graphs(num_seqs),
            max_graph_batch=self._graph_batch(num_seqs),
            prefix_cache=self.config.cache.prefix_cache,
            device=self.device,
            memory_why=self._why(num_seqs),
            packs_head=self.packs_head,
        )


def largest(fits: Callable[[int], bool], most: int, least: int = 1) -> int | None:
    """Find the largest number from `least` to `most` that fits; None if `least` does not.

    `fits` must not become true again once it is false.
    """
    if least > most or not fits(least):
        return None
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
