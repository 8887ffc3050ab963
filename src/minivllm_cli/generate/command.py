"""The command `generate`: which of its options go together, and from them to a run."""

from collections.abc import Iterator

import typer

from minivllm_cli.batch.flags import GenerateFlags, InputFormat, OutputFormat
from minivllm_cli.command import Invocation, command
from minivllm_cli.config.flags import EngineFlags, ModelArgument, SamplingFlags, ThinkFlags
from minivllm_cli.errors import CliError


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
        _refuse(_contradictions(flags))
        from minivllm_cli.batch.prompts import Overrides
        from minivllm_cli.config.typed_options import remedies_as_typed

        overrides = Overrides.read(flags, think)
        if overrides.think is not None:
            _refuse(_without_template(flags, "--think" if overrides.think else "--no-think"))
        with remedies_as_typed(settings):
            if flags.streams_prompt and not flags.dry_run:
                from minivllm_cli.generate.one_prompt import stream_prompt

                return stream_prompt(run, settings, flags, overrides)
            from minivllm_cli.batch.run import run_batch

            return run_batch(run, settings, flags, overrides)


# What is wrong if the first holds; then the message and the hint.
_Check = tuple[bool, str, str | None]


def _refuse(checks: Iterator[_Check]) -> None:
    for is_wrong, what, hint in checks:
        if is_wrong:
            raise CliError(what, hint=hint)


def _contradictions(flags: GenerateFlags) -> Iterator[_Check]:
    """What contradicts itself, and what would be ignored."""
    prompt = flags.prompt is not None
    both = "--prompt TEXT, or --input FILE (- for stdin)"
    yield not prompt and flags.input is None, "nothing to generate", both
    yield prompt and flags.input is not None, "--prompt and --input exclude each other", both
    yield flags.prompt == "", "the prompt is empty", "--prompt TEXT"
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
    raw = "prompt lines are raw already"
    yield flags.raw and not prompt, "--raw goes with --prompt", raw
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


def _without_template(flags: GenerateFlags, name: str) -> Iterator[_Check]:
    """Where no chat template is used, its switch would be ignored."""
    what = f"{name} is for the chat template, "
    yield flags.raw, what + "which --raw leaves out", "one of them"
    is_raw = flags.input_format is InputFormat.TEXT and not flags.chat_template_for_prompts
    hint = "--chat-template-for-prompts"
    yield is_raw, what + "and lines of --input-format text are raw", hint
