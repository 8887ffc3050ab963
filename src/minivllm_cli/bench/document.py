"""The results of a run as one JSON document, and what the GPU did meanwhile."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm_cli import engine
from minivllm_cli.config.settings import Settings
from minivllm_cli.config.show import render_config_json
from minivllm_cli.diagnostics import environment
from minivllm_cli.files.fingerprint import model_hash
from minivllm_engine.core.units import count_text
from minivllm_engine.memory.devices import GpuState, gpu_state

if TYPE_CHECKING:
    from minivllm_engine.engine.prepare import PreparedModel

_SLOW_CLOCK = 0.9


def new_document(settings: Settings, model: dict[str, str]) -> dict[str, Any]:
    """Begin the document of a run, which grows while the run goes on.

    Args:
        model: name and hash.
    """
    config = json.loads(render_config_json(settings, sources=True))
    return {
        "schema_version": 1,
        "kind": "bench",
        "complete": False,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "argv": sys.argv[1:],
        "env": environment(),
        "config": config["config"],
        "sources": config["sources"],
        "model": model,
        "device": {},
        "load": {},
        "gpu_state": {},
        "rows": [],
        "equal": [],
        "warnings": [],
    }


def device_document(prepared: "PreparedModel", read_bytes_s: float) -> dict[str, Any]:
    """Write where it runs, and what the engine made of `auto`."""
    plan, device = prepared.plan, prepared.config.engine.device
    return {
        "kind": device,
        "name": plan.device.name,
        "read_bytes_s": read_bytes_s,
        "threads": engine.num_threads() if device == "cpu" else None,
        "dtype": plan.dtype,
        "state_dtype": plan.state_dtype,
        "max_num_seqs": plan.max_num_seqs,
        "max_model_len": plan.max_model_len,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
    }


def model_document(model: str, path: Path, shape: str | None) -> dict[str, str]:
    """Write name and hash of the model, or of the random weights of a shape."""
    if shape is None:
        name = model if model == "demo" else Path(model).resolve().name
        return {"name": name, "hash": model_hash(path)}
    from minivllm_engine.model_config.shapes import shape_config

    content = json.dumps([shape_config(shape), "random"], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return {"name": f"{shape} random", "hash": f"sha256:{digest}"}


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
