"""The scripted stand-in for `LLM`: real tokenizer, detokenizer and requests, scripted answers. No torch.

The last line of a prompt's last message (or of its raw text) is its script:

    say TEXT, echo TEXT  TEXT
    count N              "1 2 3 ... N"
    lines N              N numbered lines with an emoji
    seeded               a text that depends on the seed, and on the number of the output
    forever              "ab" without end
    nothing              an empty answer
    think A | B          thinks A (the template has opened `<think>`), then answers B
    emoji                smileys, four bytes and so four tokens each
    noise                writes to descriptor 1 as a C library would, and says "quiet"
    controls             a text with control characters
    drifts               "warm" where a prefix was reused, "cold" where none was: a broken cache
    blurs                as a cache that changes logits, but no token
    ties                 another token where a prefix was reused, as likely as the one without
    nan                  the request ends with an error of its own
    crash                the engine as a whole fails in that step

Others make it theirs by a subclass: `script_of` finds the script, `reply` says its text, `next_token` chooses
a token, `before_step` takes time.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from minivllm_cli.config.settings import Settings
from minivllm_engine.core.errors import EngineError, RequestError
from minivllm_engine.core.outputs import (
    CacheUse,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    TokenLogprob,
)
from minivllm_engine.core.request import ReadyRequest, Request
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.core.stats import EngineStats
from minivllm_engine.engine.output_processor import RequestState
from minivllm_engine.text.prompt import read_prompt
from minivllm_engine.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 4096
BLOCK = 64


@dataclass(slots=True)
class Pace:
    """How fast a FakeLLM is, in seconds and tokens.

    Attributes:
        step, add, admit: a step; reading a prompt; from the begin of a step until it lets requests in.
        tokens, prefill: output tokens of a sequence in a step; prompt tokens of one.
        stuck: a step does not come back for a signal, as a kernel would not.
        fails_at: the step, from 1, in which the engine as a whole fails.
    """

    step: float = 0.0
    add: float = 0.0
    admit: float = 0.0
    tokens: int = 8
    prefill: int = 512
    stuck: bool = False
    fails_at: int | None = None

    @classmethod
    def from_environ(cls) -> Self:
        """Read FAKE_{STEP,ADD,ADMIT}_SECONDS, FAKE_TOKENS, FAKE_STUCK and FAKE_FAILS_AT."""
        seconds = {
            name: float(os.environ.get(f"FAKE_{name.upper()}_SECONDS", "0"))
            for name in ("step", "add", "admit")
        }
        tokens = int(os.environ.get("FAKE_TOKENS", "8"))
        fails_at = int(os.environ.get("FAKE_FAILS_AT", "0")) or None
        stuck = "FAKE_STUCK" in os.environ
        return cls(**seconds, tokens=tokens, stuck=stuck, fails_at=fails_at)

    def sleep(self, seconds: float) -> None:
        """Wait, deaf to signals if stuck."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                time.sleep(left)
            except KeyboardInterrupt:
                if not self.stuck:
                    raise


