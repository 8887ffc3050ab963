"""Writing one safetensors file tensor by tensor, so that no more than one is in memory.

Format: see `safetensors_header`. `safetensors.torch.save_file` wants all tensors of a file at once.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from minivllm_engine.conversion.durable import sync_directory
from minivllm_engine.conversion.plan import TargetTensor
from minivllm_engine.conversion.targets import LONG_DTYPES

_BLOCK = 1 << 24


def write_shard(
    file: Path,
    targets: Iterable[TargetTensor],
    tensors: Iterable[torch.Tensor],
    advance: Callable[[int], None],
) -> tuple[int, str]:
    """Write `file` under a temporary name, force it to the disk, and rename it.

    Args:
        targets: what the header says, in the order of the data.
        tensors: their values in the same order; each is asked for when its turn comes.
        advance: called with the bytes of each block of a tensor that was written.

    Returns:
        Bytes of the file, and its SHA-256.
    """
    temporary = file.with_name(file.name + ".tmp")
    digest, size = hashlib.sha256(), 0
    with temporary.open("wb", buffering=0) as stream:
        targets = list(targets)
        header = _header(targets)
        digest.update(header)
        size += stream.write(header)
        for target, tensor in zip(targets, tensors, strict=True):
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            assert len(data) == target.num_bytes, f"{target.name} is not what the plan says"
            for start in range(0, len(data), _BLOCK):
                block = data[start : start + _BLOCK]
                digest.update(block)
                written = 0
                while written < len(block):
                    written += stream.write(block[written:])
                advance(len(block))
            size += len(data)
        os.fsync(stream.fileno())
    os.replace(temporary, file)
    sync_directory(file.parent)
    return size, digest.hexdigest()


def _header(targets: list[TargetTensor]) -> bytes:
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for target in targets:
        content[target.name] = {
            "dtype": LONG_DTYPES[target.dtype],
            "shape": list(target.shape),
            "data_offsets": [offset, offset + target.num_bytes],
        }
        offset += target.num_bytes
    raw = json.dumps(content, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw
