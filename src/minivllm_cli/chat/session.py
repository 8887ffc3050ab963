"""A chat in progress: its transcript, its settings, its engine, and what a turn does to them."""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from minivllm_cli import engine
from minivllm_cli.chat.context_limit import ContextLimit
from minivllm_cli.chat.prompts import Template, way_to_keep_thinking
from minivllm_cli.chat.saved_chat import SavedChat, TranscriptFile, header_row, message_rows
from minivllm_cli.chat.statistics import recompute_text, saved_figures
from minivllm_cli.chat.transcript import Message, ThinkingInHistory, Transcript
from minivllm_cli.config.config_file import Entry
from minivllm_cli.config.settings import Settings
from minivllm_cli.config.typed_options import option
from minivllm_engine.core.config import SamplingOptions
from minivllm_engine.core.errors import EngineError
from minivllm_engine.core.outputs import RequestOutput
from minivllm_engine.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm_engine.llm import LLM
    from minivllm_engine.memory.devices import DeviceMemory

SAMPLING_KEYS = tuple(SamplingOptions.model_fields)
_SEED_RANGE = 2**31


class StopFlag:
    """Set by a signal, looked at between two steps of the engine."""

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        self.requested = True


class Listener(Protocol):
    """Is shown the answer as it grows: each output once, in order."""

    def show(self, output: RequestOutput) -> None: ...


