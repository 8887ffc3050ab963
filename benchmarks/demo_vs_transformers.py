"""64 definitions of the demo model, each to its natural end: minivllm against transformers' `generate`.

Both run in fp32 on this machine's CPU, in one process, interleaved. transformers gets one left-padded batch,
tokenised beforehand; minivllm gets the messages and gives text. Then start-up time and peak memory.

    python benchmarks/demo_vs_transformers.py [--reps 5]
"""

import argparse
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.checkpoint.index import resolve_model

MAX_TOKENS = 128
WORDS = """
abacus acorn airport bell anchor antelope apron arrow candy autumn drum balcony lamp river
basket beacon saddle blanket bridge butter cabin camel candle canyon carpet castle cello wagon
cliff cobra compass copper coral cradle cricket dagger daisy desert dolphin eagle ember falcon
feather fiddle forest garlic ginger glacier granite hammock harbor honey island jacket kettle
lantern lemon magnet tunnel meadow mirror needle oasis orchard
""".split()  # noqa: SIM905 (easier to read than a list)
LAUNCHER = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, capture_output=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def load_reference(path: Path) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def left_padded(prompts: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def run_reference(
    model: transformers.PreTrainedModel, prompts: list[list[int]], end_ids: frozenset[int]
) -> list[list[int]]:
    """New tokens of each prompt, up to and with its end id."""
    ids, mask = left_padded(prompts, min(end_ids))
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=sorted(end_ids),
            pad_token_id=min(end_ids),
        )
    answers = []
    for row in out[:, ids.shape[1] :].tolist():
        end = next((i for i, token in enumerate(row) if token in end_ids), len(row) - 1)
        answers.append(row[: end + 1])
    return answers


def describe(name: str, tokens: int, seconds: list[float]) -> float:
    rates = sorted(tokens / s for s in seconds)
    median = statistics.median(rates)
    print(f"{name:14} {median:9.1f} tok/s   ({rates[0]:.1f} to {rates[-1]:.1f}, {len(rates)} runs)")
    return median


def compare(reps: int) -> None:
    path = resolve_model("demo")
    llm = LLM("demo", engine={"max_num_seqs": 64})
    reference = load_reference(path)
    chats = [[{"role": "user", "content": f"Define {word}."}] for word in WORDS]
    prompts = [llm.tokenizer.encode_chat(chat) for chat in chats]
    messages = [{"messages": chat} for chat in chats]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    ours: list[float] = []
    theirs: list[float] = []
    for rep in range(reps + 1):
        start = time.perf_counter()
        outs = llm.generate(messages, params)
        middle = time.perf_counter()
        expected = run_reference(reference, prompts, llm.stop_token_ids)
        end = time.perf_counter()
        if rep:  # the first round warms up
            ours.append(middle - start)
            theirs.append(end - middle)
    answers = [out.outputs[0].token_ids for out in outs]
    equal = sum(a == b for a, b in zip(answers, expected, strict=True))
    tokens = sum(map(len, answers))
    print(f"{len(WORDS)} definitions, {tokens} useful output tokens, {equal}/{len(WORDS)} equal")
    fast = describe("minivllm", tokens, ours)
    slow = describe("transformers", sum(map(len, expected)), theirs)
    print(f"ratio {fast / slow:.2f}")


def measure_program() -> None:
    command = [sys.executable, "-m", "minivllm_cli"]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([*command, "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    print(f"minivllm --help: {statistics.median(seconds):.2f} s (median of 5)")
    examples = Path(__file__).parent.parent / "examples" / "prompts.jsonl"
    # From a small process of its own: a child's peak counts what it was forked from.
    launcher = [sys.executable, "-c", LAUNCHER]
    run = [*command, "generate", "demo", "--input", str(examples)]
    done = subprocess.run([*launcher, *run], check=True, capture_output=True, text=True)
    print(f"peak memory of the demo run: {int(done.stdout) / 1024:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=5)
    reps = parser.parse_args().reps
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    measure_program()
    compare(reps)


if __name__ == "__main__":
    main()
