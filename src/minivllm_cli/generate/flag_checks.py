"""Which options of `generate` go together."""

from typing import Any

from minivllm_cli.batch.flags import GenerateFlags, InputFormat, OutputFormat
from minivllm_cli.errors import CliError


def check_combination(flags: GenerateFlags) -> None:
    """Refuse what contradicts itself, and what would be ignored.

    Raises:
        CliError: which flags, and what to use instead.
    """
    if (flags.input is None) == (flags.prompt is None):
        what = (
            "nothing to generate"
            if flags.input is None
            else "--prompt and --input exclude each other"
        )
        raise CliError(what, hint="--prompt TEXT, or --input FILE (- for stdin)")
    if flags.prompt == "":
        raise CliError("the prompt is empty", hint="--prompt TEXT")
    if flags.limit is not None and flags.limit < 1:
        raise CliError(f"--limit {flags.limit}: should be at least 1")
    for name, value in _only_for_input(flags):
        if value and flags.prompt is not None:
            raise CliError(f"{name} goes with --input")
    if flags.verify is not None and flags.verify < 1:
        raise CliError(f"--verify {flags.verify}: should be at least 1")
    if flags.verify is not None and flags.dry_run:
        raise CliError("--verify has no answers of a --dry-run to replay", hint="one of them")
    if flags.raw and flags.prompt is None:
        raise CliError("--raw goes with --prompt", hint="prompt lines are raw already")
    _check_output_flags(flags)


def check_thinking_flags(flags: GenerateFlags, think: bool | None) -> None:
    """Refuse `--think` and `--no-think` where no chat template is used.

    Raises:
        CliError: which flags, and what to use instead.
    """
    if think is None:
        return
    name = "--think" if think else "--no-think"
    if flags.raw:
        raise CliError(
            f"{name} is for the chat template, which --raw leaves out", hint="one of them"
        )
    if flags.input_format is InputFormat.TEXT and not flags.chat_template_for_prompts:
        raise CliError(
            f"{name} is for the chat template, and lines of --input-format text are raw",
            hint="--chat-template-for-prompts",
        )


def _check_output_flags(flags: GenerateFlags) -> None:
    if flags.json_ and flags.format is OutputFormat.TEXT:
        raise CliError("--json and --format text exclude each other", hint="one of them")
    if flags.json_ and flags.prompt is None and not flags.dry_run:
        raise CliError(
            "--json goes with --prompt or --dry-run",
            hint="drop it: records are JSON lines already; --summary FILE writes the figures",
        )
    if flags.separator is not None and not flags.writes_text:
        raise CliError("--separator goes with --format text", hint="--format text")
    for name, count in (
        ("--logprobs", flags.logprobs),
        ("--prompt-logprobs", flags.prompt_logprobs),
    ):
        if count is not None and flags.writes_text:
            raise CliError(f"{name} needs records to stand in", hint="--format jsonl")
    if flags.summary is not None and flags.dry_run:
        raise CliError("--summary has no figures of a --dry-run", hint="--dry-run --json")
    if flags.cache_dump is not None and flags.dry_run:
        raise CliError(
            "--cache-dump has nothing to hold after a --dry-run", hint="drop one of them"
        )
    if flags.streams_prompt:
        for name, given in (("--resume", flags.resume), ("--overwrite", flags.overwrite)):
            if given:
                raise CliError(f"{name} needs a regular file; stdout is none", hint="--output FILE")


def _only_for_input(flags: GenerateFlags) -> list[tuple[str, Any]]:
    return [
        ("--input-format", flags.input_format),
        ("--limit", flags.limit),
        ("--select", flags.select),
        ("--only-failed", flags.only_failed),
        ("--on-error", flags.on_error),
        ("--order", flags.order),
        ("--verify", flags.verify),
        ("--chat-template-for-prompts", flags.chat_template_for_prompts),
    ]
