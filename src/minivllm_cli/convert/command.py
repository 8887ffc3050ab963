"""The command `convert-weights`: from its options to what was asked for."""

from pathlib import Path
from typing import Annotated

import typer

from minivllm_cli.command import Invocation, command
from minivllm_cli.config.flags import UnusedDevice
from minivllm_cli.convert.flags import ConvertFlags, check_combination


def _path(text: str) -> Path:
    # An empty path would be the current directory.
    if not text.strip():
        raise typer.BadParameter("an empty path")
    return Path(text)


SourceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        parser=_path,
        help="The checkpoint: a directory, or a .safetensors, .pt, .pth, .bin or .ckpt file.",
        show_default=False,
    ),
]
TargetArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="DST",
        parser=_path,
        help="The directory to write; --dry-run and --explain can do without.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "convert-weights")
    def convert_weights(
        run: Invocation,
        src: SourceArgument,
        dst: TargetArgument = None,
        *,
        flags: ConvertFlags,
        device: UnusedDevice,
    ) -> int:
        """Convert a checkpoint of this model family into the layout that minivllm loads.

        minivllm convert-weights ./src ./dst --dry-run

        minivllm convert-weights ./src ./dst

        minivllm convert-weights checkpoint-500.pt ./dst --model-config config.json
        """
        from minivllm_cli.startup import configure

        settings = configure(run, None, device, runs_model=False, as_json=flags.json_)
        if settings is None:
            return 0
        check_combination(flags, dst)
        if flags.check:
            from minivllm_cli.convert.checking import check_target

            assert dst is not None
            return check_target(run, settings, flags, src, dst)
        from minivllm_cli.convert.planning import (
            explain_tensor,
            make_plan,
            report_problems,
            show_plan,
        )

        plan = make_plan(run, flags, src, dst)
        if flags.explain is not None:
            return explain_tensor(plan, flags.explain, as_json=flags.json_)
        if flags.dry_run:
            return show_plan(run, flags, plan, dst)
        if plan.problems:
            return report_problems(run, plan)
        assert dst is not None
        from minivllm_cli.convert.destination import check_destination, confirm_overwrite
        from minivllm_cli.convert.logits import check_logits_file

        destination = check_destination(dst, plan.source, flags)
        if flags.verify_logits is not None:
            check_logits_file(run, flags.verify_logits, plan)
        if flags.overwrite:
            confirm_overwrite(run, destination, yes=flags.yes)
        from minivllm_cli.convert.converting import convert_source

        return convert_source(run, settings, flags, plan, dst, destination.partial)
