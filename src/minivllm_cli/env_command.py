"""`minivllm env`: versions and devices, for reports."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from minivllm_cli.command import Invocation, command
from minivllm_cli.console import print_result
from minivllm_cli.options import DeviceOption
from minivllm_engine import __version__
from minivllm_engine.nvidia_smi import command_output, list_gpus

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
    return command_output(["git", "-C", str(root), "rev-parse", "HEAD"])


def _gpus() -> list[dict[str, Any]]:
    return [{"name": g.name, "driver": g.driver, "memory": g.total} for g in list_gpus()]


def _table(facts: dict[str, Any]) -> str:
    rows = {name: value for name, value in facts.items() if name not in ("schema_version", "gpus")}
    gpus = [f"{gpu['name']}, driver {gpu['driver']}" for gpu in facts["gpus"]]
    rows["gpus"] = "; ".join(gpus) or "none"
    width = max(len(name) for name in rows)
    return "".join(
        f"{name:<{width}}  {'not installed' if value is None else value}\n"
        for name, value in rows.items()
    )
