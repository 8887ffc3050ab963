"""An engine under load for minutes: no step hangs, nobody's memory leaks, no request fails (case E14).

    python benchmarks/soak.py [--minutes 5] [--concurrency 256] [--shape 0.8b | --model demo]

Requests of random lengths come as fast as others end: greedy and sampled ones mixed, with logprobs,
penalties and stop ids, several outputs, shared beginnings, and aborts at random moments. A step of more than
--step-limit seconds is a failure; after four times as long the program prints where it stands and ends. At
the end all requests are let finish, and every counter has to be back where it was. One line sums up; exit
code 1 says that something was wrong.
"""

import argparse
import faulthandler
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from minivllm_engine import LLM, EngineConfig, SamplingParams
from minivllm_engine.engine.prepare import prepare_random

INTEGRITY_EVERY = 200
# Of torch's own memory, between the start and the end.
MAY_GROW = 64 << 20


@dataclass
class Soak:
    """The load on one engine, and what went wrong.

    Attributes:
        step_limit: seconds that a step may take.
        hang_limit: seconds of a step after which the program prints where it stands, and ends.
    """

    llm: LLM
    concurrency: int
    step_limit: float
    hang_limit: float
    rng: random.Random
    live: set[str] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)
    step_seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.vocab = self.llm.model_config.vocab_size
        self.longest = min(4000, self.llm.max_model_len // 2)
        self.headers = [self._tokens(self.rng.randint(64, self.longest // 2)) for _ in range(8)]

    def run(self, seconds: float) -> None:
        """Load for so long, then let everything finish."""
        held = _device_bytes()
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.failures:
            while len(self.live) < self.concurrency * 5 // 4:
                self._add()
            if self.rng.random() < 0.2:
                self._abort()
            self._step()
        while self.llm.has_unfinished and not self.failures:
            self._step()
        if not self.failures:
            self._check_counters(held)

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab) for _ in range(count)]

    def _add(self) -> None:
        rng = self.rng
        length = round(self.longest ** rng.random())  # most are short, and some are not
        prompt = (rng.choice(self.headers) if rng.random() < 0.4 else []) + self._tokens(length)
        params = {
            "max_tokens": rng.choice([1, 8, 32, 128]),
            "temperature": rng.choice([0, 0, 0.7, 1.0]),
            "top_p": rng.choice([1.0, 0.9]),
            "top_k": rng.choice([-1, 20]),
            "n": 2 if rng.random() < 0.05 else 1,
            "logprobs": 2 if rng.random() < 0.05 else None,
            "presence_penalty": 0.5 if rng.random() < 0.02 else 0,
            "stop_token_ids": tuple(self._tokens(20)),
            "ignore_eos": rng.random() < 0.5,
        }
        self.live.add(self.llm.add_request(prompt, SamplingParams(**params)))

    def _abort(self) -> None:
        name = self.rng.choice(sorted(self.live))
        self.live.remove(name)
        self.llm.abort(name)
        self.seen["aborted"] += 1

    def _step(self) -> None:
        faulthandler.dump_traceback_later(self.hang_limit, exit=True)
        began = time.monotonic()
        outputs = self.llm.step()
        took = time.monotonic() - began
        faulthandler.cancel_dump_traceback_later()
        self.step_seconds.append(took)
        if took > self.step_limit:
            self.failures.append(f"step {len(self.step_seconds)} took {took:.1f} s")
        for out in outputs:
            if out.error is not None:
                self.failures.append(f"{out.request_id}: {out.error.what}")
            if out.finished:
                self.live.discard(out.request_id)
                self.seen["finished"] += 1
        if len(self.step_seconds) % INTEGRITY_EVERY == 0:
            self._check(self.llm.check_integrity)

    def _check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except AssertionError as error:
            self.failures.append(f"after step {len(self.step_seconds)}: {error}")

    def _check_counters(self, held: int) -> None:
        self._check(self.llm.check_integrity)
        self.llm.clear_cache()
        stats = self.llm.stats()
        for name in (
            "num_running",
            "num_waiting",
            "kv_blocks_used",
            "state_slots_used",
            "blocks_cached",
            "snapshots_used",
        ):
            if getattr(stats, name):
                self.failures.append(f"{name} is {getattr(stats, name)} at the end")
        if self.live:
            self.failures.append(f"{len(self.live)} requests never ended")
        grown = _device_bytes() - held
        if grown > MAY_GROW:
            self.failures.append(f"{grown:,} bytes more are held than at the start")

    def summary(self) -> str:
        """One line."""
        stats, times = self.llm.stats(), self.step_seconds
        tokens = stats.prompt_tokens_computed + stats.output_tokens
        parts = [
            "ok" if not self.failures else "FAILED: " + "; ".join(self.failures[:3]),
            f"{len(times):,} steps",
            f"{tokens:,} tokens ({stats.output_tokens:,} out, {stats.cached_tokens:,} cached)",
            f"{self.seen['finished']:,} requests, {self.seen['aborted']:,} aborted",
            f"{stats.num_preemptions:,} preemptions",
            f"step median {statistics.median(times) * 1e3:.1f} ms, worst {max(times):.3f} s",
        ]
        if self.llm.device == "cuda":
            parts.append(f"{torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB free")
        return ", ".join(parts)


def _device_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def main() -> int:
    """Run, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--shape", default="0.8b", help="random weights of this shape")
    parser.add_argument("--model", help="a checkpoint, or demo, instead of a shape")
    parser.add_argument("--step-limit", type=float, default=5, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    engine = {"max_num_seqs": args.concurrency, "gpu_memory_utilization": args.memory}
    config = EngineConfig.create(engine=engine)
    with (
        LLM(prepare_random(args.shape, config))
        if args.model is None
        else LLM(args.model, config=config) as llm
    ):
        limit = args.step_limit
        soak = Soak(llm, args.concurrency, limit, 4 * limit, random.Random(args.seed))
        soak.run(args.minutes * 60)
        print(soak.summary())
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
