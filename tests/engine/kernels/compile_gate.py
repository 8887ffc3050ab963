"""Compiles every kernel as the operations launch it, for cards that are not there, and prints its figures.

Run as a program, without TRITON_INTERPRET: `python compile_gate.py`. Prints one JSON object a line: kernel,
arch (80, 86, 90), case, shared (bytes of shared memory), stack (bytes a thread), registers, approximate
(sines and cosines that are so); and of kernels that start early, the arguments that are read, the stores and
the ends that do not wait for the kernel before.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from minivllm_engine.ops import device as device_rules
from minivllm_engine.ops.attention import triton as attention
from minivllm_engine.ops.attention.reference import KVShape
from minivllm_engine.ops.attention.tiles import prefill_tile
from minivllm_engine.ops.causal_conv import triton as causal_conv
from minivllm_engine.ops.device import DeviceLimits
from minivllm_engine.ops.embedding import triton as embedding
from minivllm_engine.ops.fused import triton as fused
from minivllm_engine.ops.gated_delta import triton as gated_delta
from minivllm_engine.ops.sampling import race_triton
from minivllm_engine.ops.sampling import triton as sampling
from minivllm_engine.ops.sampling.race import RaceRows, row_keys
from minivllm_engine.ops.small_batch import triton as small_batch
from minivllm_engine.ops.small_batch.tiles import choose_tile
from minivllm_engine.ops.varlen import PackedSequences

# Shared memory that a program may use and multiprocessors: A100, RTX 3090, H200.
CARDS = {
    80: DeviceLimits(163 * 1024, 108),
    86: DeviceLimits(99 * 1024, 82),
    90: DeviceLimits(227 * 1024, 132),
}
BF16, FP32 = torch.bfloat16, torch.float32
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class NoDriver:
    """Stands where the CUDA driver would: says what to compile for, and can do nothing else."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def delta_rule(state_dtype: torch.dtype, H: int, HV: int, K: int, V: int) -> None:
    """A step, and several in a row."""
    rows = zeros(4, 2 * H * K + HV * V)
    q, k, v = rows.split([H * K, H * K, HV * V], dim=1)
    gates = zeros(4, 2 * HV)
    given = {
        "q": q.unflatten(1, (H, K)),
        "k": k.unflatten(1, (H, K)),
        "v": v.unflatten(1, (HV, V)),
        "a": gates[:, HV:],
        "b": gates[:, :HV],
        "A_log": zeros(HV, dtype=FP32),
        "dt_bias": zeros(HV, dtype=FP32),
        "pool": zeros(5, HV, V, K, dtype=state_dtype),
    }
    slots = torch.arange(4)
    gated_delta.gated_delta_step(**given, slots=slots, positions=slots)
    plan = gated_delta.RecurrentPlan.build(slots[:2], (0, 5), (1, 3))
    gated_delta.gated_delta_recurrent(**given, plan=plan)
    states = gated_delta.gather_states(given["pool"], slots, slots)
    gated_delta.scatter_states(states, given["pool"], slots)


def gates() -> None:
    rows = zeros(4, 32)
    gated_delta.delta_gates(
        rows[:, 16:], rows[:, :16], zeros(16, dtype=FP32), zeros(16, dtype=FP32)
    )


def conv() -> None:
    pool, conv_weight, x = zeros(5, 6144, 3), zeros(4, 6144), zeros(4, 8224)[:, :6144]
    causal_conv.causal_conv_step(
        x, pool, conv_weight, slots=torch.arange(4), positions=torch.arange(4)
    )
    for normed in (False, True):
        plan = causal_conv.TritonConvPlan.build(torch.arange(1), (0,), (4,), normed=normed)
        causal_conv.causal_conv_prefill(x, pool, conv_weight, plan, key_dim=2048, num_heads=16)


def attend(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, block_size: int, splits: int
) -> None:
    """splits 0: a prompt; else decodes."""
    limits = CARDS[driver.active.get_current_device()]
    shape = KVShape(block_size, *heads, head_dim)
    tile = prefill_tile(shape, dtype, limits)
    prefill = PackedSequences.build((0,), (4,), tile.num_tokens, torch.device("cpu"))
    tables = torch.zeros(4, 16, dtype=torch.int64)
    plan = attention.TritonAttentionPlan(
        4 if splits else 0,
        splits,
        torch.arange(4),
        tables,
        None if splits else prefill,
        tile,
    )
    cache = zeros(2, block_size, heads[1], head_dim, dtype=dtype)
    attention.paged_attention(zeros(4, heads[0], head_dim, dtype=dtype), cache, cache, plan)


