"""An engine that answers by a script, one byte a step, with the real tokenizer, detokenizer and requests.

It reads the last message of the prompt as its instructions:

    echo TEXT            TEXT
    count N              "1 2 3 ... N"
    lines N              N numbered lines with an emoji
    think TEXT | ANSWER  thinks TEXT, then answers ANSWER
    seeded               a text that depends on the seed alone
    forever              "ab" without end
    nothing              an empty answer
    raise                fails as a program does, after three tokens
    dead                 the request ends with an error of its own, after three tokens
    controls             a text with control characters
    noise                writes to descriptor 1 as a C library would, and answers "quiet"

`slow ` before it makes each step last 50 ms, `stuck ` lets the first step last 3 s, and `prefill N `
reads the prompt in N steps of 200 ms. A prompt that does not end with a question is continued by "+more".
"""

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minivllm_cli.config.settings import Settings
from minivllm_cli.engine import plan_memory
from minivllm_engine.core.errors import EngineError
from minivllm_engine.core.outputs import CacheUse, FinishReason, RequestOutput
from minivllm_engine.core.request import Request
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.core.stats import EngineStats
from minivllm_engine.engine.output_processor import RequestState
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.text.prompt import read_prompt
from minivllm_engine.text.tokenizer import Tokenizer

_QUESTION = re.compile(r"<\|im_start\|>user\n((?:(?!<\|im_start\|>).)*)<\|im_end\|>\n", re.DOTALL)
_NO_CACHE = CacheUse(miss_reason="disabled")


@dataclass
class _Live:
    answer: RequestState
    request: Request
    tokens: Iterator[int]
    step_seconds: float
    first_step_seconds: float
    prefill_steps: int
    fails: str | None
    steps: int = 0


class ScriptedEngine:
    """Stands in for LLM."""

    def __init__(self, settings: Settings, model_path: Path) -> None:
        self.model_path = model_path
        self.tokenizer = Tokenizer.from_dir(model_path)
        self.model_config = ModelConfig.from_dir(model_path)
        config = settings.engine_config
        self._plan = plan_memory(settings, model_path)
        engine = config.engine.model_copy(
            update={"device": "cpu", "dtype": "fp32", "state_dtype": "fp32"}
        )
        self.config = config.model_copy(update={"engine": engine})
        self.max_model_len = self._plan.max_model_len
        self._sampling = config.sampling
        self._live: dict[str, _Live] = {}
        self._num_added = 0
        self._log = os.environ.get("FAKE_LOG")

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    def add_request(self, prompt: Any, params: SamplingParams) -> str:
        ids, is_chat = read_prompt(prompt, self.tokenizer)
        assert len(ids) < self.max_model_len, "a prompt that is too long must not come here"
        resolved = params.resolved(self._sampling, seed=0)
        request_id = f"scripted-{self._num_added}"
        self._num_added += 1
        longest = min(len(ids) + resolved.max_tokens, self.max_model_len)
        request = Request(
            request_id, tuple(ids), resolved, self._num_added, max_total_tokens=longest
        )
        request.cache_use = _NO_CACHE
        (end,) = self.tokenizer.eos_ids
        answer = RequestState(
            request_id, [request], self.tokenizer, frozenset({end}), split_reasoning=is_chat
        )
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        self._live[request_id] = self._script(text, answer, request, end)
        if self._log:
            line = {"prompt": text, "ids": ids, "params": asdict(resolved)}
            with open(self._log, "a") as file:
                file.write(json.dumps(line) + "\n")
        return request_id

    def step(self) -> list[RequestOutput]:
        return [self._advance(live) for live in list(self._live.values())]

    def abort(self, request_id: str) -> RequestOutput | None:
        live = self._live.pop(request_id, None)
        if live is None:
            return None
        live.answer.end_all(FinishReason.ABORT)
        return live.answer.snapshot()

    def cached_prefix(self, prompt: Any) -> CacheUse:
        read_prompt(prompt, self.tokenizer)
        return _NO_CACHE

    def stats(self) -> EngineStats:
        busy = len(self._live)
        return EngineStats(
            num_running=busy,
            num_waiting=0,
            kv_blocks_used=busy,
            kv_blocks_total=self._plan.num_blocks,
            kv_blocks_peak=min(self._num_added, 1),
            state_slots_used=busy,
            state_slots_total=self._plan.max_num_seqs,
            state_slots_peak=min(self._num_added, 1),
            num_preemptions=0,
            num_steps=0,
            prompt_tokens_computed=0,
            output_tokens=0,
        )

    def close(self) -> None:
        self._live.clear()

    def __enter__(self) -> "ScriptedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _script(self, text: str, answer: RequestState, request: Request, end: int) -> _Live:
        questions = _QUESTION.findall(text)
        script = questions[-1] if questions else ""
        if not text.endswith(("assistant\n", "<think>\n", "</think>\n\n")):
            script = "echo +more"
        slow, stuck, prefill = False, False, 0
        while found := re.match(r"(slow|stuck|prefill (\d+)) ", script):
            slow, stuck = slow or found[1] == "slow", stuck or found[1] == "stuck"
            prefill = int(found[2] or prefill)
            script = script[found.end() :]
        fails = script if script in ("raise", "dead") else None
        return _Live(
            answer,
            request,
            self._tokens(_reply(script, request, text.endswith("<think>\n")), end),
            step_seconds=0.05 if slow else 0.0,
            first_step_seconds=3.0 if stuck else 0.0,
            prefill_steps=prefill,
            fails=fails,
        )

    def _tokens(self, reply: Iterator[str], end: int) -> Iterator[int]:
        for piece in reply:
            yield from self.tokenizer.encode(piece)
        yield end

    def _advance(self, live: _Live) -> RequestOutput:
        live.steps += 1
        live.answer.mark_started()
        prompt_len = len(live.request.prompt_ids)
        if live.steps <= live.prefill_steps:
            time.sleep(0.2)
            live.request.num_computed_tokens = prompt_len * live.steps // (live.prefill_steps + 1)
            return live.answer.snapshot()
        time.sleep(live.step_seconds + (live.first_step_seconds if live.steps == 1 else 0.0))
        live.request.num_computed_tokens = prompt_len + len(live.request.output_ids)
        if live.fails and len(live.request.output_ids) == 3:
            if live.fails == "raise":
                raise RuntimeError("the fan fell off")
            live.answer.end_all(
                FinishReason.ERROR,
                EngineError("the model gave dead logits", code="non_finite_logits"),
            )
        else:
            token = next(live.tokens)
            live.request.output_ids.append(token)
            live.answer.add_token(live.request, token, None)
        if live.answer.finished:
            del self._live[live.answer.request_id]
        return live.answer.snapshot()


def _reply(script: str, request: Request, thinking: bool) -> Iterator[str]:
    word, _, rest = script.partition(" ")
    match word:
        case "echo":
            yield rest
        case "count":
            yield " ".join(map(str, range(1, int(rest) + 1)))
        case "lines":
            yield "\n".join(f"line {i} 🙂" for i in range(1, int(rest) + 1))
        case "think":
            thought, _, answer = rest.partition(" | ")
            opened = "" if thinking else "<think>"
            yield f"{opened}{thought}</think>\n\n{answer}"
        case "seeded":
            yield f"seed {request.params.seed}"
        case "forever":
            while True:
                yield "ab"
        case "nothing":
            yield ""
        case "controls":
            yield "a\x1b[2Jb\x07\x9bc"
        case "noise":
            os.write(1, b"noise\n")
            yield "quiet"
        case "raise" | "dead":
            yield "some text"
        case _:
            yield f"You said: {script}"
