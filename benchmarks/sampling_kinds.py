"""What each way to sample costs beside greedy, end to end, on one machine.

    python benchmarks/sampling_kinds.py [--shape 0.8b] [--batch 64 256] [--tokens 128] [--rounds 3]

Random weights; as many requests as the batch is large, each of 64 random prompt tokens, all at once. The
kinds are taken in turn, round after round, after one that is not counted. Prints for each batch and kind
the median of output tokens a second, the smallest and the largest, and the ratio to greedy's median.
"""

import argparse
import random
import statistics
import time

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.core.config import EngineConfig, EngineOptions
from minivllm_engine.engine.prepare import prepare_random

KINDS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1.0},
    "top_p .95": {"temperature": 1.0, "top_p": 0.95},
    "min_p .05": {"temperature": 1.0, "min_p": 0.05},
    "top_k 20, top_p .95": {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    "presence 1.5": {"temperature": 0, "presence_penalty": 1.5},
    "repetition 1.1": {"temperature": 0, "repetition_penalty": 1.1},
    "all of them": {
        **{"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
        **{"presence_penalty": 1.5, "repetition_penalty": 1.1},
    },
    "logit bias": {"temperature": 0, "logit_bias": {5: 1.0, 9: -1.0}},
    "5 logprobs": {"temperature": 0, "logprobs": 5},
}


def rate(llm: LLM, batch: int, tokens: int, kind: str, seed: int) -> float:
    """Return output tokens a second, prompts included in the time."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1000) for _ in range(64)] for _ in range(batch)]
    params = SamplingParams.create(
        **{"top_k": -1, "top_p": 1.0, **KINDS[kind]},
        max_tokens=tokens,
        ignore_eos=True,
        prefix_cache=False,
    )
    started = time.perf_counter()
    outs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    assert all(out.error is None for out in outs)
    return sum(out.usage.completion_tokens for out in outs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="What each way to sample costs beside greedy.")
    parser.add_argument("--shape", default="0.8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    config = EngineConfig(engine=EngineOptions(max_num_seqs=max(options.batch), max_model_len=4096))
    llm = LLM(prepare_random(options.shape, config))
    for batch in options.batch:
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(options.rounds + 1):
            for kind in KINDS:
                found = rate(llm, batch, options.tokens, kind, number)
                if number:
                    rates[kind].append(found)
        base = statistics.median(rates["greedy"])
        print(f"batch {batch:4}            tok/s  (least to most)    of greedy's")
        for kind, found in rates.items():
            middle = statistics.median(found)
            span = f"({min(found):,.0f} to {max(found):,.0f})"
            print(f"  {kind:20} {middle:8,.0f}  {span:20} {middle / base:.2f}", flush=True)


if __name__ == "__main__":
    main()
