"""What a file of prompts with one beginning gains from the prefix cache (case C16).

    python benchmarks/shared_header.py [--shape 0.8b | --model demo] [--prompts 512] [--pairs 5]

A JSONL file of prompts that share their first 369 tokens, answered with the cache on and off in turn, in
one process, each time from an empty cache. Prints the times; exit code 1 where the cache makes the file less
than twice as fast.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from minivllm_engine import LLM, EngineConfig, SamplingParams
from minivllm_engine.engine.prepare import prepare_random

SHARED_TOKENS = 369
WANTED = 2.0


def write_prompts(path: Path, count: int, vocab: int, seed: int) -> None:
    """Lines of `prompt_token_ids`, as `minivllm generate --input` takes them."""
    rng = random.Random(seed)
    header = [rng.randrange(vocab) for _ in range(SHARED_TOKENS)]
    with path.open("w") as file:
        for number in range(count):
            own = [rng.randrange(vocab) for _ in range(rng.randint(8, 24))]
            line = {"id": number, "prompt_token_ids": header + own}
            file.write(json.dumps(line) + "\n")


def seconds(llm: LLM, path: Path, *, cached: bool) -> tuple[float, int]:
    """Time of the whole file, and the tokens that came from the cache."""
    llm.clear_cache()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prefix_cache=cached)
    began = time.perf_counter()
    prompts = [json.loads(line)["prompt_token_ids"] for line in path.read_text().splitlines()]
    outs = llm.generate(prompts, params)
    took = time.perf_counter() - began
    assert not any(out.error for out in outs)
    return took, sum(out.usage.cached_tokens for out in outs)


def main() -> int:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.8b", help="random weights of this shape")
    parser.add_argument("--model", help="a checkpoint, or demo, instead of a shape")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    config = EngineConfig()
    times: dict[bool, list[float]] = {True: [], False: []}
    with (
        LLM(args.model) if args.model else LLM(prepare_random(args.shape, config)) as llm,
        tempfile.TemporaryDirectory() as folder,
    ):
        path, hits = Path(folder, "prompts.jsonl"), 0
        for pair in range(-1, args.pairs):  # the first one warms up
            write_prompts(path, args.prompts, llm.model_config.vocab_size, pair)
            for cached in (True, False) if pair % 2 else (False, True):
                took, found = seconds(llm, path, cached=cached)
                if cached:
                    hits = found
                if pair >= 0:
                    times[cached].append(took)
    on, off = (statistics.median(times[cached]) for cached in (True, False))
    print(
        f"{args.prompts} prompts behind {SHARED_TOKENS} tokens: cache on {on:.3f} s, off {off:.3f} s: "
        f"{off / on:.2f}x, {hits:,} tokens from the cache, {args.pairs} pairs"
    )
    return 0 if off / on >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
