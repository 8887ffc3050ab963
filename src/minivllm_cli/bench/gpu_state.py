"""What the GPU did while it was measured, by nvidia-smi. Without a GPU everything is empty."""

import os
from collections.abc import Callable, Iterable
from typing import Any

from minivllm_engine.memory.devices import GpuState, gpu_state

_SLOW_CLOCK = 0.9


class GpuWatch:
    """Looks at the GPU after each row.

    Args:
        look: asks for the state; None where the model runs elsewhere.
    """

    def __init__(self, look: Callable[[], GpuState | None] | None = gpu_state) -> None:
        self._look = look
        self._states: list[GpuState] = []
        before = None if look is None else look()
        self._before = frozenset() if before is None else before.pids

    def after_row(self) -> list[str]:
        """Look, and say what may have disturbed the row that was just measured."""
        state = None if self._look is None else self._look()
        if state is None:
            return []
        self._states.append(state)
        warnings = []
        fastest = max((s.clock_mhz or 0 for s in self._states), default=0)
        if state.clock_mhz is not None and state.clock_mhz < _SLOW_CLOCK * fastest:
            warnings.append(
                f"the GPU's clock is down to {state.clock_mhz:,} MHz; it was {fastest:,} before"
            )
        others = self._others(state.pids)
        if others:
            pids = ", ".join(map(str, others))
            warnings.append(f"another process uses the GPU: pid {pids}")
        return warnings

    def document(self) -> dict[str, Any]:
        """As it stands in results; lists have an entry a row."""
        seen = frozenset(pid for state in self._states for pid in state.pids)
        caps = [s.power_cap_w for s in self._states if s.power_cap_w is not None]
        return {
            "clock_mhz": _known(s.clock_mhz for s in self._states),
            "power_cap_w": caps[-1] if caps else 0,
            "temperature_c": _known(s.temperature_c for s in self._states),
            "other_pids": self._others(seen),
        }

    def _others(self, pids: frozenset[int]) -> list[int]:
        unknown = pids - {os.getpid()}
        new = unknown - self._before
        if os.getpid() not in pids and len(new) == 1:
            # Inside a container the driver may name this process by another number.
            unknown -= new
        return sorted(unknown)


def _known(values: Iterable[int | None]) -> list[int]:
    return [value for value in values if value is not None]
