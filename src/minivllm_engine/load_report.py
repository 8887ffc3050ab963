"""What starting an engine took."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Phases of the start-up, in seconds, and what the CUDA graphs keep, in bytes.

    Attributes:
        compile_s: kernels that were compiled or tuned before the first request.
        capture_s: of all graphs together.
        graph_sizes: batch sizes with a graph; () where there are none.
        graph_bytes: measured; graph_bytes_planned is what the memory plan had reserved for them.
    """

    weights_s: float = 0.0
    compile_s: float = 0.0
    capture_s: float = 0.0
    graph_sizes: tuple[int, ...] = ()
    graph_bytes: int = 0
    graph_bytes_planned: int = 0
