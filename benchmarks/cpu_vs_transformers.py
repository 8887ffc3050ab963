"""Prompts and decodes of one checkpoint on the CPU: minivllm against transformers, in turns in one process.

    python benchmarks/cpu_vs_transformers.py CHECKPOINT [--dtype fp32] [--batch 1] [--prompt 64] [--new 16]

Random prompts of one length, greedy, as many new tokens as asked for whatever they are. The time of a token
is that of a run with all of them less that of a run with one, over the rest; prompts are timed by the run
with one. transformers gets one batch without padding. Quiet machine, please: both are bound by memory.
"""

import argparse
import os
import platform
import random
import statistics
import time
from pathlib import Path

import torch
import transformers

from minivllm_engine import LLM, SamplingParams

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    """Measure, and print three lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--reps", type=int, default=5)
    args = parser.parse_args()
    engine = {"dtype": args.dtype, "device": "cpu", "max_num_seqs": args.batch}
    llm = LLM(args.checkpoint, engine={**engine, "max_model_len": args.prompt + args.new + 64})
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        args.checkpoint, dtype=DTYPES[args.dtype]
    ).eval()
    rng = random.Random(0)
    vocab = llm.model_config.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(args.prompt)] for _ in range(args.batch)]

    def ours(count: int) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, prefix_cache=False
        )
        outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        assert all(len(out.outputs[0].token_ids) == count for out in outs)

    def theirs(count: int) -> None:
        with torch.inference_mode():
            out = reference.generate(
                torch.tensor(prompts), do_sample=False, min_new_tokens=count, max_new_tokens=count
            )
        assert out.shape[1] == args.prompt + count

    seconds: dict[tuple[str, int], list[float]] = {}
    for rep in range(args.reps + 1):
        for name, run in (("minivllm", ours), ("transformers", theirs)):
            for count in (1, args.new):
                began = time.perf_counter()
                run(count)
                if rep:  # the first round warms up
                    seconds.setdefault((name, count), []).append(time.perf_counter() - began)
    print(
        f"{args.checkpoint.name} {args.dtype}, batch {args.batch}, {args.prompt} + {args.new} tokens; "
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, median of {args.reps}"
    )
    rates = {}
    for name in ("minivllm", "transformers"):
        first, whole = seconds[name, 1], seconds[name, args.new]
        steps = sorted(
            args.batch * (args.new - 1) / (b - a) for a, b in zip(first, whole, strict=True)
        )
        prompt = args.batch * args.prompt / statistics.median(first)
        rates[name] = statistics.median(steps), prompt
        print(
            f"{name:13} decode {rates[name][0]:7.2f} tok/s ({steps[0]:.2f} to {steps[-1]:.2f}), "
            f"prompts {prompt:7.1f} tok/s"
        )
    decode, prompt = (rates["minivllm"][i] / rates["transformers"][i] for i in range(2))
    print(f"ratio         decode {decode:.2f}, prompts {prompt:.2f}")


if __name__ == "__main__":
    main()
