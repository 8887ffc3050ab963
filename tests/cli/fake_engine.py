"""A deterministic engine without a model: real tokenizer, detokenizer and requests, scripted answers.

It has the surface of `LLM` that `generate` uses. A request's last line of text is its instructions:

    say TEXT         TEXT
    count N          "1 2 3 ... N"
    seeded           a text that depends on the seed, and on the number of the output
    forever          "ab" without end
    think A | B      thinks A (the template has opened `<think>`), then answers B
    emoji            smileys, four bytes and so four tokens each
    noise            writes to descriptor 1 as a C library would, and says "quiet"
    controls         a text with control characters
    drifts           "warm" where a prefix was reused, "cold" where none was: a broken cache
    blurs            as a cache that changes logits, but no token
    ties             another token where a prefix was reused, as likely as the one without
    nan              the request ends with an error of its own
    crash            the engine as a whole fails in that step

Environment: FAKE_STEP_SECONDS, FAKE_STUCK, FAKE_LOG (a file: a line for each request and for `close`),
FAKE_TOKENS (tokens of each sequence in a step, default 8), FAKE_ADD_SECONDS (what a prompt takes to be
read), FAKE_ADMIT_SECONDS (from the begin of a step until it lets requests in).
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cli.prefix_memory import PrefixMemory
from minivllm_cli.config.settings import Settings
from minivllm_engine.core.errors import EngineError, RequestError
from minivllm_engine.core.outputs import (
    CacheUse,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    TokenLogprob,
)
from minivllm_engine.core.request import Request
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.core.stats import EngineStats
from minivllm_engine.engine.output_processor import RequestState
from minivllm_engine.text.prompt import read_prompt
from minivllm_engine.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 4096
PREFILL_CHUNK = 512
BLOCK = 64


@dataclass
class _Sequence:
    request: Request
    answer: RequestState
    tokens: Iterator[int]
    script: str


class FakeEngine:
    """Stands in for `LLM`. Runs at most `engine.max_num_seqs` sequences, in order of arrival."""

    def __init__(self, settings: Settings, model_path: Path) -> None:
        engine = settings.engine_config.engine
        self.model_path = model_path
        self.tokenizer = Tokenizer.from_dir(model_path)
        self.max_model_len = engine.max_model_len or MAX_MODEL_LEN
        self.max_num_seqs = engine.max_num_seqs or 256
        self.config = SimpleNamespace(
            engine=SimpleNamespace(max_num_seqs=self.max_num_seqs, dtype="fp32", state_dtype="fp32")
        )
        self._memory = PrefixMemory()
        self._settings = settings
        self._answers: dict[str, RequestState] = {}
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._arrived = 0
        self._steps = 0
        self._peak = 0
        self._bound = Counter[str]()
        self._in_tokens = 0
        self._out_tokens = 0
        self._seconds = float(os.environ.get("FAKE_STEP_SECONDS", "0"))
        self._per_step = int(os.environ.get("FAKE_TOKENS", "8"))

    @property
    def has_unfinished(self) -> bool:
        return bool(self._answers)

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
        ids, is_chat = read_prompt(prompt, self.tokenizer)
        resolved = self._settings.sampling(params)
        if not ids:
            raise RequestError("the prompt is empty", code="empty_prompt")
        if len(ids) + 1 > self.max_model_len:
            raise RequestError(
                f"{len(ids)} prompt tokens + 1 > max_model_len {self.max_model_len}",
                code="prompt_too_long",
            )
        request_id = request_id or f"fake-{self._arrived}"
        assert request_id not in self._answers
        longest = min(len(ids) + resolved.max_tokens, self.max_model_len)
        requests = [
            Request(request_id, tuple(ids), resolved, self._arrived + i, i, longest)
            for i in range(resolved.n)
        ]
        for request in requests:
            request.cache_use = self._use(request)
        self._arrived += len(requests)
        end_ids = frozenset() if resolved.ignore_eos else frozenset(self.tokenizer.eos_ids)
        answer = RequestState(
            request_id, requests, self.tokenizer, end_ids, split_reasoning=is_chat
        )
        self._answers[request_id] = answer
        script = _script(self.tokenizer.decode(ids))
        for request in requests:
            tokens = _tokens(script, request, self.tokenizer)
            self._waiting.append(_Sequence(request, answer, tokens, script))
        if os.environ.get("FAKE_LOG"):
            log({"add": ids, "script": script, "params": asdict(resolved)})
        _sleep(float(os.environ.get("FAKE_ADD_SECONDS", "0")))
        return request_id

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        request_id = self.add_request(prompt, params)
        try:
            while request_id in self._answers:
                yield from self.step()
        finally:
            self.abort(request_id)

    def step(self) -> list[RequestOutput]:
        if admit_seconds := os.environ.get("FAKE_ADMIT_SECONDS"):
            log({"step": self._steps})
            _sleep(float(admit_seconds))
        while self._waiting and len(self._running) < self.max_num_seqs:
            self._running.append(self._waiting.pop(0))
        if not self._running:
            return []
        if self._waiting:
            self._bound["state slots"] += 1
        self._steps += 1
        self._peak = max(self._peak, len(self._running))
        _sleep(self._seconds)
        for sequence in list(self._running):
            self._advance(sequence)
        told = {id(s.answer): s.answer for s in self._running}
        outputs = [answer.snapshot() for answer in told.values()]
        self._running = [s for s in self._running if s.request in s.answer.requests]
        for output in outputs:
            if output.finished:
                del self._answers[output.request_id]
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        answer = self._answers.pop(request_id, None)
        if answer is None:
            return None
        self._running = [s for s in self._running if s.answer is not answer]
        self._waiting = [s for s in self._waiting if s.answer is not answer]
        answer.end_all(FinishReason.ABORT)
        return answer.snapshot()

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
            num_steps=self._steps,
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
        self._answers.clear()
        log({"closed": True})

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _use(self, request: Request) -> CacheUse:
        if not request.params.prefix_cache:
            return CacheUse(miss_reason="disabled")
        use = self._memory.find(request.prompt_ids)
        self._memory.keep(request.prompt_ids)
        return use

    def _advance(self, sequence: _Sequence) -> None:
        request, answer = sequence.request, sequence.answer
        answer.mark_started()
        if sequence.script == "crash":
            raise RuntimeError("the fan fell off")
        prompt_len = len(request.prompt_ids)
        if request.num_computed_tokens < prompt_len:
            chunk = min(PREFILL_CHUNK, prompt_len - request.num_computed_tokens)
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
            answer.end_all(FinishReason.ERROR, error)
            return
        for _ in range(self._per_step):
            token = next(sequence.tokens)
            request.output_ids.append(token)
            request.num_computed_tokens += 1
            self._out_tokens += 1
            if (
                answer.add_token(request, token, _logprobs(request, token, sequence.script))
                is not None
            ):
                return


def log(entry: dict[str, Any]) -> None:
    """Append a line to $FAKE_LOG, for tests that ask what the engine saw."""
    path = os.environ.get("FAKE_LOG")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _sleep(seconds: float) -> None:
    # FAKE_STUCK: as a kernel that does not come back, deaf to signals.
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            time.sleep(left)
        except KeyboardInterrupt:
            if "FAKE_STUCK" not in os.environ:
                raise


def _script(text: str) -> str:
    turns = text.split("user\n")
    last = turns[-1].split("assistant\n")[0] if len(turns) > 1 else text
    return last.strip("\n").split("\n")[-1]


def _tokens(script: str, request: Request, tokenizer: Tokenizer) -> Iterator[int]:
    for piece in _reply(script, request):
        yield from tokenizer.encode(piece)
    while True:  # a model that ignores its end id goes on
        yield tokenizer.eos_ids[0]


def _reply(script: str, request: Request) -> Iterator[str]:
    word, _, rest = script.partition(" ")
    match word:
        case "say":
            yield rest
        case "count":
            yield " ".join(map(str, range(1, int(rest) + 1)))
        case "seeded":
            yield f"seed {request.params.seed} output {request.index}"
        case "forever":
            while True:
                yield "ab"
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
