"""The options of `generate`."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from minivllm_cli.config.flags import CacheDumpOption, OptionGroup

_ESCAPES = {"n": "\n", "t": "\t", "0": "\0", "r": "\r", "\\": "\\"}


class InputFormat(StrEnum):
    """How lines are read."""

    AUTO = "auto"
    TEXT = "text"


class OutputFormat(StrEnum):
    """How answers are written."""

    JSONL = "jsonl"
    TEXT = "text"


class OnError(StrEnum):
    """What a bad line does to the run."""

    SKIP = "skip"
    STOP = "stop"


class Order(StrEnum):
    """In which order records stand."""

    INPUT = "input"
    COMPLETION = "completion"


class Resume(StrEnum):
    """What to do with an earlier run's journal."""

    AUTO = "auto"
    FORCE = "force"


class Truncate(StrEnum):
    """Where a prompt that is too long is cut."""

    LEFT = "left"
    MIDDLE = "middle"


def _option(*names: str, help: str, metavar: str | None = None, panel: str | None = None) -> Any:
    return typer.Option(
        *names, help=help, metavar=metavar, show_default=False, rich_help_panel=panel
    )


_INPUT, _OUTPUT, _PROMPT = "Input", "Output", "Prompts"


@dataclass(frozen=True)
class GenerateFlags(OptionGroup):
    """What only `generate` takes."""

    input: Annotated[
        str | None,
        _option("-i", "--input", metavar="FILE|-", panel=_INPUT, help="Prompts as JSON lines"),
    ] = None
    prompt: Annotated[
        str | None,
        _option("-p", "--prompt", metavar="TEXT", panel=_INPUT, help="One prompt; streamed"),
    ] = None
    input_format: Annotated[
        InputFormat | None,
        _option("--input-format", panel=_INPUT, help="text: one prompt a line"),
    ] = None
    limit: Annotated[
        int | None, _option("--limit", metavar="N", panel=_INPUT, help="The first N lines only")
    ] = None
    select: Annotated[
        list[str] | None,
        _option("--select", metavar="ID", panel=_INPUT, help="These lines only; repeatable"),
    ] = None
    only_failed: Annotated[
        Path | None,
        _option(
            "--only-failed",
            metavar="FILE",
            panel=_INPUT,
            help="Only lines whose records in FILE, an earlier output, are failures",
        ),
    ] = None
    on_error: Annotated[
        OnError | None,
        _option("--on-error", panel=_INPUT, help="stop: no run if the input has a bad line"),
    ] = None
    dry_run: Annotated[
        bool,
        _option(
            "--dry-run", panel=_INPUT, help="Look at the input; load no weights, write no file"
        ),
    ] = False
    output: Annotated[
        str | None,
        _option("-o", "--output", metavar="FILE|-", panel=_OUTPUT, help="Where records go"),
    ] = None
    format: Annotated[
        OutputFormat | None,
        _option("--format", panel=_OUTPUT, help="jsonl, or text: the answers alone"),
    ] = None
    separator: Annotated[
        str | None,
        _option(
            "--separator",
            metavar="TEXT",
            panel=_OUTPUT,
            help="Written after each answer of --format text; \\n is the default, \\0 is allowed",
        ),
    ] = None
    json_: Annotated[
        bool,
        _option("--json", panel=_OUTPUT, help="With --prompt: a record; with --dry-run: JSON"),
    ] = False
    order: Annotated[
        Order | None, _option("--order", panel=_OUTPUT, help="Order of the records")
    ] = None
    resume: Annotated[
        Resume | None,
        _option("--resume", panel=_OUTPUT, help="force: go on although the model changed"),
    ] = None
    overwrite: Annotated[
        bool, _option("--overwrite", panel=_OUTPUT, help="Start again and replace the output")
    ] = False
    summary: Annotated[
        Path | None,
        _option("--summary", metavar="FILE", panel=_OUTPUT, help="Write the figures as JSON"),
    ] = None
    logprobs: Annotated[
        int | None,
        _option(
            "--logprobs", metavar="K", panel=_OUTPUT, help="Logprobs of the K most likely tokens"
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        _option(
            "--prompt-logprobs",
            metavar="K",
            panel=_OUTPUT,
            help="Logprobs of the prompt's tokens too; such a request reuses no prefix",
        ),
    ] = None
    verify: Annotated[
        int | None,
        _option(
            "--verify",
            metavar="N",
            panel=_OUTPUT,
            help="Replay every Nth request that reused a prefix without it; exit 5 if one differs",
        ),
    ] = None
    strip_thinking: Annotated[
        bool, _option("--strip-thinking", panel=_OUTPUT, help="Leave reasoning out of records")
    ] = False
    raw: Annotated[
        bool, _option("--raw", panel=_PROMPT, help="Give --prompt to the model as it is")
    ] = False
    chat_template_for_prompts: Annotated[
        bool,
        _option(
            "--chat-template-for-prompts",
            panel=_PROMPT,
            help="Treat raw prompt lines as user messages",
        ),
    ] = False
    truncate: Annotated[
        Truncate | None,
        _option("--truncate", panel=_PROMPT, help="Cut prompts that are too long, at this place"),
    ] = None
    cache_dump: CacheDumpOption = None
    force_param: Annotated[
        list[str] | None,
        _option(
            "--force-param",
            metavar="K=V",
            panel=_PROMPT,
            help="Sampling that beats the line's own; repeatable",
        ),
    ] = None

    @property
    def writes_text(self) -> bool:
        """Are answers written alone, without their records?"""
        if self.format is not None:
            return self.format is OutputFormat.TEXT
        return self.prompt is not None and self.output in (None, "-") and not self.json_

    @property
    def streams_prompt(self) -> bool:
        """Is it one prompt whose answer goes to stdout as it comes?"""
        return self.prompt is not None and self.writes_text and self.output in (None, "-")

    @property
    def separator_bytes(self) -> bytes:
        """What ends each answer of `--format text`."""
        text = "\\n" if self.separator is None else self.separator
        chars: list[str] = []
        rest = iter(text)
        for char in rest:
            following = next(rest, "") if char == "\\" else None
            chars.append(char if following is None else _ESCAPES.get(following, "\\" + following))
        return "".join(chars).encode("utf-8", "replace")
