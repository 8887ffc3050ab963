"""Versions of minivllm and its libraries, and the devices: for reports."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from minivllm_engine import __version__
from minivllm_engine.memory.devices import list_gpus

_LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "typer",
    "rich",
    "prompt_toolkit",
    "pydantic",
    "triton",
    "flash-linear-attention",
)


def environment() -> dict[str, Any]:
    """Versions and devices. What is missing is None or []. Imports no library for it."""
    facts: dict[str, Any] = {"schema_version": 1, "minivllm": __version__, "commit": _commit()}
    facts["python"] = platform.python_version()
    for name in _LIBRARIES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = None
    return facts | {"gpus": _gpus(), "platform": platform.platform()}


def _commit() -> str | None:
    # Only for a checkout of this project: a package installed elsewhere must not report its surroundings.
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _gpus() -> list[dict[str, Any]]:
    return [{"name": g.name, "driver": g.driver, "memory": g.total} for g in list_gpus()]
