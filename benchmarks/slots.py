"""Decode steps in state slots that lie apart against slots side by side (case F11).

    python benchmarks/slots.py [--shape 0.8b | --model demo] [--sequences 8] [--steps 200] [--rounds 9]

The same sequences decode in slots 0, 1, 2, ... and in slots spread over all, in turn, in one process. Prints
the medians of a step's time; exit code 1 where apart is 5 % slower or more.
"""

import argparse
import random
import statistics
import sys
import time

from minivllm_engine import LLM, EngineConfig, SamplingParams
from minivllm_engine.engine.prepare import prepare_random

SLOTS = 256
MAY_BE_SLOWER = 1.05


def step_seconds(llm: LLM, count: int, steps: int, *, apart: bool) -> float:
    """Median time of a decode step of `count` sequences."""
    llm.clear_cache()
    vocab, rng = llm.model_config.vocab_size, random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=steps + 40, ignore_eos=True)
    total = SLOTS if apart else count
    names = [llm.add_request([rng.randrange(vocab)], params) for _ in range(total)]
    while len(llm._scheduler.running) < total:
        llm.step()
    if apart:
        kept = set(names[:: SLOTS // count][:count])
        for name in names:
            if name not in kept:
                llm.abort(name)
    for _ in range(8):
        llm.step()
    slots = sorted(request.slot or 0 for request in llm._scheduler.running)
    assert len(slots) == count
    assert (slots[-1] - slots[0] > SLOTS // 2) is apart
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        llm.step()
        times.append(time.perf_counter() - began)
    for name in names:
        llm.abort(name)
    return statistics.median(times)


def main() -> int:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.8b", help="random weights of this shape")
    parser.add_argument("--model", help="a checkpoint, or demo, instead of a shape")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    config = EngineConfig.create(engine={"max_num_seqs": SLOTS})
    times: dict[bool, list[float]] = {True: [], False: []}
    with (
        LLM(args.model, config=config)
        if args.model
        else LLM(prepare_random(args.shape, config)) as llm
    ):
        for number in range(-1, args.rounds):  # the first one warms up
            for apart in (True, False) if number % 2 else (False, True):
                took = step_seconds(llm, args.sequences, args.steps, apart=apart)
                if number >= 0:
                    times[apart].append(took)
    apart, packed = (statistics.median(times[which]) * 1e3 for which in (True, False))
    print(
        f"{args.sequences} sequences, a decode step: packed {packed:.3f} ms, apart {apart:.3f} ms: "
        f"{apart / packed:.3f}, {args.rounds} rounds of {args.steps} steps"
    )
    return 0 if apart / packed < MAY_BE_SLOWER else 1


if __name__ == "__main__":
    sys.exit(main())
