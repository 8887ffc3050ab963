"""The results of a run as one JSON document, and what the GPU did meanwhile."""

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from minivllm_cli.config.settings import Settings
from minivllm_cli.config.show import render_config_json
from minivllm_cli.versions import environment
from minivllm_engine.core.units import count_text
from minivllm_engine.memory.nvidia_smi import GpuState, gpu_state

if TYPE_CHECKING:
    from minivllm_engine.core.load_report import LoadReport
    from minivllm_engine.engine.prepare import PreparedModel

_SLOW_CLOCK = 0.9


class ResultDocument:
    """Grows while the run goes on.

    Args:
        argv: the command line, without the program.
        model: name and hash.
    """

    def __init__(self, argv: list[str], settings: Settings, model: dict[str, str]) -> None:
        config = json.loads(render_config_json(settings, sources=True))
        self.rows: list[dict[str, Any]] = []
        self.pairs: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self._head: dict[str, Any] = {
            "schema_version": 1,
            "kind": "bench",
            "complete": False,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "argv": argv,
            "env": environment(),
            "config": config["config"],
            "sources": config["sources"],
            "model": model,
            "device": {},
            "load": {},
        }

    def set_device(
        self, prepared: "PreparedModel", read_bytes_s: float, threads: int | None
    ) -> None:
        """Note where it ran, and what the engine made of `auto`."""
        plan, engine = prepared.plan, prepared.config.engine
        self._head["device"] = {
            "kind": engine.device,
            "name": plan.device.name,
            "read_bytes_s": read_bytes_s,
            "threads": threads,
            "dtype": plan.dtype,
            "state_dtype": plan.state_dtype,
            "max_num_seqs": plan.max_num_seqs,
            "max_model_len": plan.max_model_len,
            "max_num_batched_tokens": plan.max_num_batched_tokens,
        }

    def set_load(self, report: "LoadReport") -> None:
        """Note what the start of the engine took; of several engines, the last."""
        self._head["load"] = asdict(report)

    def add_verify(self, verify: dict[str, Any]) -> None:
        """Note what came of `--verify`."""
        self._head["verify"] = verify

    @property
    def head(self) -> dict[str, Any]:
        """All but the rows."""
        return self._head

    def finished(self, gpu_state: dict[str, Any], *, complete: bool) -> dict[str, Any]:
        """Write the document as it is now."""
        return {
            **self._head,
            "complete": complete,
            "gpu_state": gpu_state,
            "rows": self.rows,
            "equal": self.pairs,
            "warnings": self.warnings,
        }


def device_title(device: dict[str, Any]) -> str:
    """Name the device as people call it."""
    if device["kind"] == "cpu":
        return f"CPU, {count_text(device['threads'], 'thread')}"
    return str(device["name"])


class GpuWatch:
    """Looks at the GPU after each row, by nvidia-smi. Without a GPU everything is empty.

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
        """Write what stands in results; lists have an entry a row."""
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
