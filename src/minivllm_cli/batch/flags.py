"""The options of `generate`."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from minivllm_cli.config.flags import OptionGroup, cache_dump_flag, flag, switch, unescape


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


_INPUT, _OUTPUT, _PROMPT = "Input", "Output", "Prompts"


@dataclass(frozen=True)
class GenerateFlags(OptionGroup):
    """What only `generate` takes."""

    input: str | None = flag("Prompts as JSON lines", short="-i", metavar="FILE|-", panel=_INPUT)
    prompt: str | None = flag(
        "One prompt, or @FILE, or - for stdin; streamed", short="-p", metavar="TEXT"
    )
    input_format: InputFormat | None = flag("text: each line is a message")
    limit: int | None = flag("The first N lines only", metavar="N")
    select: list[str] | None = flag("These lines only; repeatable", metavar="ID")
    only_failed: Path | None = flag(
        "Only lines whose records in FILE, an earlier output, are failures", metavar="FILE"
    )
    on_error: OnError | None = flag("stop: no run if the input has a bad line")
    dry_run: bool = switch("Look at the input; load no weights, write no file")
    output: str | None = flag("Where records go", short="-o", metavar="FILE|-", panel=_OUTPUT)
    format: OutputFormat | None = flag("jsonl, or text: the answers alone")
    separator: str | None = flag(
        "Written after each answer of --format text; \\n is the default, \\0 is allowed",
        metavar="TEXT",
    )
    json_: bool = switch("With --prompt: a record; with --dry-run: JSON")
    order: Order | None = flag("Order of the records")
    resume: Resume | None = flag("force: go on although the model changed")
    overwrite: bool = switch("Start again and replace the output")
    summary: Path | None = flag("Write the figures as JSON", metavar="FILE")
    logprobs: int | None = flag("Logprobs of the K most likely tokens", metavar="K")
    prompt_logprobs: int | None = flag(
        "Logprobs of the prompt's tokens too; such a request reuses no prefix", metavar="K"
    )
    verify: int | None = flag(
        "Replay every Nth request that reused a prefix without it; exit 5 if one differs",
        metavar="N",
    )
    strip_thinking: bool = switch("Leave reasoning out of records")
    raw: bool = switch("No chat template for --prompt and --input-format text", panel=_PROMPT)
    chat_template_for_prompts: bool = switch("Treat raw prompt lines as user messages")
    json_schema: Path | None = flag("The answer satisfies this JSON schema", metavar="FILE")
    regex: str | None = flag("The answer matches this regular expression", metavar="REGEX")
    choice: list[str] | None = flag("The answer is one of these; repeatable", metavar="TEXT")
    grammar: Path | None = flag("The answer follows this grammar, Lark or GBNF", metavar="FILE")
    truncate: Truncate | None = flag("Cut prompts that are too long, at this place")
    force_param: list[str] | None = flag(
        "Sampling that beats the line's own; repeatable", metavar="K=V"
    )
    cache_dump: Path | None = cache_dump_flag()

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
        text = "\n" if self.separator is None else unescape(self.separator)
        return text.encode("utf-8", "replace")
