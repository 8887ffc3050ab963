"""What a device does, measured: how fast it reads its memory, and how much of it was in use at most."""

import time

import torch

_CPU_BYTES, _CUDA_BYTES = 256 << 20, 2 << 30
_ROUNDS = 7


def read_bandwidth(device: str) -> float:
    """Return bytes a second at which `device` ("cpu" or "cuda") reads a buffer larger than its caches.

    The best of several sums over the buffer, which is released before this returns.
    """
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        size = min(_CUDA_BYTES, free // 4)
    else:
        size = _CPU_BYTES
    buffer = torch.zeros(size // 4, dtype=torch.float32, device=device)
    seconds = [_read(buffer, device) for _ in range(_ROUNDS)]
    num_bytes = buffer.nbytes
    del buffer
    if device == "cuda":
        torch.cuda.empty_cache()
    return num_bytes / min(seconds)


def _read(buffer: torch.Tensor, device: str) -> float:
    if device != "cuda":
        began = time.perf_counter()
        buffer.sum()
        return time.perf_counter() - began
    began_at, ended_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began_at.record()
    buffer.sum()
    ended_at.record()
    ended_at.synchronize()
    return float(began_at.elapsed_time(ended_at)) / 1000


def reset_peak_memory(device: str) -> None:
    """Begin to look for the peak anew. On a CPU there is nothing to reset."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: str) -> int | None:
    """Return bytes that tensors held at most since `reset_peak_memory`; None on a CPU: not known."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def num_threads() -> int:
    """Return threads that compute on the CPU."""
    return torch.get_num_threads()