@dataclass
class Totals:
    """What this chat has cost so far. Undone turns count too."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def add(self, output: RequestOutput, seconds: float) -> None:
        self.answers += 1
        self.prompt_tokens += output.usage.prompt_tokens
        self.cached_tokens += output.usage.cached_tokens
        self.completion_tokens += output.usage.completion_tokens
        self.seconds += seconds


@dataclass
class Chat:
    """Owns the transcript; everybody else changes it by these methods.

    A turn that fails, or is stopped before its first token, leaves the transcript as it was.

    Attributes:
        model: name and hash, as they stand in saved files.
        settings: everything that was configured; `/set` and `/load` put entries on top.
        started_with: the settings of the command line.
        think: what the template is told of thinking; None tells it nothing.
        thinking_in_history: whether earlier thinking is sent again, and how.
        keep_kwargs: template arguments which that takes.
        saved: the transcript as it was last saved.
        log: the file of `--transcript`.
        between_steps: called while the engine is between two steps.
        device: as it was before the engine was on it.
    """

    llm: "LLM"
    model: Mapping[str, Any]
    settings: Settings
    started_with: Settings
    transcript: Transcript = Transcript()
    think: bool | None = None
    thinking_in_history: ThinkingInHistory = "drop"
    keep_kwargs: Mapping[str, Any] = field(default_factory=dict)
    saved: Transcript = Transcript()
    log: TranscriptFile | None = None
    totals: Totals = field(default_factory=Totals)
    last_output: RequestOutput | None = None
    between_steps: Callable[[], None] = lambda: None
    device: "DeviceMemory | None" = None

    @property
    def template(self) -> Template:
        """Return the chat template with what it is told at present."""
        kwargs = dict(self.keep_kwargs)
        if self.think is not None:
            kwargs["enable_thinking"] = self.think
        return Template(self.llm.tokenizer, kwargs, self.thinking_in_history)

    @property
    def context_limit(self) -> ContextLimit:
        return ContextLimit(
            tokens=self.llm.max_model_len,
            largest=self.llm.model_config.max_position_embeddings,
            fits=self._would_fit,
            option=partial(option, self.started_with, "engine.max_model_len"),
        )

    @property
    def num_unsaved_turns(self) -> int:
        """Count the turns that no file holds."""
        if self.log is not None:
            return 0
        new = self.transcript.messages[self.transcript.num_common(self.saved) :]
        return sum(message.role == "user" for message in new)

    def params(self, seed: int | None = None) -> SamplingParams:
        """Return how the next answer is sampled.

        Raises:
            RequestError: the seed is out of range.
        """
        values = {key: self.settings.resolved(f"sampling.{key}") for key in SAMPLING_KEYS}
        if seed is not None:
            values["seed"] = seed
        return SamplingParams.create(**values)

    def ask(
        self,
        history: Transcript,
        question: str,
        listener: Listener,
        stop: StopFlag,
        *,
        seed: int | None = None,
    ) -> RequestOutput:
        """Answer `question` after `history`, which becomes the transcript with both added.

        Raises:
            EngineError: the turn does not fit the context, or it or the engine failed.
        """
        template, asked = self.template, history.asked(question)
        template.check_length(asked, self.llm.max_model_len)
        self.context_limit.check(template, asked)
        output = self._run(_prompt(template, asked), self.params(seed), listener, stop)
        if not stopped_before_it_began(output):
            self.transcript = asked.answered(_message(output))
        return output

    def extend(self, listener: Listener, stop: StopFlag) -> RequestOutput:
        """Make the model go on with the last answer, which must have text.

        Raises:
            EngineError: the request was refused, or it or the engine failed.
        """
        answer = self.transcript.last_answer
        assert answer is not None and answer.content
        ids = self.llm.tokenizer.encode(self.template.continued(self.transcript))
        output = self._run({"prompt_token_ids": ids}, self.params(), listener, stop)
        if not stopped_before_it_began(output):
            more = _message(output)
            longer = replace(
                more, content=answer.content + more.content, reasoning=answer.reasoning
            )
            self.transcript = self.transcript.without_answer().answered(longer)
        return output

    def cost_of_history(self, transcript: Transcript) -> str:
        """Tell in words what the next turn has to compute before it comes to the new message.

        Raises:
            RequestError: the template refuses these messages.
        """
        template = self.template
        total = template.cost_of_history(transcript)
        if not total:
            return recompute_text(0, 0)
        # A history can be asked about with a question behind it only; where that begins, it ends.
        use = self.llm.cached_prefix(_prompt(template, transcript.asked("x")))
        return recompute_text(total, min(use.state_at, total))

    @property
    def drops_thinking(self) -> bool:
        """Tell whether thinking of earlier answers is not sent again, although it could be."""
        earlier = self.transcript.messages[:-1]
        return (
            self.thinking_in_history == "drop"
            and any(message.reasoning for message in earlier)
            and way_to_keep_thinking(self.llm.tokenizer) is not None
        )

    def put(self, key: str, value: Any, source: str) -> None:
        """Set a key of section `sampling`; None goes back to what the chat was started with."""
        path = f"sampling.{key}"
        entries = {p: entry for p, entry in self.settings.entries.items() if p != path}
        before = self.started_with.entries.get(path)
        entry = before if value is None else Entry(path, value, source)
        if entry is not None:
            entries[path] = entry
        self.settings = Settings(entries, self.settings.model_sampling)

    def draw_seed(self) -> None:
        """Choose a seed, so that answers differ from chat to chat and can still be repeated."""
        self.put("seed", secrets.randbelow(_SEED_RANGE), "drawn")

    def saved_form(self) -> SavedChat:
        """Return all that a file keeps: what somebody set, and the transcript."""
        settings: dict[str, Any] = {
            key: self.settings.get(f"sampling.{key}")
            for key in SAMPLING_KEYS
            if f"sampling.{key}" in self.settings.entries
        }
        settings = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
        settings["think"] = self.think
        settings["think_keep"] = self.thinking_in_history != "drop"
        return SavedChat(self.model, settings, self.transcript)

    def write_log(self) -> None:
        """Bring the transcript file up to date, if there is one.

        Raises:
            CliError: it cannot be written.
        """
        if self.log is not None:
            self.log.update(self.saved_form())

    def attach_to(self, error: BaseException) -> None:
        """Make the transcript a part of what a crash file will say of `error`."""
        saved = self.saved_form()
        document = header_row(saved) | {"messages": message_rows(saved.transcript)}
        error.add_note("transcript: " + json.dumps(document, ensure_ascii=False))

    def _run(
        self, prompt: Mapping[str, Any], params: SamplingParams, listener: Listener, stop: StopFlag
    ) -> RequestOutput:
        begun = time.monotonic()
        output = stream_answer(self.llm, prompt, params, listener, stop, self.between_steps)
        self.totals.add(output, time.monotonic() - begun)
        self.last_output = output
        return output

    def _would_fit(self, max_model_len: int) -> bool:
        path = "engine.max_model_len"
        entries = {**self.settings.entries, path: Entry(path, max_model_len, "")}
        try:
            engine.plan_memory(Settings(entries), self.llm.model_path, self.device)
        except EngineError:
            return False
        return True


def _prompt(template: Template, asked: Transcript) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": asked.for_engine(template.thinking)}
    if template.kwargs:
        prompt["chat_template_kwargs"] = dict(template.kwargs)
    return prompt


def stopped_before_it_began(output: RequestOutput) -> bool:
    interrupted = output.finish_reason == "abort"
    return interrupted and not output.text and not output.reasoning


def _message(output: RequestOutput) -> Message:
    return Message(
        "assistant",
        output.text,
        reasoning=output.reasoning or None,
        interrupted=output.finish_reason == "abort",
        finish_reason=str(output.finish_reason),
        stats=saved_figures(output),
    )


def stream_answer(
    llm: "LLM",
    prompt: Any,
    params: SamplingParams,
    listener: Listener,
    stop: StopFlag,
    between_steps: Callable[[], None] = lambda: None,
) -> RequestOutput:
    """Run one request to its end, or until `stop` is requested: then it ends within one step.

    The request is gone from the engine when this returns or raises.

    Raises:
        EngineError: the request was refused, or it or the engine failed.
    """
    request_id = llm.add_request(prompt, params)
    try:
        while not stop.requested:
            for output in llm.step():
                if output.request_id != request_id:
                    continue
                listener.show(output)
                if output.error is not None:
                    raise output.error
                if output.finished:
                    return output
            if not llm.has_unfinished:
                raise EngineError("the engine lost the request")
            between_steps()
        aborted = llm.abort(request_id)
        if aborted is None:
            raise EngineError("the engine lost the request")
        listener.show(aborted)
        return aborted
    finally:
        llm.abort(request_id)
