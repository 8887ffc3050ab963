"""`minivllm serve`: its options, and what is checked before the model is loaded."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

from minivllm_cli.command import Invocation, command
from minivllm_cli.config.flags import (
    EngineFlags,
    ModelArgument,
    OptionGroup,
    SamplingFlags,
    flag,
    switch,
)
from minivllm_cli.console.progress import loading_progress, make_reporter
from minivllm_cli.errors import CliError, ExitCode
from minivllm_cli.startup import configure
from minivllm_engine.core.units import parse_size

if TYPE_CHECKING:
    from minivllm_cli.config.settings import Settings

_KEY_VARIABLE = "MINIVLLM_API_KEY"


@dataclass(frozen=True)
class ServeFlags(OptionGroup):
    """Flags of `serve` alone."""

    panel: ClassVar[str] = "Server"

    host: str = flag("Address to listen on", default="127.0.0.1", metavar="HOST")
    port: int = flag("Port to listen on; 0: one that is free", default=8000, metavar="N")
    api_key: list[str] | None = flag(
        f"Key that requests must bring, or @FILE; repeatable; else ${_KEY_VARIABLE}",
        metavar="KEY",
    )
    served_model_name: list[str] | None = flag(
        "Name of the model for clients; repeatable; else that of its directory", metavar="NAME"
    )
    max_waiting: int = flag(
        "Outputs that may wait before requests are turned away", default=256, metavar="N"
    )
    max_body: str = flag("Largest request", default="8MiB", metavar="SIZE")
    shutdown_timeout: float = flag(
        "Seconds that running requests get after the first signal", default=30.0, metavar="S"
    )
    insecure: bool = switch("Listen on other addresses than loopback without a key")


def register(app: typer.Typer) -> None:
    """Add `serve` to the application."""

    @command(app, "serve")
    def serve(
        run: Invocation,
        model: ModelArgument = None,
        *,
        flags: ServeFlags,
        sampling: SamplingFlags,
        engine: EngineFlags,
    ) -> int:
        """Serve a model over HTTP, as OpenAI's API: chat and text completions, streamed or whole.

        minivllm serve demo --port 8000
        """
        settings = configure(run, model, sampling, engine)
        return ExitCode.OK if settings is None else _serve(run, settings, flags)


def _serve(run: Invocation, settings: "Settings", flags: ServeFlags) -> int:
    keys = _keys(flags)
    try:
        from minivllm_cli.serve.lifecycle import Options, listen, serve
        from minivllm_cli.serve.service import Limits
    except ModuleNotFoundError as error:
        raise CliError(
            f"serve needs the package {error.name}", hint="pip install 'minivllm[serve]'"
        ) from None
    from minivllm_cli import engine

    limits = Limits(body=_size(flags.max_body), waiting=flags.max_waiting)
    run.interrupts.activity = "looking at the model"
    prepared = engine.prepare_model(settings)
    settings = settings.with_model_sampling(prepared.generation_config.sampling)
    name = "demo" if settings.model == "demo" else prepared.path.name
    options = Options(
        host=flags.host,
        port=flags.port,
        names=flags.served_model_name or [name],
        keys=keys,
        limits=limits,
        shutdown_timeout=flags.shutdown_timeout,
        max_tokens=settings.engine_config.sampling.max_tokens
        or prepared.generation_config.sampling.max_tokens,
    )
    if not options.loopback and not keys and not flags.insecure:
        raise CliError(
            f"--host {flags.host}: whoever reaches this address could use the model",
            hint="--api-key KEY, or --insecure if the network is to be trusted",
        )
    opened = listen(flags.host, flags.port)
    run.interrupts.activity = "loading the model"
    begun = time.monotonic()
    reporter = make_reporter(settings.output.progress, run.console)
    with opened:
        try:
            with run.interrupts.deferred(), loading_progress(reporter, run.interrupts) as show:
                llm = engine.open_engine(prepared, show)
        finally:
            reporter.close()
        with llm:
            run.interrupts.check()
            run.console.note(f"loaded in {time.monotonic() - begun:.1f} s")
            serve(llm, options, opened, run.console)
    return ExitCode.OK


def _keys(flags: ServeFlags) -> list[str]:
    given = flags.api_key or [os.environ.get(_KEY_VARIABLE, "")]
    keys = []
    for key in given:
        if key.startswith("@"):
            try:
                key = Path(key[1:]).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise CliError(f"--api-key {key}: cannot be read: {error}") from None
        if flags.api_key and not key:
            raise CliError("--api-key: the key is empty")
        keys += [key] if key else []
    return keys


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise CliError(f"--max-body {text}: {error}", hint="--max-body 8MiB") from None
