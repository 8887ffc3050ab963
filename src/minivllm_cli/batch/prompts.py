"""What flags say about every request, and from a line to the token ids that the model gets."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from minivllm_cli.batch.flags import GenerateFlags, Truncate
from minivllm_cli.config.flags import ThinkFlags
from minivllm_cli.config.yaml import parse_value
from minivllm_cli.errors import CliError
from minivllm_engine.core.errors import EngineError, RequestError
from minivllm_engine.core.request import ReadyRequest, ReadyScore
from minivllm_engine.core.sampling_params import ResolvedSampling, SamplingParams
from minivllm_engine.core.structured import Structured
from minivllm_engine.core.suggest import suggest
from minivllm_engine.protocol.fields import plain_reason
from minivllm_engine.protocol.lines import RequestLine
from minivllm_engine.text.chat_template import switches_thinking
from minivllm_engine.text.continuations import read_score
from minivllm_engine.text.prompt import read_prompt

if TYPE_CHECKING:
    from minivllm_engine.text.tokenizer import Tokenizer

# A prompt that was cut to the limit itself would leave one token for the answer.
_MOST_ROOM = 4


@dataclass(frozen=True)
class Overrides:
    """What flags that have no config key say about every request.

    Attributes:
        think: for the template's `enable_thinking`; None leaves it to the template.
        defaults: sampling where a line says nothing.
        forced: sampling that beats the line's.
    """

    think: bool | None
    defaults: dict[str, Any]
    forced: dict[str, Any]

    @classmethod
    def read(cls, flags: GenerateFlags, think: ThinkFlags) -> "Overrides":
        """Take them from the command line.

        Raises:
            CliError: a parameter that does not exist, a wrong value, contradicting flags.
        """
        given = {"logprobs": flags.logprobs, "prompt_logprobs": flags.prompt_logprobs}
        defaults: dict[str, Any] = {k: count for k, count in given.items() if count is not None}
        for name, count in defaults.items():
            _check({name: count}, "--" + name.replace("_", "-"))
        form = _read_form(flags)
        if form is not None:
            defaults["structured"] = form
        forced = _read_forced(flags.force_param or [])
        _check(forced, "--force-param")
        return cls(think.enabled, defaults, forced)


def _read_form(flags: GenerateFlags) -> Structured | None:
    """The form that a flag asks for."""
    given = {
        "json_schema": flags.json_schema,
        "regex": flags.regex,
        "choice": flags.choice,
        "grammar": flags.grammar,
    }
    typed = {kind: value for kind, value in given.items() if value}
    names = ["--" + kind.replace("_", "-") for kind in typed]
    if len(names) > 1:
        raise CliError(f"{names[0]} and {names[1]} exclude each other", hint="one of them")
    if not typed:
        return None
    ((kind, value),) = typed.items()
    if isinstance(value, Path):
        try:
            value = value.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CliError(f"{names[0]} {typed[kind]}: cannot be read", why=str(error)) from None
    try:
        return Structured.read({kind: value})
    except ValueError as error:
        raise CliError(f"{names[0]}: {error}") from None


def check_thinking(think: bool | None, tokenizer: "Tokenizer", model: str) -> None:
    """Refuse `--think` and `--no-think` where nothing would come of them.

    Raises:
        CliError: the model's chat template has no such switch.
    """
    if think is None or switches_thinking(tokenizer):
        return
    flag = "--think" if think else "--no-think"
    raise CliError(
        f"{flag}: the chat template of {model} has no switch for thinking"
        if tokenizer.has_chat_template
        else f"{flag}: {model} has no chat template",
        hint=f"drop {flag}",
    )


def _read_forced(assignments: list[str]) -> dict[str, Any]:
    forced: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise CliError(f"--force-param {text}: not K=V", hint="--force-param temperature=0")
        if key not in SamplingParams.model_fields:
            near = suggest(key, SamplingParams.model_fields)
            what = f"--force-param {text}: unknown parameter {key}"
            raise CliError(what, hint=f"--force-param {near}={value}" if near else None)
        if key in forced:
            raise CliError(f"--force-param {key} is given twice")
        try:
            forced[key] = parse_value(value)
        except (yaml.YAMLError, RecursionError):
            raise CliError(f"--force-param {text}: the value is not YAML") from None
    return forced


def _check(values: dict[str, Any], flag: str) -> None:
    try:
        SamplingParams.create(**values)
    except RequestError as error:
        raise CliError(f"{flag}: {plain_reason(error.what)}", why=error.why) from None


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A prompt as it is sent. `truncated` tokens were cut out of it; `score` is what is asked of it, where
    that is no answer."""

    request: ReadyRequest
    truncated: int = 0
    score: ReadyScore | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        return self.request.prompt_ids


