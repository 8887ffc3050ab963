"""What an engine holds of a device's memory: sizes that are decided, and the rows they add up to."""

from dataclasses import dataclass
from typing import Literal

from minivllm_engine.core.snapshot_interval import snapshot_interval
from minivllm_engine.memory.devices import DeviceMemory

SHORTEST_SEQUENCE = 2  # one token of prompt, one of answer

Basis = Literal["headers", "planned", "profiled", "measured"]


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One share of a device's memory, in bytes. `basis` says how the figure was found."""

    name: str
    num_bytes: int
    basis: Basis


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of everything, all decided. One more slot and block than counted are allocated: the sinks.

    Attributes:
        dtype, state_dtype: "fp32", "bf16" or "fp16"; of weights, KV and conv states; of recurrent states.
        memory, memory_why: bytes that all pools together may take, and where that figure comes from.
        max_num_batched_tokens: of a step.
        num_snapshots: frozen states that the prefix cache may keep, of `slot_bytes` each.
        slot_bytes: conv and recurrent state of one sequence, all DeltaNet layers.
        block_bytes: K and V of `block_size` tokens, all attention layers.
        weight_bytes: of the weights in memory, and of what layers derive from them.
        activation_bytes: an upper bound of a step's tensors, see `memory_sizes.activation_bytes`.
        graph_bytes: an estimate of what CUDA graphs keep, or the reserve that was set; 0 on a CPU.
        max_graph_batch: the largest batch with a graph; 0 where there are none.
        prefix_cache: prefixes are kept and used.
        packs_head: a tied head is laid out apart from the embedding, for a CPU's products.
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
    weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    max_graph_batch: int
    prefix_cache: bool
    device: DeviceMemory
    memory_why: str = ""
    packs_head: bool = False

    @property
    def state_bytes(self) -> int:
        """Bytes of all state slots, the sink included."""
        return (self.max_num_seqs + 1) * self.slot_bytes

    @property
    def snapshot_bytes(self) -> int:
        return self.num_snapshots * self.slot_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of all KV blocks, the sink included."""
        return (self.num_blocks + 1) * self.block_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools together, sinks included."""
        return self.state_bytes + self.snapshot_bytes + self.kv_bytes

    @property
    def blocks_per_sequence(self) -> int:
        """KV blocks of a sequence of `max_model_len` tokens."""
        return -(-self.max_model_len // self.block_size)

    @property
    def full_length_requests(self) -> int:
        """Requests of `max_model_len` tokens that can run at once."""
        return min(self.max_num_seqs, max(self.num_blocks, 0) // self.blocks_per_sequence)

    @property
    def kv_tokens_per_slot(self) -> int:
        """Tokens of KV that take as much memory as a state slot or a snapshot; 0 without attention."""
        return self.slot_bytes * self.block_size // self.block_bytes if self.block_bytes else 0

    @property
    def min_reusable_prefix(self) -> int | None:
        """Tokens of the shortest prefix that can be found in the cache; None where none can."""
        if not self.prefix_cache or not self.num_snapshots:
            return None
        shortest = snapshot_interval(self.block_size)
        # One more token must be left to compute, and one to answer with.
        return shortest if shortest + SHORTEST_SEQUENCE <= self.max_model_len else None

    def rows(self, *, from_headers: bool) -> tuple[MemoryRow, ...]:
        """List the shares of the device's memory, which add up to all of it.

        `unused` is negative where the plan does not fit: by so much it is too large.

        Args:
            from_headers: the weights were found in a checkpoint, not derived from config.json alone.
        """
        device = self.device
        rows: list[tuple[str, int, Basis]] = []
        if device.kind == "cuda":
            if device.processes:
                rows.append(("other processes", device.held_by_others, "measured"))
            if device.reserved:
                rows.append(("driver", device.reserved, "measured"))
            rows.append(("context", device.context, "planned"))
        rows += [
            ("weights", self.weight_bytes, "headers" if from_headers else "planned"),
            ("activations", self.activation_bytes, "planned"),
        ]
        if device.kind == "cuda":
            rows.append(("graph reserve", self.graph_bytes, "planned"))
        rows += [
            ("state slots", self.state_bytes, "planned"),
            ("snapshots", self.snapshot_bytes, "planned"),
            ("KV blocks", self.kv_bytes, "planned"),
            ("unused", self.memory - self.pool_bytes, "planned"),
        ]
        outside = device.total - sum(size for _, size, _ in rows)
        rows.append(("outside budget", outside, "planned"))
        return tuple(MemoryRow(*row) for row in rows)