def norms(size: int) -> None:
    x, scale, eps = zeros(4, size), zeros(size, dtype=FP32), zeros(1, dtype=FP32)
    fused.rms_norm(x, scale, eps)
    fused.add_rms_norm(x, x.clone(), scale, eps)


def gated_norms() -> None:
    weight, eps = zeros(128, dtype=FP32), zeros(1, dtype=FP32)
    for num_tokens in (1, 1024):
        x = zeros(num_tokens, 16, 128)
        fused.gated_rms_norm(x, x.clone(), weight, eps)


def elementwise() -> None:
    fused.silu_mul(zeros(4, 7168))
    x = zeros(4, 8, 256)
    fused.sigmoid_mul(x, x.clone())
    angles, cache = zeros(4, 1, 32), zeros(2, 64, 2, 256)
    fused.norm_rotate_write(
        zeros(4, 10, 256),
        zeros(4, 2, 256),
        scale=zeros(10, 256, dtype=FP32),
        eps=zeros(1, dtype=FP32),
        cos=angles,
        sin=angles,
        keys=cache,
        values=cache,
        kv_slots=torch.arange(4),
    )


def beginning() -> None:
    """What a decode step begins with."""
    positions = torch.arange(4, dtype=torch.int32)
    fused.rotary_cos_sin(positions, zeros(32, dtype=FP32), 1.0, BF16)
    embedding.embed(positions, positions, positions.long(), zeros(8, 5120))


def small_batch_products(num_rows: int, hidden: int, wide: int, heads: int) -> None:
    """All that a step of few rows multiplies, in heads of 128."""
    arch = driver.active.get_current_device()

    def launch(num_outputs: int, num_inputs: int) -> dict:
        tile = choose_tile(num_outputs, num_inputs, CARDS[arch])
        return {"tile": tile}

    x, scale, eps = zeros(num_rows, hidden), zeros(hidden, dtype=FP32), zeros(1, dtype=FP32)
    inner = zeros(num_rows, heads, 128)
    in_proj, out_proj = zeros(8 * hidden, hidden), zeros(hidden, heads * 128)
    gate_up, down = zeros(2 * wide, hidden), zeros(hidden, wide)
    small_batch.norm_linear(x, scale, eps, in_proj, **launch(*in_proj.shape))
    small_batch.norm_linear_swiglu(x, scale, eps, gate_up, **launch(*gate_up.shape))
    small_batch.linear_add_(x.new_zeros(num_rows, wide), down, x, x[0], **launch(*down.shape))
    norm = zeros(128, dtype=FP32), eps
    small_batch.gated_norm_linear_add_(inner, inner, *norm, out_proj, x, **launch(*out_proj.shape))
    small_batch.sigmoid_gate_linear_add_(inner, inner, out_proj, x, **launch(*out_proj.shape))


# The 0.8B shape, and what of other shapes makes other tiles.
def race(dtype: torch.dtype) -> None:
    """All kinds of draws are one kernel; the few largest logits are looked for before it."""
    rows = RaceRows.build(
        [0, 1],
        row_keys([0, 0], [0, 1]),
        [1.0, 1.0],
        [0.0, 0.1],
        [1.0, 0.9],
        [20, 0],
        vocab=248_320,
        device=torch.device("cpu"),
    )
    logits, best = zeros(4, 248_320, dtype=dtype), zeros(4, dtype=torch.int64)
    race_triton.race(logits, best, rows)
    race_triton.likelihoods(logits, best, best, 5)