class PrefixMemory:
    """A prefix cache without states: it only remembers prompts, in blocks of 64 tokens."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, ...]] = []

    def find(self, ids: Sequence[int]) -> CacheUse:
        """What earlier prompts left for this one. Changes nothing."""
        best = (len(ids) - 1) // BLOCK * BLOCK
        if not best:
            return CacheUse(miss_reason="below_granularity")
        shared = max((_num_common(ids, seen) for seen in self._seen), default=0)
        start = min(shared // BLOCK * BLOCK, best)
        return CacheUse(start, start, start, None if start == best else "new_prefix")

    def keep(self, ids: Sequence[int]) -> None:
        self._seen.append(tuple(ids))


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


@dataclass(slots=True)
class FakeSequence:
    """One output on its way."""

    request: Request
    state: RequestState
    script: str
    tokens: Iterator[int]


class FakeLLM:
    """Runs at most `engine.max_num_seqs` sequences, in order of arrival.

    Args:
        log: a file that gets a line of JSON for each request, step (with `pace.admit`) and the end.
    """

    def __init__(
        self,
        settings: Settings,
        model_path: Path,
        pace: Pace | None = None,
        log: str | Path | None = None,
    ) -> None:
        engine = settings.engine_config.engine
        self.model_path = model_path
        self.tokenizer = Tokenizer.from_dir(model_path)
        self.max_model_len = engine.max_model_len or MAX_MODEL_LEN
        self.max_num_seqs = engine.max_num_seqs or 256
        self.config = SimpleNamespace(
            engine=SimpleNamespace(max_num_seqs=self.max_num_seqs, dtype="fp32", state_dtype="fp32")
        )
        self.pace = pace or Pace()
        self.memory = PrefixMemory()
        self._settings, self._log = settings, log
        self._states: dict[str, RequestState] = {}
        self._waiting: list[FakeSequence] = []
        self._running: list[FakeSequence] = []
        self._bound = Counter[str]()
        self._num_arrived = self._num_steps = self._peak = 0
        self._in_tokens = self._out_tokens = 0

    # -- what a subclass makes its own -----------------------------------------------------------

    def script_of(self, ids: Sequence[int], is_chat: bool) -> str:
        """Find the script in a prompt."""
        text = self.tokenizer.decode(ids)
        turns = text.split("user\n")
        last = turns[-1].split("assistant\n")[0] if len(turns) > 1 else text
        return last.strip("\n").split("\n")[-1]

    def reply(self, script: str, request: Request) -> Iterator[str]:
        """Say the answer, in pieces."""
        return scripted_reply(script, request)

    def next_token(self, sequence: FakeSequence) -> int:
        """Choose the next token of a sequence whose prompt was read."""
        return next(sequence.tokens)

    def before_step(self) -> None:
        """Take the time of a step."""
        self.pace.sleep(self.pace.step)

    def cache_use(self, request: Request) -> CacheUse:
        """Say what a request reuses."""
        if not request.params.prefix_cache:
            return CacheUse(miss_reason="disabled")
        use = self.memory.find(request.prompt_ids)
        self.memory.keep(request.prompt_ids)
        return use

    # -- the surface of LLM ----------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        return bool(self._states)

    @property
    def running_ids(self) -> frozenset[str]:
        return frozenset(sequence.request.request_id for sequence in self._running)

    def add_request(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        counted: bool = True,
    ) -> str:
        if isinstance(prompt, ReadyRequest):
            ids, is_chat, sampling = list(prompt.prompt_ids), prompt.chat, prompt.params
        else:
            ids, is_chat = read_prompt(prompt, self.tokenizer)
            sampling = self._settings.sampling(params)
        if not ids:
            raise RequestError("the prompt is empty", code="empty_prompt")
        if len(ids) + 1 > self.max_model_len:
            raise RequestError(
                f"{len(ids)} prompt tokens + 1 > max_model_len {self.max_model_len}",
                code="prompt_too_long",
            )
        request_id = request_id or f"fake-{self._num_arrived}"
        assert request_id not in self._states
        longest = min(len(ids) + sampling.max_tokens, self.max_model_len)
        requests = [
            Request(request_id, tuple(ids), sampling, self._num_arrived + i, i, longest)
            for i in range(sampling.n)
        ]
        for request in requests:
            request.cache_use = self.cache_use(request)
        self._num_arrived += len(requests)
        end_ids = frozenset() if sampling.ignore_eos else frozenset(self.tokenizer.eos_ids)
        state = RequestState(request_id, requests, self.tokenizer, end_ids, split_reasoning=is_chat)
        self._states[request_id] = state
        script = self.script_of(ids, is_chat)
        for request in requests:
            tokens = self._tokens(script, request)
            self._waiting.append(FakeSequence(request, state, script, tokens))
        self.log({"add": list(ids), "script": script, "params": asdict(sampling)})
        self.pace.sleep(self.pace.add)
        return request_id

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        request_id = self.add_request(prompt, params)
        try:
            while request_id in self._states:
                yield from self.step()
        finally:
            self.abort(request_id)

    def step(self) -> list[RequestOutput]:
        if self.pace.admit:
            self.log({"step": self._num_steps})
            self.pace.sleep(self.pace.admit)
        while self._waiting and len(self._running) < self.max_num_seqs:
            self._running.append(self._waiting.pop(0))
        if not self._running:
            return []
        self._bound["state slots"] += bool(self._waiting)
        self._num_steps += 1
        self._peak = max(self._peak, len(self._running))
        self.before_step()
        if self._num_steps == self.pace.fails_at:
            raise RuntimeError("the fan fell off")
        for sequence in list(self._running):
            self._advance(sequence)
        told = {id(s.state): s.state for s in self._running}
        outputs = [state.snapshot() for state in told.values()]
        self._running = [s for s in self._running if s.request in s.state.requests]
        for output in outputs:
            if output.finished:
                del self._states[output.request_id]
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        self._running = [s for s in self._running if s.state is not state]
        self._waiting = [s for s in self._waiting if s.state is not state]
        state.end_all(FinishReason.ABORT)
        return state.snapshot()

    def cached_prefix(self, prompt: Any) -> CacheUse:
        return self.memory.find(read_prompt(prompt, self.tokenizer)[0])

    def clear_cache(self) -> None:
        self.memory = PrefixMemory()

    def stats(self) -> EngineStats:
        blocks = sum(-(-s.request.num_tokens // BLOCK) for s in self._running)
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_blocks_used=blocks,
            kv_blocks_total=12_800,
            kv_blocks_peak=blocks,
            state_slots_used=len(self._running),
            state_slots_total=self.max_num_seqs,
            state_slots_peak=self._peak,
            num_preemptions=0,
            num_steps=self._num_steps,
            prompt_tokens_computed=self._in_tokens,
            output_tokens=self._out_tokens,
            bound_by="state slots" if self._waiting else None,
            bound_steps=dict(self._bound),
            snapshots_used=1,
            snapshots_peak=2,
            snapshots_total=32,
            restored_tokens=5,
        )

    def close(self) -> None:
        self._states.clear()
        self.log({"closed": True})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------

    def log(self, entry: dict[str, Any]) -> None:
        """Tell a test what the engine saw."""
        if self._log:
            with open(self._log, "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def _tokens(self, script: str, request: Request) -> Iterator[int]:
        for piece in self.reply(script, request):
            yield from self.tokenizer.encode(piece)
        while True:  # a model that ignores its end id goes on
            yield self.tokenizer.eos_ids[0]

    def _advance(self, sequence: FakeSequence) -> None:
        request, state = sequence.request, sequence.state
        state.mark_started()
        if sequence.script == "crash":
            raise RuntimeError("the fan fell off")
        prompt_len = len(request.prompt_ids)
        if request.num_computed_tokens < prompt_len:
            chunk = min(self.pace.prefill, prompt_len - request.num_computed_tokens)
            request.num_computed_tokens += chunk
            self._in_tokens += chunk
            if request.num_computed_tokens < prompt_len:
                return
            if request.params.prompt_logprobs is not None and not request.index:
                request.prompt_logprobs = [
                    _position(token, request.params.prompt_logprobs)
                    for token in request.prompt_ids[1:]
                ]
        if sequence.script == "nan":
            error = EngineError("the logits are not finite", code="non_finite_logits")
            state.end_all(FinishReason.ERROR, error)
            return
        for _ in range(self.pace.tokens):
            token = self.next_token(sequence)
            request.output_ids.append(token)
            request.num_computed_tokens += 1
            self._out_tokens += 1
            logprobs = _logprobs(request, token, sequence.script)
            if state.add_token(request, token, logprobs) is not None:
                return


def scripted_reply(script: str, request: Request) -> Iterator[str]:
    """Say the text of a script; one that is none is told back as "<script>"."""
    word, _, rest = script.partition(" ")
    match word:
        case "say" | "echo":
            yield rest
        case "count":
            yield " ".join(map(str, range(1, int(rest) + 1)))
        case "lines":
            yield "\n".join(f"line {i} 🙂" for i in range(1, int(rest) + 1))
        case "seeded":
            yield f"seed {request.params.seed} output {request.index}"
        case "forever":
            while True:
                yield "ab"
        case "nothing":
            yield ""
        case "think":
            thought, _, answer = rest.partition(" | ")
            yield f"{thought}</think>\n\n{answer}" if answer else thought
        case "emoji":
            yield "🙂🙃" * 3
        case "drifts":
            yield "warm" if _is_warm(request) else "cold"
        case "blurs":
            yield "same"
        case "ties":
            yield "A" if _is_warm(request) else "B"
        case "noise":
            os.write(1, b"noise\n")
            yield "quiet"
        case "controls":
            yield "a\x1b[2Jb\x07\x9bc\tend"
        case _:
            yield f"<{script}>"


def _logprobs(request: Request, token: int, script: str) -> PositionLogprobs | None:
    wanted = request.params.logprobs
    if wanted is None:
        return None
    if script == "ties" and wanted > 1:
        # "A" and "B", which of the two is a hair likelier depends on the cache.
        ids = [token, ord("A") + ord("B") - token]
        top = [TokenLogprob(ids[0], -0.5, 1), TokenLogprob(ids[1], -0.50005, 2)]
        return PositionLogprobs(top[0], tuple(top))
    blurred = script == "blurs" and _is_warm(request)
    return _position(token, wanted, -0.5 - 0.25 * blurred)


def _position(token: int, wanted: int, logprob: float = -0.5) -> PositionLogprobs:
    masked = float("-inf")
    top = [TokenLogprob(token, logprob, 1)]
    top += [TokenLogprob(place, masked, place + 1) for place in range(1, wanted)]
    return PositionLogprobs(top[0], tuple(top[:wanted]))


def _is_warm(request: Request) -> bool:
    return request.cache_use is not None and request.cache_use.cached_tokens > 0
