"""What the prefix cache gives, and what it costs where there is nothing to reuse: demo model, CPU.

    python benchmarks/prefix_cache.py [--pairs 7] [--cpu-time]

Three loads, each with the cache on and off in one process, interleaved; the clock is the wall's, or with
--cpu-time the process's, which other programs do not disturb (with OMP_NUM_THREADS=1 it is what counts):
a prompt of 1,000 tokens sent again; 48 prompts of 20 to 600 tokens that share nothing; 64 questions
behind one header of 400 tokens.
"""

import argparse
import platform
import random
import statistics
import time

import torch

from minivllm_engine import LLM, SamplingParams

FIRST_WORD, LAST_WORD = 300, 2000  # ids of ordinary tokens of the demo model


def text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(FIRST_WORD, LAST_WORD) for _ in range(length)]


clock = time.perf_counter


def seconds(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    start = clock()
    outs = llm.generate(prompts, params)
    took = clock() - start
    assert not any(out.error for out in outs)
    return took


def spread(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):.3f} {unit} ({min(values):.3f} to {max(values):.3f})"


def first_token(on: LLM, pairs: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    cold, warm = [], []
    for number in range(pairs):
        prompt = text(random.Random(number), 1000)
        cold.append(seconds(on, [prompt], params))
        warm.append(seconds(on, [prompt], params))
    ratio = statistics.median(cold) / statistics.median(warm)
    print(f"first token of 1,000: cold {spread(cold, 's')}, warm {spread(warm, 's')}: {ratio:.1f}x")


def compare(name: str, on: LLM, off: LLM, pairs: int, make: object, params: SamplingParams) -> None:
    ratios, times = [], {True: [], False: []}
    for number in range(-1, pairs):
        prompts = make(random.Random(number))
        for cached in (True, False) if number % 2 else (False, True):
            llm = on if cached else off
            llm.clear_cache()
            took = seconds(llm, prompts, params)
            if number >= 0:  # the first pair warms up
                times[cached].append(took)
        if number >= 0:
            ratios.append(times[True][-1] / times[False][-1])
    print(
        f"{name}: on {spread(times[True], 's')}, off {spread(times[False], 's')}; "
        f"on / off {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {pairs} pairs)"
    )


def strangers(rng: random.Random) -> list[list[int]]:
    return [text(rng, rng.randint(20, 600)) for _ in range(48)]


def few_shot(rng: random.Random) -> list[list[int]]:
    header = text(rng, 400)
    return [header + text(rng, rng.randint(8, 24)) for _ in range(64)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    pairs = arguments.pairs
    if arguments.cpu_time:
        global clock
        clock = time.process_time
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
    engine = {"max_num_seqs": 64}
    answers = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with (
        LLM("demo", engine=engine) as on,
        LLM("demo", engine=engine, cache={"prefix_cache": False}) as off,
    ):
        first_token(on, pairs)
        compare("no reuse, 48 prompts of 20 to 600", on, off, pairs, strangers, answers)
        compare("64 prompts behind one header of 400", on, off, pairs, few_shot, answers)


if __name__ == "__main__":
    main()
