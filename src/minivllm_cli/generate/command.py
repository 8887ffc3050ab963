"""The command `generate`: which of its options go together, and from them to a run."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import typer

from minivllm_cli.batch.flags import GenerateFlags, InputFormat, OutputFormat
from minivllm_cli.command import Invocation, command
from minivllm_cli.config.flags import EngineFlags, ModelArgument, SamplingFlags, ThinkFlags
from minivllm_cli.errors import CliError

_INPUTS = "--prompt TEXT, or --input FILE (- for stdin)"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "generate")
    def generate(
        run: Invocation,
        model: ModelArgument = None,
        *,
        flags: GenerateFlags,
        sampling: SamplingFlags,
        think: ThinkFlags,
        engine: EngineFlags,
    ) -> int:
        """Answer the prompts of a file or a pipe, or one from the command line.

        minivllm generate demo --prompt "Define aardvark."

        minivllm generate ./model --input prompts.jsonl --output out.jsonl

        cat prompts.jsonl | minivllm generate ./model -i - | jq -r '.outputs[0].text'
        """
        from minivllm_cli.startup import configure

        settings = configure(run, model, engine, sampling, as_json=flags.json_)
        if settings is None:
            return 0
        _refuse_text_as_model(model)
        flags = _with_prompt(flags)
        from minivllm_cli.batch.prompts import Overrides
        from minivllm_cli.config.typed_options import remedies_as_typed

        overrides = Overrides.read(flags, think)
        if overrides.think is not None and flags.raw:
            name = "--think" if overrides.think else "--no-think"
            raise CliError(
                f"{name} is for the chat template, which --raw leaves out", hint="one of them"
            )
        with remedies_as_typed(settings):
            if flags.streams_prompt and not flags.dry_run:
                from minivllm_cli.generate.one_prompt import stream_prompt

                return stream_prompt(run, settings, flags, overrides)
            from minivllm_cli.batch.run import run_batch

            return run_batch(run, settings, flags, overrides)


def _refuse_text_as_model(model: str | None) -> None:
    if model is not None and len(model.split()) > 1 and not Path(model).is_dir():
        raise CliError(
            f"{model!r} is no model: MODEL stands there, and -p takes text",
            hint=f"minivllm generate demo -p {shlex.quote(model)}",
        )


def _with_prompt(flags: GenerateFlags) -> GenerateFlags:
    """The flags with the text that `--prompt` means; without any input, a pipe is the prompt."""
    from minivllm_cli.files.input_file import read_piped_text, read_text

    if flags.prompt is None and flags.input is None:
        flags = replace(flags, prompt=read_piped_text())
        _refuse(_contradictions(flags))
        return flags
    _refuse(_contradictions(flags))
    if flags.prompt is not None:
        flags = replace(flags, prompt=read_text("--prompt", flags.prompt))
        if not flags.prompt:
            raise CliError("the prompt is empty", hint=_INPUTS)
    return flags


# What is wrong if the first holds; then the message and the hint.
_Check = tuple[bool, str, str | None]


def _refuse(checks: Iterator[_Check]) -> None:
    for is_wrong, what, hint in checks:
        if is_wrong:
            raise CliError(what, hint=hint)


def _contradictions(flags: GenerateFlags) -> Iterator[_Check]:
    """What contradicts itself, and what would be ignored."""
    prompt = flags.prompt is not None
    yield not prompt and flags.input is None, "nothing to generate", _INPUTS
    yield prompt and flags.input is not None, "--prompt and --input exclude each other", _INPUTS
    for name, count in (("--limit", flags.limit), ("--verify", flags.verify)):
        yield count is not None and count < 1, f"{name} {count}: should be at least 1", None
    for name, value in (
        ("--input-format", flags.input_format),
        ("--limit", flags.limit),
        ("--select", flags.select),
        ("--only-failed", flags.only_failed),
        ("--on-error", flags.on_error),
        ("--order", flags.order),
        ("--verify", flags.verify),
        ("--chat-template-for-prompts", flags.chat_template_for_prompts),
    ):
        yield prompt and bool(value), f"{name} goes with --input", None
    is_idle = flags.raw and not prompt and flags.input_format is not InputFormat.TEXT
    what = "--raw goes with --prompt or --input-format text"
    yield is_idle, what, "prompt lines of JSON are raw already"
    both = flags.raw and flags.chat_template_for_prompts
    yield both, "--raw and --chat-template-for-prompts exclude each other", "one of them"
    for name, value, what, hint in (
        ("--verify", flags.verify, "has no answers of a --dry-run to replay", "one of them"),
        ("--summary", flags.summary, "has no figures of a --dry-run", "--dry-run --json"),
        (
            "--cache-dump",
            flags.cache_dump,
            "has nothing to hold after a --dry-run",
            "drop one of them",
        ),
    ):
        yield value is not None and flags.dry_run, f"{name} {what}", hint
    as_text = flags.format is OutputFormat.TEXT
    yield flags.json_ and as_text, "--json and --format text exclude each other", "one of them"
    records = "drop it: records are JSON lines already; --summary FILE writes the figures"
    is_idle = flags.json_ and not prompt and not flags.dry_run
    yield is_idle, "--json goes with --prompt or --dry-run", records
    is_idle = flags.separator is not None and not flags.writes_text
    yield is_idle, "--separator goes with --format text", "--format text"
    for name, count in (
        ("--logprobs", flags.logprobs),
        ("--prompt-logprobs", flags.prompt_logprobs),
    ):
        what = f"{name} needs records to stand in"
        yield count is not None and flags.writes_text, what, "--format jsonl"
    for name, given in (("--resume", bool(flags.resume)), ("--overwrite", flags.overwrite)):
        what = f"{name} needs a regular file; stdout is none"
        yield flags.streams_prompt and given, what, "--output FILE"
