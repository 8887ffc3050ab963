"""What loading a model took: seconds of its phases, and the memory of its CUDA graphs as it was measured."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How an engine came up. Seconds; bytes.

    Attributes:
        weights_s: reading the weights and placing them.
        compile_s: compiling kernels.
        capture_s: capturing graphs.
        graph_sizes: batch sizes that have a graph; empty without graphs.
        graph_bytes: what the graphs hold, measured.
        graph_bytes_planned: what the memory plan had reserved for them.
    """

    weights_s: float
    compile_s: float
    capture_s: float
    graph_sizes: tuple[int, ...]
    graph_bytes: int
    graph_bytes_planned: int
