"""`minivllm env`: versions and devices, for reports."""

import json
from typing import Annotated, Any

import typer

from minivllm_cli.command import Invocation, command
from minivllm_cli.config.flags import UnusedDevice
from minivllm_cli.console.streams import print_result
from minivllm_cli.diagnostics import environment


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "env")
    def env(
        run: Invocation,
        *,
        device: UnusedDevice,
        json_: Annotated[bool, typer.Option("--json", help="One JSON document")] = False,
    ) -> int:
        """Print the versions of minivllm and its libraries, and the devices."""
        from minivllm_cli.startup import configure

        if configure(run, None, device, runs_model=False, as_json=json_) is None:
            return 0
        facts = environment()
        print_result(json.dumps(facts) + "\n" if json_ else _table(facts))
        return 0


def _table(facts: dict[str, Any]) -> str:
    rows = {name: value for name, value in facts.items() if name not in ("schema_version", "gpus")}
    gpus = [f"{gpu['name']}, driver {gpu['driver']}" for gpu in facts["gpus"]]
    rows["gpus"] = "; ".join(gpus) or "none"
    width = max(len(name) for name in rows)
    return "".join(
        f"{name:<{width}}  {'not installed' if value is None else value}\n"
        for name, value in rows.items()
    )
