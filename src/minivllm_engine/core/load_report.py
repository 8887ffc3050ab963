"""What starting an engine took."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Seconds of the phases of a start, and what CUDA graphs took of the device's memory.

    Attributes:
        graph_sizes: batch sizes that were captured; () where there are no graphs.
        graph_bytes: measured. graph_bytes_planned: what the memory plan had kept for them.
    """

    weights_s: float = 0.0
    compile_s: float = 0.0
    capture_s: float = 0.0
    graph_sizes: tuple[int, ...] = ()
    graph_bytes: int = 0
    graph_bytes_planned: int = 0
