"""What a report of a fault needs: versions, devices, and the crash file of an unexpected error."""

import json
import os
import platform
import subprocess
import sys
import time
import traceback
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
    """List versions and devices. What is missing is None or []. Imports no library for it."""
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


def state_dir() -> Path:
    """Say where this program keeps what it remembers: $XDG_STATE_HOME/minivllm."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "minivllm"


def write_crash_file(error: BaseException, command: str) -> Path | None:
    """Write traceback, arguments and versions; the path, or None where it cannot be written."""
    document = {
        "schema_version": 1,
        "kind": "crash",
        "command": command,
        "argv": sys.argv[1:],
        "error": f"{type(error).__name__}: {error}",
        "traceback": traceback.format_exception(error),
        "env": environment(),
    }
    stamp = time.strftime("%Y%m%dT%H%M%S") + f"-{os.getpid()}"
    path = state_dir() / f"crash-{stamp}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8", errors="replace") as file:
            os.chmod(path, 0o600)
            json.dump(document, file, indent=1)
    except OSError:
        return None
    return path
