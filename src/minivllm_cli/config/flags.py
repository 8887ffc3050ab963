"""Flags, each declared once: the name of its field, the config key that it sets, its help.

A command takes groups of flags as parameters; `command` (command.py) spreads a group's fields into the
signature that Typer sees and hands the filled group to the function:

    @command(app, "chat")
    def chat(run: Invocation, model: ModelArgument = None, *, engine: EngineFlags) -> int:
        settings = configure(run, model, engine)  # startup.py; None after --print-config

A flag that sets a key arrives as text: the schema says what it may be, as in a config file.
"""

import re
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import typer

from minivllm_cli.config.schema import metavar_of
from minivllm_cli.errors import CliError

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Directory of a checkpoint, or demo (the built-in one, also the default).  [model]",
        show_default=False,
    ),
]


def flag(
    help: str,
    *,
    key: str | None = None,
    short: str | None = None,
    metavar: str | None = None,
    panel: str | None = None,
    sets: bool | None = None,
    **more: Any,
) -> Any:
    """Declare a field of an `OptionGroup` as the flag of its name: None unless typed.

    Args:
        key: the config key that it sets. Its help ends with it.
        metavar: what stands for the value; of a key, the schema says it.
        panel: the heading under which it stands, and those declared after it.
        sets: what a switch sets its key to; true unless said.
        more: further arguments of `typer.Option`.
    """
    more |= {"help": f"{help}  [{key}]" if key else help, "metavar": metavar}
    own = {"key": key, "short": short, "panel": panel, "sets": sets, "option": more}
    return field(default=more.pop("default", None), metadata=own)


def switch(help: str, **more: Any) -> Any:
    """Declare a field as a flag without a value: false unless typed."""
    return flag(help, default=False, **more)


def name_of(declared: "Field[Any]") -> str:
    """Return the long name of a flag."""
    return "--" + declared.name.strip("_").replace("_", "-")


_ESCAPES = {"n": "\n", "t": "\t", "0": "\0", "r": "\r", "\\": "\\"}


def unescape(text: str) -> str:
    r"""Read \n, \t, \r, \0 and \\ as a shell's user means them; any other backslash stays."""
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), text, flags=re.DOTALL)


class OptionGroup:
    """Base of the groups of flags; `panel` is the heading of those that say none."""

    panel: ClassVar[str] = "Options"

    def typed(self) -> dict[str, tuple[str, Any]]:
        """Map config key -> (flag, value), for the flags of this group that were typed."""
        found: dict[str, tuple[str, Any]] = {}
        for declared in fields(self):  # type: ignore[arg-type]
            value, about = getattr(self, declared.name), declared.metadata
            if about["key"] is not None and value not in (None, False):
                sets = about["sets"]
                found[about["key"]] = (name_of(declared), value if sets is None else sets)
        return found

    @classmethod
    def parameters(cls) -> list[tuple[str, Any, Any]]:
        """Name, annotation and default of each flag, as Typer takes them."""
        found: list[tuple[str, Any, Any]] = []
        hints, panel = get_type_hints(cls), cls.panel
        for declared in fields(cls):  # type: ignore[arg-type]
            about = declared.metadata
            panel = about["panel"] or panel
            option = dict(about["option"])
            if about["key"] and option["metavar"] is None and "bool" not in str(declared.type):
                option["metavar"] = metavar_of(about["key"])
            names = [name for name in (about["short"], name_of(declared)) if name]
            made = typer.Option(*names, show_default=False, rich_help_panel=panel, **option)
            kind: Any = Annotated[hints[declared.name], made]
            found.append((declared.name, kind, declared.default))
        return found


def print_version(wanted: bool) -> None:
    """Print the version and leave, if that was asked for."""
    if wanted:
        from minivllm_cli.console.streams import print_result
        from minivllm_engine import __version__

        print_result(f"minivllm {__version__}\n")
        raise typer.Exit


@dataclass(frozen=True)
class CommonOptions(OptionGroup):
    """What every command takes. `minivllm --help` shows it, the help of a command does not."""

    panel: ClassVar[str] = "Options of every command"

    config: list[Path] | None = flag("YAML config; repeat to merge", metavar="FILE")
    set_: list[str] | None = flag("Set one config key; repeatable", metavar="KEY=VALUE")
    print_config: bool = switch("Print the config as YAML and leave")
    sources: bool = switch("With --print-config: say where each value comes from")
    diff_defaults: bool = switch("With --print-config: changed keys only")
    progress: str | None = flag("How progress is shown", key="output.progress")
    quiet: bool = switch("Errors only", short="-q")
    verbose: int = flag(
        "Show the engine's log; -vv for more", short="-v", default=0, count=True, metavar=""
    )
    debug: bool = switch("Show tracebacks")
    version: bool = switch("Print the version and leave", callback=print_version, is_eager=True)


@dataclass(frozen=True)
class UnusedDevice(OptionGroup):
    """`--device`, for commands that need no device: scripts give it to every command."""

    device: str | None = flag("Without effect here", key="engine.device", hidden=True)


def cache_dump_flag() -> Any:
    """Declare `--cache-dump`."""
    help = "Write what the prefix cache holds, at the end and at SIGUSR1, for inspect-cache FILE"
    return flag(help, metavar="FILE", panel="Cache")


@dataclass(frozen=True)
class EngineFlags(OptionGroup):
    """Flags of the commands that run a model."""

    panel: ClassVar[str] = "Engine"

    device: str | None = flag("Where to run", key="engine.device")
    dtype: str | None = flag("Of weights and computation", key="engine.dtype")
    max_num_seqs: str | None = flag("Most sequences that run at once", key="engine.max_num_seqs")
    max_model_len: str | None = flag(
        "Most tokens of prompt and answer; 32K works", key="engine.max_model_len"
    )


@dataclass(frozen=True)
class SamplingFlags(OptionGroup):
    """How answers are sampled, where a request does not say so itself."""

    panel: ClassVar[str] = "Sampling"

    max_tokens: str | None = flag(
        "Most tokens of an answer, 2048 if nothing says otherwise", key="sampling.max_tokens"
    )
    temperature: str | None = flag("0 is greedy", key="sampling.temperature")
    top_p: str | None = flag("Nucleus sampling", key="sampling.top_p")
    top_k: str | None = flag("Likeliest tokens kept", key="sampling.top_k")
    seed: str | None = flag("Start of the random streams", key="sampling.seed")
    stop: list[str] | None = flag(
        "Text that ends an answer; repeatable", key="sampling.stop", metavar="TEXT"
    )
    ignore_eos: bool | None = flag("Go on after the model's end token", key="sampling.ignore_eos")

    def typed(self) -> dict[str, tuple[str, Any]]:
        """Map as every group does, with the escapes of `--stop` read."""
        found = super().typed()
        if self.stop:
            found["sampling.stop"] = ("--stop", [unescape(text) for text in self.stop])
        return found


@dataclass(frozen=True)
class ThinkFlags(OptionGroup):
    """Thinking, for templates that know `enable_thinking`. Two flags: a pair would let the last one win."""

    panel: ClassVar[str] = "Sampling"

    think: bool = switch("Ask the chat template for thinking")
    no_think: bool = switch("Ask the chat template for none")

    @property
    def enabled(self) -> bool | None:
        """What was asked for; None leaves it to the template.

        Raises:
            CliError: both flags were typed.
        """
        if self.think and self.no_think:
            raise CliError("--think and --no-think exclude each other")
        return True if self.think else False if self.no_think else None
