"""Figures of a running engine."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine's counters. Pools are counted apart: blocks of KV, slots of state.

    Attributes:
        bound_by: why requests wait now: "state slots", "KV blocks", "token budget", or None.
        bound_steps: steps in which each of these held.
        prompt_tokens_computed: a prompt that was preempted counts again when it is computed again.
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
    bound_by: str | None = None
    bound_steps: dict[str, int] = field(default_factory=dict)
