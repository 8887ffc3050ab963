"""`minivllm env`: versions and devices, for reports."""

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from minivllm_cli.command import Invocation, command
from minivllm_cli.console import print_result
from minivllm_cli.options import DeviceOption
from minivllm_engine import __version__

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


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "env")
    def env(
        run: Invocation,
        device: DeviceOption = None,
        json_: Annotated[bool, typer.Option("--json", help="One JSON document")] = False,
    ) -> int:
        """Print the versions of minivllm and its libraries, and the devices."""
        from minivllm_cli.startup import configure

        flags = {} if device is None else {"engine.device": ("--device", str(device))}
        if configure(run, None, flags=flags, runs_model=False, as_json=json_) is None:
            return 0
        facts = environment()
        print_result(json.dumps(facts) + "\n" if json_ else _table(facts))
        return 0


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
    return _output(["git", "-C", str(root), "rev-parse", "HEAD"])


def _gpus() -> list[dict[str, Any]]:
    query = "--query-gpu=name,driver_version,memory.total"
    text = _output(["nvidia-smi", query, "--format=csv,noheader,nounits"]) or ""
    found = []
    for line in text.splitlines():
        name, driver, memory = (part.strip() for part in line.rsplit(",", 2))
        mebibytes = int(memory) if memory.isdecimal() else None
        found.append({"name": name, "driver": driver, "memory": mebibytes and mebibytes * 1024**2})
    return found


def _output(args: list[str]) -> str | None:
    try:
        done = subprocess.run(args, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _table(facts: dict[str, Any]) -> str:
    rows = {name: value for name, value in facts.items() if name not in ("schema_version", "gpus")}
    gpus = [f"{gpu['name']}, driver {gpu['driver']}" for gpu in facts["gpus"]]
    rows["gpus"] = "; ".join(gpus) or "none"
    width = max(len(name) for name in rows)
    return "".join(
        f"{name:<{width}}  {'not installed' if value is None else value}\n"
        for name, value in rows.items()
    )
