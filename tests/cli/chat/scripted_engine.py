"""The scripted LLM as chats need it: one byte a step, with a plan of the memory and no prefix cache.

To the scripts of `FakeLLM` it adds

    raise                fails as a program does, after three tokens
    dead                 the request ends with an error of its own, after three tokens

`slow ` before a script makes each step last 50 ms, `stuck ` lets the first step last 3 s, and `prefill N `
reads the prompt in N steps of 200 ms. A prompt that does not end with a question is continued by "+more".
"""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from minivllm_cli.config.settings import Settings
from minivllm_cli.engine import plan_memory
from minivllm_engine.core.outputs import CacheUse, RequestOutput
from minivllm_engine.core.request import Request
from minivllm_engine.core.stats import EngineStats
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.text.prompt import read_prompt
from support.fake_llm import FakeLLM, FakeSequence, Pace, scripted_reply

_QUESTION = re.compile(r"<\|im_start\|>user\n((?:(?!<\|im_start\|>).)*)<\|im_end\|>\n", re.DOTALL)
_OPENINGS = ("assistant\n", "<think>\n", "</think>\n\n")
_NO_CACHE = CacheUse(miss_reason="disabled")


class ScriptedEngine(FakeLLM):
    """Stands in for LLM."""

    def __init__(self, settings: Settings, model_path: Path, log: str | None) -> None:
        super().__init__(settings, model_path, Pace(tokens=1, prefill=1 << 30), log)
        self.model_config = ModelConfig.from_dir(model_path)
        self._plan = plan_memory(settings, model_path)
        config = settings.engine_config
        on_cpu = {"device": "cpu", "dtype": "fp32", "state_dtype": "fp32"}
        engine = config.engine.model_copy(update=on_cpu)
        self.config = config.model_copy(update={"engine": engine})
        self.max_model_len = self._plan.max_model_len
        self._first_seconds = 0.0

    def script_of(self, ids: Sequence[int], is_chat: bool) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        self._opened_thinking = text.endswith("<think>\n")
        self.pace.step = self._first_seconds = 0.0
        self.pace.prefill = 1 << 30
        if not text.endswith(_OPENINGS):
            return "echo +more"
        script = _QUESTION.findall(text)[-1]
        while found := re.match(r"(slow|stuck|prefill (\d+)) ", script):
            script = script[found.end() :]
            if found[1] == "slow":
                self.pace.step = 0.05
            elif found[1] == "stuck":
                self._first_seconds = 3.0
            else:
                self.pace.step, self.pace.prefill = 0.2, len(ids) // int(found[2]) + 1
        return script

    def reply(self, script: str, request: Request) -> Iterator[str]:
        if script in ("raise", "dead"):
            return iter(["some text"])
        if script.startswith("think ") and not self._opened_thinking:
            script = script.replace("think ", "think <think>", 1)
        return scripted_reply(script, request)

    def next_token(self, sequence: FakeSequence) -> int:
        if sequence.script == "raise" and len(sequence.request.output_ids) == 3:
            raise RuntimeError("the fan fell off")
        return super().next_token(sequence)

    def before_step(self) -> None:
        super().before_step()
        time.sleep(self._first_seconds)
        self._first_seconds = 0.0

    def step(self) -> list[RequestOutput]:
        for sequence in self._running:
            if sequence.script == "dead" and len(sequence.request.output_ids) == 3:
                sequence.script = "nan"
        return super().step()

    def cache_use(self, request: Request) -> CacheUse:
        return _NO_CACHE

    def cached_prefix(self, prompt: Any) -> CacheUse:
        read_prompt(prompt, self.tokenizer)
        return _NO_CACHE

    def stats(self) -> EngineStats:
        peak = min(self._num_arrived, 1)
        none = dict.fromkeys(("snapshots_used", "snapshots_peak", "snapshots_total"), 0)
        blocks = {"kv_blocks_total": self._plan.num_blocks, "kv_blocks_peak": peak}
        return replace(super().stats(), **blocks, **none)

    def log(self, entry: dict[str, Any]) -> None:
        if "add" in entry:
            text = self.tokenizer.decode(entry["add"], skip_special_tokens=False)
            super().log({"prompt": text, "ids": entry["add"], "params": entry["params"]})
