"""`minivllm env`: versions, devices and local checkpoints, for reports."""

import json
from typing import Annotated, Any

import typer

from minivllm_cli.command import Invocation, command
from minivllm_cli.config.flags import UnusedDevice
from minivllm_cli.console.streams import print_result
from minivllm_cli.diagnostics import environment
from minivllm_engine.core.escape import escape


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "env")
    def env(
        run: Invocation,
        *,
        device: UnusedDevice,
        json_: Annotated[bool, typer.Option("--json", help="One JSON document")] = False,
    ) -> int:
        """Print the versions of minivllm and its libraries, the devices, and the checkpoints found."""
        from minivllm_cli.startup import configure

        if configure(run, None, device, runs_model=False, as_json=json_) is None:
            return 0
        from minivllm_engine.checkpoint.locate import local_checkpoints

        facts = environment() | {"checkpoints": ["demo", *local_checkpoints()]}
        print_result(json.dumps(facts) + "\n" if json_ else _table(facts))
        return 0


def _table(facts: dict[str, Any]) -> str:
    rows = {
        name: value
        for name, value in facts.items()
        if name not in ("schema_version", "gpus", "checkpoints")
    }
    gpus = [f"{gpu['name']}, driver {gpu['driver']}" for gpu in facts["gpus"]]
    rows["gpus"] = "; ".join(gpus) or "none"
    width = max(len(name) for name in rows)
    lines = [
        (name, "not installed" if value is None else value) for name, value in rows.items()
    ] + [("" if i else "checkpoints", escape(name)) for i, name in enumerate(facts["checkpoints"])]
    return "".join(f"{name:<{width}}  {value}\n" for name, value in lines)
