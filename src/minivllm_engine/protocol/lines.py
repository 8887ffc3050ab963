"""What a line of the input becomes: a request, or the reason why it is none."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from minivllm_engine.core.sampling_params import ResolvedSampling, SamplingParams

LineKind = Literal["messages", "prompt", "tokens", "text"]


@dataclass(frozen=True, slots=True)
class BatchLine:
    """What an OpenAI batch line needs for an answer in its own shape."""

    custom_id: str | None
    url: str
    model: str | None


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A line that can be run.

    Attributes:
        number: line number in the file, from 1; None for `--prompt`.
        index: its place among the lines that are not blank, from 0.
        prompt: text, messages or token ids; several of them where a batch line has an array of prompts.
        params: the line's own sampling; None where it says nothing.
        template_kwargs: the line's own arguments to the chat template.
        meta: keys that are not ours; copied to the record.
        score: the keys of `LLM.score` beside the prompt; {} where an answer is sampled.
    """

    number: int | None
    index: int
    id: str | int
    kind: LineKind
    prompt: str | list[Any]
    params: SamplingParams
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    batch: BatchLine | None = None
    score: dict[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> "list[RequestLine]":
        """Itself, or a line for each of its prompts."""
        if self.kind != "prompt" or isinstance(self.prompt, str):
            return [self]
        return [
            replace(self, kind="prompt" if isinstance(one, str) else "tokens", prompt=one)
            for one in self.prompt
        ]

    @property
    def num_sequences(self) -> int:
        """Outputs that it asks for."""
        several = self.kind == "prompt" and not isinstance(self.prompt, str)
        return self.params.n * (len(self.prompt) if several else 1)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be run, and why."""

    number: int | None
    index: int
    id: str | int
    code: str
    message: str
    column: int = 1
    hint: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    batch: BatchLine | None = None


Line = RequestLine | BadLine


@dataclass(frozen=True, slots=True)
class Job:
    """A line on its way: its place in the run, its journal key, the sampling in force."""

    position: int
    line: Line
    key: str
    params: ResolvedSampling | None = None


class LineProblem(Exception):
    """What is wrong with a line, on its way to a BadLine."""

    def __init__(self, code: str, message: str, *, key: str | None = None, hint: str | None = None):
        super().__init__(message)
        self.code = code
        self.message = message
        self.key = key
        self.hint = hint
