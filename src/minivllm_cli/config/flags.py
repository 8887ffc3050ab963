"""Options that several commands share, each declared once.

A command takes groups of options as parameters; `command` (command.py) spreads a group's fields into
the signature that Typer sees and hands the filled group to the function:

    @command(app, "chat")
    def chat(run: Invocation, model: ModelArgument = None, *, engine: EngineFlags) -> int:
        settings = configure(run, model, engine)  # startup.py; None after --print-config

A flag that sets a config key says so in its help, `[engine.max_num_seqs]`, and is None unless typed.
"""

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from minivllm_cli.errors import CliError
from minivllm_cli.help import COMMON

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Directory of a checkpoint, or demo (the built-in one, also the default).  [model]",
        show_default=False,
    ),
]


class ProgressStyle(StrEnum):
    """How a long run shows where it is."""

    AUTO = "auto"
    BAR = "bar"
    PLAIN = "plain"
    JSON = "json"
    OFF = "off"


class Device(StrEnum):
    """Where the model runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class OptionGroup:
    """Base of the groups. `config_paths` maps a field to the config key that it sets."""

    config_paths: ClassVar[dict[str, str]] = {}

    def typed(self) -> dict[str, tuple[str, Any]]:
        """Config key -> (flag, value), for the flags of this group that were typed."""
        found: dict[str, tuple[str, Any]] = {}
        for field in fields(self):  # type: ignore[arg-type]
            path = self.config_paths.get(field.name)
            value = getattr(self, field.name)
            if path is not None and value is not None:
                flag = "--" + field.name.replace("_", "-")
                found[path] = (flag, value.value if isinstance(value, StrEnum) else value)
        return found


def _option(*names: str, help: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(
        *names, help=help, metavar=metavar, show_default=False, rich_help_panel=panel
    )


def print_version(wanted: bool) -> None:
    """Print the version and leave, if that was asked for."""
    if wanted:
        from minivllm_cli.console.streams import print_result
        from minivllm_engine import __version__

        print_result(f"minivllm {__version__}\n")
        raise typer.Exit


_COMMON = COMMON
_ENGINE = "Engine"
_SAMPLING = "Sampling"


@dataclass(frozen=True)
class CommonOptions(OptionGroup):
    """What every command takes."""

    config_paths: ClassVar[dict[str, str]] = {"progress": "output.progress"}

    config: Annotated[
        list[Path] | None,
        _option("--config", metavar="FILE", panel=_COMMON, help="YAML config; repeat to merge"),
    ] = None
    set_: Annotated[
        list[str] | None,
        _option("--set", metavar="KEY=VALUE", panel=_COMMON, help="Set one config key; repeatable"),
    ] = None
    print_config: Annotated[
        bool, _option("--print-config", panel=_COMMON, help="Print the config as YAML and leave")
    ] = False
    sources: Annotated[
        bool, _option("--sources", panel=_COMMON, help="With it: say where each value comes from")
    ] = False
    diff_defaults: Annotated[
        bool, _option("--diff-defaults", panel=_COMMON, help="With it: changed keys only")
    ] = False
    progress: Annotated[
        ProgressStyle | None,
        _option("--progress", panel=_COMMON, help="How progress is shown  [output.progress]"),
    ] = None
    quiet: Annotated[bool, _option("-q", "--quiet", panel=_COMMON, help="Errors only")] = False
    verbose: Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            show_default=False,
            metavar="",
            rich_help_panel=_COMMON,
            help="Show the engine's log; -vv for more",
        ),
    ] = 0
    debug: Annotated[bool, _option("--debug", panel=_COMMON, help="Show tracebacks")] = False
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=print_version,
            is_eager=True,
            show_default=False,
            rich_help_panel=_COMMON,
            help="Print the version and leave",
        ),
    ] = False


CacheDumpOption = Annotated[
    Path | None,
    _option(
        "--cache-dump",
        metavar="FILE",
        panel="Cache",
        help="Write what the prefix cache holds, at the end and at SIGUSR1, for inspect-cache FILE",
    ),
]

DeviceOption = Annotated[
    Device | None, _option("--device", panel=_ENGINE, help="Where to run  [engine.device]")
]


@dataclass(frozen=True)
class EngineFlags(OptionGroup):
    """Flags of the commands that run a model."""

    config_paths: ClassVar[dict[str, str]] = {
        "device": "engine.device",
        "dtype": "engine.dtype",
        "max_num_seqs": "engine.max_num_seqs",
        "max_model_len": "engine.max_model_len",
    }

    device: DeviceOption = None
    dtype: Annotated[
        str | None,
        _option(
            "--dtype", metavar="NAME", panel=_ENGINE, help="auto, fp32, bf16, fp16  [engine.dtype]"
        ),
    ] = None
    max_num_seqs: Annotated[
        str | None,
        _option(
            "--max-num-seqs",
            metavar="N",
            panel=_ENGINE,
            help="Most sequences that run at once  [engine.max_num_seqs]",
        ),
    ] = None
    max_model_len: Annotated[
        str | None,
        _option(
            "--max-model-len",
            metavar="N",
            panel=_ENGINE,
            help="Most tokens of prompt and answer; 32K works  [engine.max_model_len]",
        ),
    ] = None


@dataclass(frozen=True)
class SamplingFlags(OptionGroup):
    """How answers are sampled, where a request does not say so itself."""

    config_paths: ClassVar[dict[str, str]] = {
        "max_tokens": "sampling.max_tokens",
        "temperature": "sampling.temperature",
        "top_p": "sampling.top_p",
        "top_k": "sampling.top_k",
        "seed": "sampling.seed",
        "stop": "sampling.stop",
        "ignore_eos": "sampling.ignore_eos",
    }

    max_tokens: Annotated[
        str | None,
        _option(
            "--max-tokens",
            metavar="N",
            panel=_SAMPLING,
            help="Most tokens of an answer, 2048 if nothing says otherwise  [sampling.max_tokens]",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        _option("--temperature", panel=_SAMPLING, help="0 is greedy  [sampling.temperature]"),
    ] = None
    top_p: Annotated[
        float | None, _option("--top-p", panel=_SAMPLING, help="Nucleus sampling  [sampling.top_p]")
    ] = None
    top_k: Annotated[
        int | None,
        _option("--top-k", panel=_SAMPLING, help="Likeliest tokens kept  [sampling.top_k]"),
    ] = None
    seed: Annotated[
        int | None,
        _option("--seed", panel=_SAMPLING, help="Start of the random streams  [sampling.seed]"),
    ] = None
    stop: Annotated[
        list[str] | None,
        _option(
            "--stop",
            metavar="TEXT",
            panel=_SAMPLING,
            help="Text that ends an answer; repeatable  [sampling.stop]",
        ),
    ] = None
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos",
            show_default=False,
            rich_help_panel=_SAMPLING,
            help="Go on after the model's end token  [sampling.ignore_eos]",
        ),
    ] = None


@dataclass(frozen=True)
class ThinkFlags(OptionGroup):
    """Thinking, for templates that know `enable_thinking`. Two flags: a pair would let the last one win."""

    think: Annotated[
        bool, _option("--think", panel=_SAMPLING, help="Ask the chat template for thinking")
    ] = False
    no_think: Annotated[
        bool, _option("--no-think", panel=_SAMPLING, help="Ask the chat template for none")
    ] = False

    @property
    def enabled(self) -> bool | None:
        """What was asked for; None leaves it to the template.

        Raises:
            CliError: both flags were typed.
        """
        if self.think and self.no_think:
            raise CliError("--think and --no-think exclude each other")
        return True if self.think else False if self.no_think else None
