"""Calls of the kernels of one layer, on random memory that takes turns: what `kernels.py` times."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton
from kernel_timing import Call, copies_for

from minivllm_engine.ops.attention.reference import KVShape
from minivllm_engine.ops.attention.tiles import DecodeTile, PrefillTile
from minivllm_engine.ops.attention.triton.decode import decode
from minivllm_engine.ops.attention.triton.prefill import prefill
from minivllm_engine.ops.causal_conv import triton as conv
from minivllm_engine.ops.fused import triton as fused
from minivllm_engine.ops.gated_delta import fla
from minivllm_engine.ops.gated_delta import triton as rule
from minivllm_engine.ops.varlen import PackedSequences

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Shapes:
    """Of a layer, and the loads that it is measured with. Spans are (tokens before, new tokens)."""

    heads: int
    head_size: int
    conv_weight: int
    attention: KVShape
    hidden: int
    mlp: int
    vocab: int
    batches: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]  # (sequences, context)
    prompts: tuple[tuple[int, int, int], ...]  # (sequences, tokens before, new tokens)
    chunks: tuple[tuple[int, int], ...]  # (sequences, tokens)
    fla_tokens: tuple[int, ...]

    @property
    def conv_dim(self) -> int:
        return 3 * self.heads * self.head_size


FULL = Shapes(
    heads=16,
    head_size=128,
    conv_weight=4,
    attention=KVShape(64, 8, 2, 256),
    hidden=1024,
    mlp=3584,
    vocab=248_320,
    batches=(1, 8, 64, 256),
    decodes=((1, 512), (64, 2048), (256, 512), (4, 16384), (1, 32768)),
    prompts=((1, 0, 8192), (4, 0, 2048), (8, 0, 1024), (1, 8192, 64), (1, 8192, 512)),
    chunks=((1, 16), (1, 64), (8, 64)),
    fla_tokens=(64, 2048, 8192),
)
SMOKE = Shapes(
    heads=1,
    head_size=8,
    conv_weight=4,
    attention=KVShape(16, 2, 1, 16),
    hidden=32,
    mlp=48,
    vocab=300,
    batches=(1, 2),
    decodes=((2, 150),),
    prompts=((1, 0, 20), (1, 16, 5)),
    chunks=((1, 2),),
    fla_tokens=(4,),
)


class Workloads:
    """Makes calls of each operation on random memory of one device."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.shapes, self.device = shapes, device

    def random(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype)

    def _delta(self, rows: int) -> dict[str, torch.Tensor]:
        """What the delta rule takes beside states: parts of wider rows, as the layer gives them."""
        s = self.shapes
        width = s.heads * s.head_size
        mixed = self.random(rows, 3 * width)
        q, k, v = (x.unflatten(1, (s.heads, -1)) for x in mixed.split(width, dim=1))
        gates = self.random(rows, 2 * s.heads)
        names = {"a": gates[:, : s.heads], "b": gates[:, s.heads :]}
        parameters = {name: self.random(s.heads, dtype=FP32) for name in ("A_log", "dt_bias")}
        return {"q": q, "k": k, "v": v, **names, **parameters}

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Read and written by one sequence's step."""
        return 2 * self.shapes.heads * self.shapes.head_size**2 * dtype.itemsize

    def _turns(self, batch: int, num_bytes: int) -> list[torch.Tensor]:
        """Slots of the sequences of each of several calls, no two alike."""
        count = copies_for(batch * num_bytes, self.device)
        return list(torch.randperm(batch * count, device=self.device).split(batch))

    def step(self, batch: int, dtype: torch.dtype) -> list[Call]:
        turns, s = self._turns(batch, self.state_bytes(dtype)), self.shapes
        pool = self.random(batch * len(turns), s.heads, s.head_size, s.head_size, dtype=dtype)
        positions = torch.full((batch,), 9, device=self.device)
        given = self._delta(batch)
        return [
            partial(rule.gated_delta_step, **given, pool=pool, slots=slots, positions=positions)
            for slots in turns
        ]

    def recurrent(self, batch: int, length: int) -> list[Call]:
        turns, s = self._turns(batch, self.state_bytes(FP32)), self.shapes
        pool = self.random(batch * len(turns), s.heads, s.head_size, s.head_size, dtype=FP32)
        given = self._delta(batch * length)
        plans = [rule.RecurrentPlan.build(t, [64] * batch, [length] * batch) for t in turns]
        return [partial(rule.gated_delta_recurrent, **given, pool=pool, plan=p) for p in plans]

    def fla_chunks(self, length: int) -> list[Call]:
        """FLA picks among configurations by trying them all: two are enough to see what the host does."""
        slots = torch.zeros(1, dtype=torch.int64, device=self.device)
        plan = fla.FlaChunkPlan.build(slots, (0,), (length,))
        for kernel in list(_autotuners()):
            del kernel.configs[2:]
        s, given = self.shapes, self._delta(length)
        pool = self.random(1, s.heads, s.head_size, s.head_size, dtype=FP32)
        # Packed and of norm 1, as the convolution gives them.
        qkv = {name: given[name].contiguous() for name in "qkv"}
        qkv |= {name: F.normalize(qkv[name], dim=-1) for name in "qk"}
        gates = [given[name] for name in ("a", "b", "A_log", "dt_bias")]

        def call() -> object:
            g, beta = rule.delta_gates(*gates)
            return fla.chunk_gated_delta_rule(**qkv, g=g, beta=beta, pool=pool, plan=plan)

        return [call]

    def conv_step(self, batch: int) -> list[Call]:
        s = self.shapes
        turns = self._turns(batch, 2 * s.conv_dim * (s.conv_weight - 1) * BF16.itemsize)
        pool = self.random(batch * len(turns), s.conv_dim, s.conv_weight - 1)
        x, conv_weight = self.random(batch, s.conv_dim), self.random(s.conv_weight, s.conv_dim)
        positions = torch.full((batch,), 9, device=self.device)
        return [
            partial(conv.causal_conv_step, x, pool, conv_weight, slots=slots, positions=positions)
            for slots in turns
        ]

    def kv_bytes(self, tokens: int) -> int:
        shape = self.shapes.attention
        return 2 * tokens * shape.num_kv_heads * shape.head_dim * BF16.itemsize

    def _cache(self, batch: int, context: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values, and block tables of each of several calls, no block twice."""
        shape = self.shapes.attention
        blocks = -(-context // shape.block_size)
        count = copies_for(self.kv_bytes(batch * context), self.device)
        ids = torch.randperm(batch * blocks * count, device=self.device)
        size = len(ids), shape.block_size, shape.num_kv_heads, shape.head_dim
        tables = list(ids.view(count, batch, blocks).unbind(0))
        return [self.random(*size), self.random(*size)], tables

    def decode(self, batch: int, context: int, splits: int, tile: DecodeTile) -> list[Call]:
        caches, tables = self._cache(batch, context)
        q = self.random(batch, self.shapes.attention.num_heads, self.shapes.attention.head_dim)
        positions = torch.full((batch,), context - 1, device=self.device)
        out = torch.empty_like(q)
        where = {"positions": positions, "splits": splits, "tile": tile}
        return [partial(decode, q, *caches, out, block_tables=t, **where) for t in tables]

    def prompt(self, span: tuple[int, int, int], tile: PrefillTile) -> list[Call]:
        batch, start, length = span
        caches, tables = self._cache(batch, start + length)
        shape = self.shapes.attention
        q = self.random(batch * length, shape.num_heads, shape.head_dim)
        spans = [start] * batch, [length] * batch
        sequences = PackedSequences.build(*spans, tile.num_tokens, self.device)
        where = {"sequences": sequences, "tile": tile}
        out = torch.empty_like(q)
        return [partial(prefill, q, *caches, out, block_tables=t, **where) for t in tables[:4]]

    def greedy(self, batch: int, find: Callable[[torch.Tensor], object]) -> list[Call]:
        count = copies_for(batch * self.shapes.vocab * BF16.itemsize, self.device)
        return [partial(find, self.random(batch, self.shapes.vocab)) for _ in range(count)]

    def fused(self, name: str, rows: int) -> list[Call]:
        s, shape = self.shapes, self.shapes.attention
        eps = torch.full((1,), 1e-6, device=self.device)
        x, size = self.random(rows, s.hidden), s.heads * s.head_size
        scale = self.random(s.hidden, dtype=FP32)
        projected = self.random(rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        rotated = shape.num_heads + shape.num_kv_heads
        cache = self.random(rows + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
        angles = self.random(rows, 1, shape.head_dim // 8)
        heads = self.random(rows, s.heads, s.head_size)
        weight = self.random(s.head_size, dtype=FP32)
        attended = self.random(rows, shape.num_heads, shape.head_dim)
        calls: dict[str, Call] = {
            "rms_norm": partial(fused.rms_norm, x, scale, eps),
            "add_rms_norm": partial(fused.add_rms_norm, x, x.clone(), scale, eps),
            "gated_rms_norm": partial(
                fused.gated_rms_norm, heads, self.random(rows, size).view_as(heads), weight, eps
            ),
            "silu_mul": partial(fused.silu_mul, self.random(rows, 2 * s.mlp)),
            "sigmoid_mul": partial(fused.sigmoid_mul, attended, attended.clone()),
            "norm_rotate_write": partial(
                fused.norm_rotate_write,
                projected[:, :rotated],
                projected[:, rotated:],
                scale=self.random(rotated, shape.head_dim, dtype=FP32),
                eps=eps,
                cos=angles,
                sin=angles,
                keys=cache,
                values=cache.clone(),
                kv_slots=torch.randperm(rows * shape.block_size, device=self.device)[:rows],
            ),
        }
        return [calls[name]] * copies_for(1, self.device)


def _autotuners() -> Iterator[triton.runtime.Autotuner]:
    """Of all modules of FLA that are loaded."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for value in list(vars(module).values()):
                while isinstance(value, triton.runtime.KernelInterface):
                    if isinstance(value, triton.runtime.Autotuner):
                        yield value
                    value = getattr(value, "fn", None)
