"""Figures of an engine: what its start took, and its counters while it runs."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Seconds of the phases of a start, and what CUDA graphs took of the device's memory.

    Attributes:
        graph_sizes: batch sizes that were captured; () where there are no graphs.
        graph_bytes: measured. graph_bytes_planned: what the memory plan had kept for them.
    """

    weights_s: float = 0.0
    compile_s: float = 0.0
    capture_s: float = 0.0
    graph_sizes: tuple[int, ...] = ()
    graph_bytes: int = 0
    graph_bytes_planned: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine's counters. Pools are counted apart: blocks of KV, slots of state.

    Attributes:
        bound_by: why requests wait now: "state slots", "KV blocks", "token budget", or None.
        bound_steps: steps in which each of these held.
        prompt_tokens_computed: a prompt that was preempted counts again when it is computed again.
        prompt_tokens: of the requests that have started, each once.
        cached_tokens, kv_matched_tokens: of these, as the requests report them.
        restored_tokens: taken from the prefix cache by requests that came back after preemption, and by
            further outputs of one request: work saved, but no reuse.
        snapshots_used: kept in the prefix cache now; blocks_cached: likewise.
        misses: requests by their miss reason.
    """

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_blocks_peak: int
    state_slots_used: int
    state_slots_total: int
    state_slots_peak: int
    num_preemptions: int
    num_steps: int
    prompt_tokens_computed: int
    output_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kv_matched_tokens: int = 0
    restored_tokens: int = 0
    blocks_cached: int = 0
    blocks_evicted: int = 0
    snapshots_used: int = 0
    snapshots_total: int = 0
    snapshots_peak: int = 0
    snapshots_evicted: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    bound_by: str | None = None
    bound_steps: dict[str, int] = field(default_factory=dict)
