"""Times of calls on a card: inside a CUDA graph, as the engine makes them, or as the host sees them."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

REPLAYS = 15
# What a call has read must have left the card's cache until it is read again.
_BYTES_IN_TURN = 160 * 2**20
_MOST_COPIES = 48


def copies_for(num_bytes: int, device: torch.device) -> int:
    """How many copies of what a call reads and writes, of so many bytes, should take turns."""
    if device.type == "cpu":
        return 1
    return max(2, min(_MOST_COPIES, _BYTES_IN_TURN // max(num_bytes, 1)))


@dataclass(frozen=True)
class Cell:
    """One number of the table: what is to be timed is made when its turn comes.

    Attributes:
        make: gives calls that do the same with other memory.
        column: its name in its line.
        num_bytes: that a call has to move, if that is what bounds it; decides on TB/s.
        on_host: time until a call returns, instead of until the card is done.
    """

    column: str
    make: Callable[[], Sequence[Call]]
    num_bytes: int = 0
    on_host: bool = False


@torch.inference_mode()
def warm(cell: Cell) -> None:
    """Compile what it needs."""
    for call in cell.make()[:1]:
        call()


@torch.inference_mode()
def measure(cell: Cell, device: torch.device) -> float:
    """Microseconds a call, the median of some repetitions."""
    calls = cell.make()
    if device.type == "cpu":
        return _host_seconds(calls) * 1e6
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    if cell.on_host:
        return _host_seconds(calls, torch.cuda.synchronize) * 1e6
    return _graph_seconds(calls) * 1e6


def _host_seconds(calls: Sequence[Call], wait: Call | None = None) -> float:
    times = []
    for _ in range(REPLAYS if wait else 1):
        for call in calls:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
            if wait:
                wait()
    return statistics.median(times)


def _graph_seconds(calls: Sequence[Call]) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [first.elapsed_time(then) for first, then in itertools.pairwise(marks)]
    return statistics.median(times) / 1e3 / len(calls)
