"""Which tiles and splits are fastest: the kernels of one 0.8B layer, inside CUDA graphs, bf16, on one card.

    PYTHONPATH=src python benchmarks/kernels.py [--only step,decode] [--seconds 100] [--jobs 8]
    PYTHONPATH=src TRITON_INTERPRET=1 python benchmarks/kernels.py --smoke

Numbers are microseconds a call, the median of 15 replays of a graph that contains several calls on memory
that takes turns, with TB/s where bytes bound it. Lines marked * are what is chosen now. First everything is
compiled, by several processes at once. `--smoke` does all of it once with tiny shapes on a CPU: it says
nothing about speed.
"""

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import torch
import triton
from kernel_timing import Call, Cell, measure, warm
from kernel_workloads import BF16, FP32, FULL, SMOKE, Workloads

from minivllm_engine.core.errors import BackendUnavailable
from minivllm_engine.ops.attention.tiles import decode_tile, num_splits, prefill_tile
from minivllm_engine.ops.causal_conv import triton as conv
from minivllm_engine.ops.device import device_limits
from minivllm_engine.ops.gated_delta import tiles
from minivllm_engine.ops.sampling import triton as sampling

FUSED = (
    "rms_norm",
    "add_rms_norm",
    "gated_rms_norm",
    "silu_mul",
    "sigmoid_mul",
    "norm_rotate_write",
)
STEP_ROWS = (4, 8, 16, 32)
CONV_CHANNELS = (128, 256, 512)
GREEDY_BLOCKS = (1024, 2048)
PROMPT_TILES = ((64, 32, 4), (128, 32, 8), (128, 64, 8))  # rows, keys, warps


@dataclass(frozen=True)
class Line:
    """Some cells of one variant; `chosen`: it is what the operation does by itself, in some of them."""

    group: str
    name: str
    chosen: bool
    cells: tuple[Cell, ...]


