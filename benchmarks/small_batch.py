"""How near to reading each weight once the products of a decode step come: 0.8B shape, one CUDA graph.

    python benchmarks/small_batch.py [--rows 1 2 4] [--smoke]

All products of a step, each layer with weights of its own (1.5 GB: no cache holds them), with what is fused
into them and without what lies between (convolution, delta rule, attention, sampling): in fused kernels that
start early and that do not, for the first number of rows in several tiles, and as the operations of PyTorch
one by one. Time is of a replay, the median of some, and the bandwidth that of the weights. --smoke: tiny,
on a CPU, in Triton's interpreter, to see that it runs.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

READ_TB = 4.49  # what an H200 reads in a second, measured

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from minivllm_engine.ops.small_batch import reference, tiles, triton  # noqa: E402
from minivllm_engine.ops.small_batch.tiles import Tile  # noqa: E402


@dataclass(frozen=True)
class Shape:
    """Layers with DeltaNet and with attention, heads of each, and the sizes of 0.8B."""

    deltanet: int = 18
    attention: int = 6
    hidden: int = 1024
    wide: int = 3584
    value_heads: tuple[int, int] = (16, 128)
    query_heads: tuple[int, int] = (8, 256)
    kv_heads: int = 2
    vocab: int = 248320


SMOKE = Shape(1, 1, 64, 96, (2, 32), (2, 32), 1, 128)


class Step:
    """Weights and buffers of a decode step of some rows, without what its products do not touch."""

    def __init__(self, shape: Shape, rows: int, device: torch.device) -> None:
        self.shape, self.rows, self.device = shape, rows, device
        hidden, (heads, size) = shape.hidden, shape.value_heads
        query_heads, head_dim = shape.query_heads
        inner, attended = heads * size, query_heads * head_dim
        self.scale = torch.ones(hidden, device=device)
        self.norm_weight = torch.ones(size, device=device)
        self.eps = torch.full((1,), 1e-6, device=device)
        mixers = [(4 * inner + 2 * heads, inner)] * shape.deltanet
        mixers += [(2 * (query_heads + shape.kv_heads) * head_dim, attended)] * shape.attention
        self.layers = [
            (
                self.weight(width, hidden),
                self.weight(hidden, own),
                self.weight(2 * shape.wide, hidden),
                self.weight(hidden, shape.wide),
            )
            for width, own in mixers
        ]
        self.head = self.weight(shape.vocab, hidden)
        self.residual = self.random(rows, hidden)
        self.deltanet, self.attended = self.random(rows, inner), self.random(rows, attended)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(torch.bfloat16)

    def weight(self, num_outputs: int, num_inputs: int) -> torch.Tensor:
        return self.random(num_outputs, num_inputs).mul_(num_inputs**-0.5)

    @property
    def num_bytes(self) -> int:
        return 2 * sum(w.numel() for layer in [*self.layers, (self.head,)] for w in layer)

    def run(self, ops: object, head: bool = True, **options: bool) -> torch.Tensor | None:
        """Each product of the step once, as the operations of a module."""
        norm, residual, inner = (self.scale, self.eps), self.residual, self.deltanet.shape[1]
        for number, (in_proj, out_proj, gate_up, down) in enumerate(self.layers):
            projected = ops.norm_linear(residual, *norm, in_proj, **options)
            if number < self.shape.deltanet:
                x = self.deltanet.unflatten(1, self.shape.value_heads)
                gate = projected[:, 3 * inner : 4 * inner].unflatten(1, self.shape.value_heads)
                own = self.norm_weight, self.eps
                ops.gated_norm_linear_add_(x, gate, *own, out_proj, residual, **options)
            else:
                x = self.attended.unflatten(1, self.shape.query_heads)
                gate = projected[:, : self.attended.shape[1]].view(x.shape)
                ops.sigmoid_gate_linear_add_(x, gate, out_proj, residual, **options)
            opened = ops.norm_linear_swiglu(residual, *norm, gate_up, **options)
            ops.linear_add_(opened, down, residual, **options)
        return ops.norm_linear(residual, *norm, self.head, **options) if head else None

    def products(self) -> None:
        """The same products alone, as torch.mm."""
        for in_proj, out_proj, gate_up, down in self.layers:
            torch.mm(self.residual, in_proj.t())
            own = self.deltanet if out_proj.shape[1] == self.deltanet.shape[1] else self.attended
            torch.mm(own, out_proj.t())
            opened = torch.mm(self.residual, gate_up.t())[:, : down.shape[1]]
            torch.mm(opened, down.t())
        torch.mm(self.residual, self.head.t())


@contextmanager
def chosen_tiles(chosen: tuple[Tile, ...]) -> Iterator[None]:
    before, tiles.TILES = tiles.TILES, chosen
    try:
        yield
    finally:
        tiles.TILES = before


def replay_seconds(launch: Callable[[], object], repeats: int = 15) -> list[float]:
    """Seconds of replays of a graph of what `launch` launches."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    times = []
    for number in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= 3:  # the first ones warm up
            times.append(start.elapsed_time(end) / 1000)
    return times