CASES: dict[str, Callable[[], None]] = {
    "delta rule, fp32 states": lambda: delta_rule(FP32, 16, 16, 128, 128),
    "delta rule, 256 x 256, bf16 states": lambda: delta_rule(BF16, 4, 12, 256, 256),
    "gates": gates,
    "convolution": conv,
    "prompt, head 256": lambda: attend(BF16, (8, 2), 256, 16, 0),
    "prompt, head 128": lambda: attend(BF16, (16, 4), 128, 64, 0),
    "prompt, head 256, fp32": lambda: attend(FP32, (8, 2), 256, 64, 0),
    "decode, head 256": lambda: attend(BF16, (8, 2), 256, 64, 1),
    "decode, head 256, split": lambda: attend(BF16, (8, 2), 256, 16, 128),
    "decode, head 256, fp32": lambda: attend(FP32, (8, 2), 256, 64, 8),
    "norm": lambda: norms(5120),
    "gated norm": gated_norms,
    "elementwise": elementwise,
    "beginning": beginning,
    "greedy": lambda: sampling.greedy(zeros(4, 248_320)),
    "greedy, fp32": lambda: sampling.greedy(zeros(64, 50_001, dtype=FP32)),
    "draws": lambda: race(BF16),
    "draws, fp32": lambda: race(FP32),
    "small batch, 1 row": lambda: small_batch_products(1, 5120, 17408, 48),
    "small batch, 4 rows": lambda: small_batch_products(4, 1024, 3584, 16),
}


def resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if found is None:
        raise ValueError(f"no figures in what cuobjdump says: {done.stdout}")
    return {"registers": int(found[1]), "stack": int(found[2])}


def before_waiting(ptx: str, signature: dict[str, str]) -> dict[str, object]:
    """Of a kernel that starts early, what does not wait for the one before: arguments read, stores and ends.

    signature: types of the kernel's arguments by name, of which constants are none of the PTX's.
    """
    early, wait, _ = ptx.partition("griddepcontrol.wait")
    if not wait:
        return {}
    arguments = [(name, kind) for name, kind in signature.items() if kind != "constexpr"]
    read: set[str] = set()
    origins: dict[str, set[int]] = {}
    # Straight on, so that each register comes from what stands above it.
    for line in early.splitlines():
        instruction = re.sub(r"^\s*(?:@\S+\s+)?|//.*", "", line)
        target, _, source = re.sub(r"{([^}]*)}", _without_commas, instruction).partition(",")
        found = {int(number) for number in re.findall(r"_param_(\d+)\b", source)}
        found |= {at for name in _registers(source) for at in origins.get(name, ())}
        origins |= dict.fromkeys(_registers(target), found)
        if re.match(r"ld\.global|cp\.async", instruction):
            address = source if instruction.startswith("ld") else instruction
            places = {at for name in _registers(address) for at in origins.get(name, ())}
            pointers = {arguments[at][0] for at in places if arguments[at][1].startswith("*")}
            read |= pointers or {"something unknown"}
    ends = re.findall(r"^\s*(?:@\S+\s+)?(?:ret|bra|exit)\b", early, re.M)
    stores = early.count("st.global")
    return {"early_reads": sorted(read), "early_stores": stores, "early_returns": len(ends)}


def _without_commas(match: re.Match[str]) -> str:
    return match[1].replace(",", " ")


def _registers(text: str) -> list[str]:
    return re.findall(r"%[a-z]+\d+", text)


def compile_only(compiled: list[SimpleNamespace]) -> None:
    """From now on launches end with the compiled kernel, which is added to the list with its name."""
    run = JITFunction.run

    def compile_and_stop(
        self: JITFunction, *args: object, grid: object, warmup: bool, **options: object
    ):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        operation = self.__module__.split(".")[2]
        compiled.append(SimpleNamespace(name=f"{operation}.{self.__name__}", kernel=kernel))
        return kernel

    JITFunction.run = compile_and_stop


def let_kernels_start_early(can: bool) -> None:
    """As if the tensors, which are on the CPU, were on a card that can do so, or on one that cannot."""
    device_rules.has_dependent_launch = lambda device: can


def main() -> None:
    compiled: list[SimpleNamespace] = []
    compile_only(compiled)
    for arch, limits in CARDS.items():
        driver.set_active(NoDriver(arch))
        let_kernels_start_early(arch >= 90)
        for case, launch in CASES.items():
            compiled.clear()
            launch()
            for entry in compiled:
                figures = {"shared": entry.kernel.metadata.shared, "limit": limits.shared_memory}
                figures |= resources(entry.kernel.asm["cubin"])
                figures |= before_waiting(entry.kernel.asm["ptx"], entry.kernel.src.signature)
                figures["approximate"] = len(
                    re.findall(r"(?:sin|cos)\.approx", entry.kernel.asm["ptx"])
                )
                print(json.dumps({"kernel": entry.name, "arch": arch, "case": case, **figures}))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