@contextlib.contextmanager
def setting(module: ModuleType, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def under(module: ModuleType, name: str, value: object, call: Call) -> Call:
    """The call, with another choice in place of the operation's own."""

    def changed() -> object:
        with setting(module, name, value):
            return call()

    return changed


def with_setting(module: ModuleType, name: str, value: object, cell: Cell) -> Cell:
    """The cell's calls, with another choice in place of the operation's own."""
    return replace(cell, make=lambda: [under(module, name, value, call) for call in cell.make()])


def step_lines(work: Workloads) -> Iterator[Line]:
    for dtype in (FP32, BF16):
        for rows in STEP_ROWS:
            cells = [
                Cell(f"{n}", partial(work.step, n, dtype), n * work.state_bytes(dtype))
                for n in work.shapes.batches
            ]
            cells = [with_setting(tiles, "STEP_ROWS", rows, cell) for cell in cells]
            name = f"states {str(dtype)[6:]}, {rows} rows"
            yield Line("step", name, rows == tiles.STEP_ROWS, tuple(cells))


def recurrent_lines(work: Workloads) -> Iterator[Line]:
    for rows in STEP_ROWS:
        cells = [Cell(f"{n}x{t}", partial(work.recurrent, n, t)) for n, t in work.shapes.chunks]
        cells = [
            with_setting(tiles, "recurrent_rows", lambda _, rows=rows: rows, cell) for cell in cells
        ]
        chosen = any(rows == tiles.recurrent_rows(n) for n, _ in work.shapes.chunks)
        yield Line("recurrent", f"{rows} rows", chosen, tuple(cells))


def fla_lines(work: Workloads) -> Iterator[Line]:
    cells = [
        Cell(f"1x{t}", partial(work.fla_chunks, t), on_host=True) for t in work.shapes.fla_tokens
    ]
    if work.device.type == "cuda":
        yield Line("fla", "a chunked layer, time of the host", True, tuple(cells))


def conv_lines(work: Workloads) -> Iterator[Line]:
    for channels in CONV_CHANNELS:
        cells = [Cell(f"{n}", partial(work.conv_step, n)) for n in work.shapes.batches]
        cells = [with_setting(conv, "_STEP_CHANNELS", channels, cell) for cell in cells]
        yield Line("conv", f"{channels} channels", channels == conv._STEP_CHANNELS, tuple(cells))


def decode_lines(work: Workloads) -> Iterator[Line]:
    """Splits around what is chosen, and other tiles for that."""
    shape, limits = work.shapes.attention, device_limits(work.device)
    own = decode_tile(shape.head_dim, BF16)
    for n, context in work.shapes.decodes:
        chosen = num_splits(n, shape.num_kv_heads, context, limits)
        some = [(s, own) for s in (chosen // 4, chosen // 2, chosen, chosen * 2) if 1 <= s <= 128]
        some += [
            (chosen, tile)
            for keys in (32, 64)
            for warps in (4, 8)
            if (tile := replace(own, num_keys=keys, num_warps=warps)) != own
        ]
        for splits, tile in some:
            cell = Cell(
                "us", partial(work.decode, n, context, splits, tile), work.kv_bytes(n * context)
            )
            name = f"{n} x {context}: {splits} splits, {tile.num_keys} keys, {tile.num_warps} warps"
            yield Line("decode", name, (splits, tile) == (chosen, own), (cell,))


def prompt_lines(work: Workloads) -> Iterator[Line]:
    shape = work.shapes.attention
    own = prefill_tile(shape, BF16, device_limits(work.device))
    group = shape.num_heads // shape.num_kv_heads
    spans = work.shapes.prompts
    names = [f"{n}x{new}" + f" on {before}" * (before > 0) for n, before, new in spans]
    for rows, keys, warps in PROMPT_TILES:
        tile = replace(own, num_tokens=rows // group, num_rows=rows, num_keys=keys, num_warps=warps)
        cells = [
            Cell(name, partial(work.prompt, span, tile))
            for name, span in zip(names, spans, strict=True)
        ]
        name = f"tiles of {rows} x {keys}, {warps} warps"
        yield Line("prompt", name, tile == own, tuple(cells))


def greedy_lines(work: Workloads) -> Iterator[Line]:
    batches = [n for n in work.shapes.batches if n != 8]
    for block in GREEDY_BLOCKS:
        cells = [
            Cell(f"{n}", partial(work.greedy, n, sampling.greedy), n * work.shapes.vocab * 2)
            for n in batches
        ]
        cells = [with_setting(sampling, "_BLOCK", block, cell) for cell in cells]
        name = f"blocks of {block}"
        yield Line("greedy", name, block == sampling._BLOCK, tuple(cells))
    argmax = partial(torch.argmax, dim=-1)
    cells = [Cell(f"{n}", partial(work.greedy, n, argmax)) for n in batches]
    yield Line("greedy", "torch.argmax alone", False, tuple(cells))


def fused_lines(work: Workloads) -> Iterator[Line]:
    for name in FUSED:
        cells = [
            Cell(f"{n}", partial(work.fused, name, n))
            for n in (work.shapes.batches[0], work.shapes.batches[-1])
        ]
        yield Line("fused", name, True, tuple(cells))


GROUPS = {
    "step": step_lines,
    "recurrent": recurrent_lines,
    "decode": decode_lines,
    "prompt": prompt_lines,
    "conv": conv_lines,
    "greedy": greedy_lines,
    "fused": fused_lines,
    "fla": fla_lines,
}


def all_lines(work: Workloads, groups: Sequence[str]) -> list[Line]:
    return [line for group in groups for line in GROUPS[group](work)]


def text(cell: Cell, microseconds: float) -> str:
    figure = f"{cell.column} {microseconds:.1f}" if cell.column != "us" else f"{microseconds:.1f}"
    if cell.num_bytes:
        figure += f" ({cell.num_bytes / microseconds / 1e6:.2f})"
    return figure


def compile_ahead(jobs: int, groups: Sequence[str], limit: float) -> None:
    """By processes that each warm up their share of the lines: what they compile is kept on disk."""
    command = [sys.executable, __file__, "--only", ",".join(groups), "--jobs", str(jobs)]
    workers = [subprocess.Popen([*command, "--compile", str(job)]) for job in range(jobs)]
    ends = time.monotonic() + limit
    for worker in workers:
        try:
            worker.wait(max(ends - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def print_lines(lines: Sequence[Line], device: torch.device, ends: float) -> int:
    """The table, as far as time allows. Returns how many lines were left out."""
    group, left_out = "", 0
    for line in lines:
        if time.monotonic() > ends:
            left_out += 1
            continue
        if line.group != group:
            group = line.group
            print(f"{group}: us" + ", (TB/s)" * any(cell.num_bytes for cell in line.cells))
        try:
            figures = [text(cell, measure(cell, device)) for cell in line.cells]
        except BackendUnavailable as error:
            figures = [error.what]
        print(f"  {'*' if line.chosen else ' '} {line.name:44} {'  '.join(figures)}", flush=True)
    return left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, once, on a CPU")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, with commas between")
    parser.add_argument("--seconds", type=float, default=100, help="to end within, roughly")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument(
        "--compile", type=int, metavar="JOB", help="compile this share, and no more"
    )
    options = parser.parse_args()
    groups = options.only.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"no such group: {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    started = time.monotonic()
    if not options.smoke and not torch.cuda.is_available():
        parser.error("no CUDA device; --smoke runs without one")
    if options.smoke and not triton.knobs.runtime.interpret:
        parser.error("--smoke needs TRITON_INTERPRET=1 in the environment")
    device = torch.device("cpu" if options.smoke else "cuda")
    work = Workloads(SMOKE if options.smoke else FULL, device)
    torch.manual_seed(0)
    lines = all_lines(work, groups)
    if options.compile is not None:
        for line in lines[options.compile :: options.jobs]:
            with contextlib.suppress(BackendUnavailable):
                # The same kernels serve all cells of a line, but FLA's, which are chosen by length.
                for cell in line.cells if line.group == "fla" else line.cells[:1]:
                    warm(cell)
        return
    where = "interpreter" if options.smoke else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, Triton {triton.__version__}, bf16")
    if not options.smoke:
        compile_ahead(options.jobs, groups, options.seconds / 2)
        print(f"compiled in {time.monotonic() - started:.0f} s")
    left_out = print_lines(lines, device, started + options.seconds)
    if left_out:
        print(f"{left_out} lines were left out: {options.seconds:.0f} s were over (--seconds)")
    print(f"{time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    main()
