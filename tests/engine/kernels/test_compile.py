"""Every kernel compiles for every kind of card, in the sizes that are chosen for it, and fits there."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import minivllm_engine

pytest.importorskip("triton", reason="Triton is there for Linux only")

# A little is what the compiler keeps of a tile's addresses; more would be the sums themselves.
MAX_STACK = 64
# Kernels that start early, and what each reads while the one before still runs: weights, and nothing else.
EARLY_READS = {
    "attention._combine_kernel": set(),
    "attention._decode_kernel": set(),
    "causal_conv._step_kernel": {"conv_weight"},
    "embedding._embed_kernel": set(),
    "fused._angles_kernel": {"frequencies"},
    "fused._gated_norm_kernel": {"weight", "eps"},
    "fused._norm_kernel": {"scale", "eps"},
    "fused._rotate_kernel": {"scale", "eps"},
    "fused._sigmoid_mul_kernel": set(),
    "fused._silu_mul_kernel": set(),
    "gated_delta._step_kernel": {"log_decay", "dt_bias"},
    "sampling._combine_kernel": set(),
    "sampling._part_kernel": set(),
    "small_batch._product_kernel": {"weight", "scale", "eps"},
}


def run(program: str, cache: Path) -> list[dict]:
    """What a program beside this file prints, in a process that compiles kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    path = Path(__file__).with_name(program)
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_kernels_fit_the_cards(tmp_path: Path) -> None:
    compiled = run("compile_gate.py", tmp_path)
    too_large = [entry for entry in compiled if entry["shared"] > entry["limit"]]
    spilling = [entry for entry in compiled if entry["stack"] > MAX_STACK]
    assert not too_large
    assert not spilling
    products = [entry for entry in compiled if entry["kernel"].startswith("small_batch")]
    assert all(entry["stack"] == 0 for entry in products)
    early = [entry for entry in compiled if "early_reads" in entry]
    reads: dict[str, set[str]] = {}
    for entry in early:
        reads.setdefault(entry["kernel"], set()).update(entry["early_reads"])
    assert reads == EARLY_READS
    assert all(entry["arch"] == 90 for entry in early), "a card that cannot start kernels early"
    assert not any(entry["early_stores"] for entry in early), "stored before the wait"
    assert not any(entry["early_returns"] for entry in early), "ended before the wait"
    assert not any(entry["approximate"] for entry in compiled), "an approximate sine or cosine"
    counts = Counter(entry["arch"] for entry in compiled)
    assert set(counts) == {80, 86, 90} and len(set(counts.values())) == 1
    kernels = {entry["kernel"] for entry in compiled}
    assert kernels == kernel_names(), "a kernel that the gate does not compile, or one with no name"


def test_no_step_of_another_shape_needs_a_kernel_anew(tmp_path: Path) -> None:
    """A kernel that is compiled while requests wait costs them a second, and breaks a graph's capture."""
    steps = run("recompile_gate.py", tmp_path)
    decode, prefill, pair, *others = steps
    assert (
        "gated_delta._step_kernel" in decode["new"] and "attention._decode_kernel" in decode["new"]
    )
    assert "causal_conv._prefill_kernel" in prefill["new"]
    assert pair["new"] == ["small_batch._product_kernel"]
    assert {name for step in others for name in step["kernels"]} == {
        *decode["new"],
        *prefill["new"],
    }
    assert [step["new"] for step in others] == [[]] * 9


def kernel_names() -> set[str]:
    """Operation and function of all kernels in the sources."""
    operations = Path(minivllm_engine.__file__).parent / "ops"
    return {
        f"{path.relative_to(operations).parts[0]}.{name}"
        for path in operations.rglob("*.py")
        for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