def report(name: str, seconds: list[float], num_bytes: int) -> None:
    middle = statistics.median(seconds)
    tera = num_bytes / middle / 1e12
    print(
        f"{name:<44} {middle * 1e6:8.1f} us ({min(seconds) * 1e6:.1f} to {max(seconds) * 1e6:.1f})"
        f"  {tera * 1000:6.0f} GB/s  {tera / READ_TB:5.1%}",
        flush=True,
    )


TILE_CHOICES = {
    "half as large": (Tile(4, 1024), Tile(2, 2048), Tile(1, 4096)),
    "twice as large": (Tile(16, 1024), Tile(8, 2048), Tile(4, 4096)),
    "registers as few as it likes": (Tile(8, 1024), Tile(4, 2048), Tile(2, 4096)),
    "narrow": (Tile(8, 512), Tile(4, 1024), Tile(2, 2048)),
    "4 rows at most": (Tile(4, 2048), Tile(2, 4096)),
    "1 row where few": (Tile(8, 1024), Tile(4, 2048), Tile(1, 4096)),
    "8 warps": (Tile(8, 2048, 8), Tile(4, 4096, 8), Tile(2, 4096, 8)),
    "2 warps": (Tile(4, 1024, 2), Tile(2, 2048, 2), Tile(1, 4096, 2)),
}


def measure(step: Step) -> None:
    """The chosen tiles, early and not, beside PyTorch."""
    total = step.num_bytes
    print(f"{step.rows} rows, weights of {total / 1e9:.3f} GB")
    report("torch.mm alone", replay_seconds(step.products), total)
    report("operations of PyTorch", replay_seconds(lambda: step.run(reference)), total)
    for early in (False, True):
        seconds = replay_seconds(lambda early=early: step.run(triton, early=early))
        report(f"fused{', early' if early else ''}", seconds, total)
    seconds = replay_seconds(lambda: step.run(triton, head=False, early=True))
    report("fused, early, without the head", seconds, total - 2 * step.head.numel())


def measure_tiles(step: Step) -> None:
    for name, choice in TILE_CHOICES.items():
        with chosen_tiles(choice):
            report(
                f"fused, early, {name}", replay_seconds(lambda: step.run(triton)), step.num_bytes
            )
    norm = step.scale, step.eps
    for tile in (Tile(8, 1024), Tile(16, 1024), Tile(4, 1024), Tile(16, 1024, 8)):
        seconds = replay_seconds(
            lambda tile=tile: triton.norm_linear(step.residual, *norm, step.head, tile=tile)
        )
        name = f"head alone, {tile.num_outputs} x {tile.num_inputs}, {tile.num_warps} warps"
        report(name, seconds, 2 * step.head.numel())


def check(step: Step) -> float:
    """Largest difference of the logits of fused operations from those of PyTorch, in deviations."""
    start = step.residual.clone()
    fused = step.run(triton)
    step.residual.copy_(start)
    expected = step.run(reference)
    step.residual.copy_(start)
    assert fused is not None and expected is not None
    return float((fused - expected).abs().max() / expected.float().std())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.smoke:
        print(f"largest difference {check(Step(SMOKE, 2, torch.device('cpu'))):.3f} deviations")
        return
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    for rows in arguments.rows:
        step = Step(Shape(), rows, device)
        print(f"largest difference {check(step):.3f} deviations")
        measure(step)
        if rows == arguments.rows[0]:
            measure_tiles(step)
        del step


if __name__ == "__main__":
    main()
