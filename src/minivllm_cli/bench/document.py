"""The results of a run as one JSON document."""

import json
import time
from typing import TYPE_CHECKING, Any

from minivllm_cli.config.settings import Settings
from minivllm_cli.config.show import render_config_json
from minivllm_cli.diagnostics import environment
from minivllm_engine.core.units import count_text

if TYPE_CHECKING:
    from minivllm_engine.core.load_report import LoadReport
    from minivllm_engine.engine.prepare import PreparedModel


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
        """Where it ran, and what the engine made of `auto`."""
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
        """What the start of the engine took; of several engines, the last."""
        self._head["load"] = {
            "weights_s": report.weights_s,
            "compile_s": report.compile_s,
            "capture_s": report.capture_s,
            "graph_sizes": list(report.graph_sizes),
            "graph_bytes": report.graph_bytes,
            "graph_bytes_planned": report.graph_bytes_planned,
        }

    def add_verify(self, verify: dict[str, Any]) -> None:
        """What came of `--verify`."""
        self._head["verify"] = verify

    @property
    def head(self) -> dict[str, Any]:
        """All but the rows."""
        return self._head

    def finished(self, gpu_state: dict[str, Any], *, complete: bool) -> dict[str, Any]:
        """The document as it is now."""
        return {
            **self._head,
            "complete": complete,
            "gpu_state": gpu_state,
            "rows": self.rows,
            "equal": self.pairs,
            "warnings": self.warnings,
        }


def device_title(device: dict[str, Any]) -> str:
    """The device as people call it."""
    if device["kind"] == "cpu":
        return f"CPU, {count_text(device['threads'], 'thread')}"
    return str(device["name"])