class PromptBuilder:
    """Applies the chat template, encodes, and cuts where that was asked for.

    Args:
        think: for the template's `enable_thinking`; None leaves it alone. A line's own value wins.
        template_for_prompts: a raw prompt of a JSON line becomes a user message.
        raw: a line of plain text does not.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        max_model_len: int,
        *,
        think: bool | None = None,
        template_for_prompts: bool = False,
        raw: bool = False,
        truncate: Truncate | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._kwargs = {} if think is None else {"enable_thinking": think}
        self._templated = {"prompt"} if template_for_prompts else set[str]()
        if tokenizer.has_chat_template and not raw:
            self._templated.add("text")
        self._truncate = truncate
        if tokenizer.has_chat_template:
            # Compiles the template now, before the clock of a request runs.
            tokenizer.answer_start([])

    def build(self, line: RequestLine, params: ResolvedSampling) -> BuiltPrompt:
        """Make the token ids of a line.

        Raises:
            RequestError: the chat template refuses the messages, or there is none; it cannot fit; an id is
                out of range; or a library fails over the text in whatever way.
        """
        limit = self._max_model_len if self._truncate is None else None
        self._check_params(params)
        try:
            mapping = self._as_mapping(line)
            if line.score:
                item = {key: value for key, value in mapping.items() if value is not None}
                score = read_score({**item, **line.score}, self._tokenizer, self._max_model_len)
                return BuiltPrompt(ReadyRequest(score.prompt_ids, params), score=score)
            ids, is_chat = read_prompt(mapping, self._tokenizer, limit)
        except (EngineError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic of a native library is no Exception
            reason = " ".join(str(error).split())[:200]
            raise RequestError(
                "the prompt cannot be read",
                why=f"{type(error).__name__}: {reason}",
                code="unreadable_prompt",
            ) from None
        return self._cut(ids, is_chat, params)

    def _check_params(self, params: ResolvedSampling) -> None:
        """Refuse ids that the engine would refuse, so that a dry run tells of them too."""
        limit = self._tokenizer.num_embeddings
        if limit is None:
            return
        for name in ("logit_bias", "stop_token_ids"):
            wrong = next((i for i in getattr(params, name) if not 0 <= i < limit), None)
            if wrong is not None:
                raise RequestError(
                    f"{name} id {wrong} is out of range", why=f"the model has ids 0 to {limit - 1}"
                )

    def is_too_long(self, prompt: BuiltPrompt) -> bool:
        """Say whether the engine would refuse it for its length."""
        if prompt.score is not None:
            return prompt.score.longest > self._max_model_len
        return len(prompt.ids) + 1 > self._max_model_len

    def _as_mapping(self, line: RequestLine) -> dict[str, Any]:
        if line.kind == "tokens":
            _refuse_extras(line)
            return {"prompt_token_ids": line.prompt}
        messages: Any = line.prompt
        if line.kind != "messages":
            if line.kind not in self._templated:
                _refuse_extras(line)
                return {"prompt": line.prompt}
            messages = [{"role": "user", "content": line.prompt}]
        kwargs = {**self._kwargs, **line.template_kwargs}
        return {"messages": messages, "tools": line.tools, "chat_template_kwargs": kwargs}

    def _cut(self, ids: list[int], is_chat: bool, params: ResolvedSampling) -> BuiltPrompt:
        limit = self._max_model_len
        if self._truncate is None or len(ids) + 1 <= limit:
            return BuiltPrompt(ReadyRequest(tuple(ids), params, is_chat))
        room = max(min(params.max_tokens, limit // _MOST_ROOM), 1)
        keep = max(limit - room, 1)
        cut = len(ids) - keep
        head = 0 if self._truncate is Truncate.LEFT else (keep + 1) // 2
        kept = (*ids[:head], *ids[head + cut :])
        return BuiltPrompt(ReadyRequest(kept, params, is_chat), cut)


def _refuse_extras(line: RequestLine) -> None:
    """Refuse what only a chat template could honour."""
    extras = [*line.template_kwargs, *(["tools"] if line.tools else [])]
    if extras:
        raise RequestError(f"{extras[0]}: no chat template is applied to this prompt")
