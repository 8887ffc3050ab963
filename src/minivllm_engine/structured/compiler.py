"""From a form to a matcher: compiled once, by one worker, within a time."""

import json
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from minivllm_engine.core.errors import RequestError
from minivllm_engine.core.structured import Structured
from minivllm_engine.structured.limits import check_limits
from minivllm_engine.structured.matcher import Matcher
from minivllm_engine.text.tokenizer import Tokenizer

TIME_LIMIT_S = 5.0
MOST_KEPT = 64
# A model that may write white space for ever does.
_SPACE = "[ \\n\\t]{0,24}"
_AFTER_THINKING = "start: GAP? @answer\nGAP: /\\n{1,2}/"


class Compiler:
    """Compiles forms for one tokenizer, and keeps the latest. Any thread may call it; one compiles at a time.

    Args:
        num_ids: that the model has; its tokenizer may have fewer or more.
        end_ids: that may end an answer.
        time_limit_s: for one form.
    """

    def __init__(
        self,
        num_ids: int,
        tokenizer: Tokenizer,
        end_ids: Iterable[int],
        *,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        self._tokenizer, self._end_ids = tokenizer, sorted(end_ids)
        self._num_ids = num_ids
        self._time_limit_s = time_limit_s
        self._kept: OrderedDict[tuple[Structured, bool], Matcher | RequestError] = OrderedDict()
        self._vocabulary: Any = None
        self._num_bytes = 0
        self._running: _Job | None = None
        self._compiling, self._looking = threading.Lock(), threading.Lock()

    def matcher(self, form: Structured, *, after_thinking: bool) -> Matcher:
        """Return a matcher at the start of an answer of this form.

        Args:
            after_thinking: one or two newlines may stand before it.

        Raises:
            RequestError: code `unsupported_schema`: the form is wrong, or has what cannot be held to;
                `grammar_too_slow`; `grammars_busy` while one that was too slow goes on;
                `structured_unavailable`: llguidance is not installed, or does not know the tokenizer.
        """
        key = (form, after_thinking)
        found = self._known(key)
        if found is None:
            with self._compiling:
                found = self._known(key)
                if found is None:
                    check_limits(form)
                    self._load()
                    found = self._compiled(form, after_thinking)
                    self._keep(key, found)
        if isinstance(found, RequestError):
            raise RequestError(found.what, why=found.why, code=found.code)
        return found.copy()

    def _known(self, key: tuple[Structured, bool]) -> Matcher | RequestError | None:
        with self._looking:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: tuple[Structured, bool], found: Matcher | RequestError) -> None:
        with self._looking:
            self._kept[key] = found
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)

    def _load(self) -> None:
        if self._vocabulary is not None:
            return
        try:
            import llguidance
        except ImportError:
            raise RequestError(
                "structured output needs llguidance",
                hint="pip install 'minivllm[structured]'",
                code="structured_unavailable",
            ) from None
        # Without an end id of the model's own one that it does not have stands for it.
        total = max(self._num_ids, self._tokenizer.largest_id + 1) + (not self._end_ids)
        self._num_bytes = -(-total // 32) * 4
        try:
            self._vocabulary = llguidance.LLTokenizer(
                self._tokenizer.to_json(),
                n_vocab=total,
                eos_token=self._end_ids or [total - 1],
            )
        except ValueError as error:
            raise RequestError(
                "structured: llguidance cannot read this model's tokenizer",
                why=str(error),
                code="structured_unavailable",
            ) from None

    def _compiled(self, form: Structured, after_thinking: bool) -> Matcher | RequestError:
        if self._running is not None and not self._running.done.is_set():
            # Not kept: it says nothing of this form.
            raise RequestError(
                "structured: a grammar before this one is still being compiled",
                code="grammars_busy",
            )
        self._running = job = _Job(lambda: _compile(self._vocabulary, form, after_thinking))
        if not job.done.wait(self._time_limit_s):
            return RequestError(
                f"structured: not compiled within {self._time_limit_s:g} s",
                code="grammar_too_slow",
            )
        found = job.result.get()
        if isinstance(found, str):
            return _unsupported(form, found)
        return Matcher(found, self._num_bytes)


class _Job:
    """One compilation on a thread of its own, which cannot be stopped and keeps no program from ending."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.done = threading.Event()
        self.result: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._work = work
        threading.Thread(target=self._run, name="grammar", daemon=True).start()

    def _run(self) -> None:
        try:
            self.result.put(self._work())
        except Exception as error:  # told as what the library says of a form
            self.result.put(str(error) or type(error).__name__)
        finally:
            self.done.set()


def _unsupported(form: Structured, why: str) -> RequestError:
    words = " ".join(why.replace("<non-verbose/>", "").split())
    return RequestError(
        f"structured: this {form.kind} is not supported", why=words[:400], code="unsupported_schema"
    )


def _compile(vocabulary: Any, form: Structured, after_thinking: bool) -> Any:
    """A matcher that has made its first mask, or what is wrong."""
    import llguidance

    # Beyond 50,000 hostile patterns took 8 ms and more a token; formats need 5,000.
    limits = llguidance.LLParserLimits(step_lexer_fuel=50_000, verbose_errors=False)

    def made_of(*grammars: Any) -> Any:
        text = json.dumps({"grammars": grammars})
        made = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits)
        if made.is_error():
            return made.get_error()
        # A circle of references is found out by the first mask only.
        probe = made.deep_copy()
        probe.compute_bitmask()
        return probe.get_error() if probe.is_error() else made

    grammar = _grammar(form)
    alone = made_of(grammar)
    if not after_thinking or isinstance(alone, str):
        return alone
    first = {"name": "start", "lark_grammar": _AFTER_THINKING}
    return made_of(first, {**grammar, "name": "answer"})


def _grammar(form: Structured) -> Any:
    from llguidance import LLMatcher, grammar_from

    if form.kind in ("json_schema", "json_object"):
        schema = json.loads(form.text) if form.text else {"type": "object"}
        if schema is False:
            raise ValueError("no answer satisfies it")
        schema = {} if schema is True else schema
        # Options in the schema could let keywords be dropped; ours take their place.
        return {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": _SPACE}}}
    if form.kind == "regex":
        return json.loads(LLMatcher.grammar_from_regex(form.text))["grammars"][0]
    format = "choice" if form.kind == "choice" else "grammar"
    return {"lark_grammar": grammar_from(format, form.text)}
