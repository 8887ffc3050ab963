"""The tensors that are written: their types and sizes, and which file each goes to."""

import math
from collections import defaultdict
from collections.abc import Iterable

from minivllm_engine.checkpoint.safetensors_header import FLOAT_TYPES
from minivllm_engine.conversion.layouts import Layouts
from minivllm_engine.conversion.matching import Match, is_protected
from minivllm_engine.conversion.options import ConvertOptions
from minivllm_engine.conversion.plan import Shard, TargetTensor, file_name

# The short words of this project for the types of safetensors.
SHORT_DTYPES = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}
LONG_DTYPES = {short: long for long, short in SHORT_DTYPES.items()}


def target_tensors(
    found: Iterable[Match], layouts: Layouts, options: ConvertOptions
) -> tuple[TargetTensor, ...]:
    """Every target that a match gives something of, in the order of the model."""
    dtypes: defaultdict[str, set[str]] = defaultdict(set)
    fp32: set[str] = set()
    for match in found:
        for piece in match.pieces:
            dtypes[piece.target].add(SHORT_DTYPES[match.tensor.entry.dtype])
            # 1 + w in 16 bits is exact in fp32 only after 1 is taken off.
            if is_protected(match.rule) or piece.transform == "minus_one":
                fp32.add(piece.target)
    targets = []
    for name, shape in layouts.expected.items():
        if name not in dtypes:
            continue
        kept = name in fp32
        dtype = "fp32" if kept else _dtype(dtypes[name], len(shape), options)
        size = math.prod(shape) * FLOAT_TYPES[LONG_DTYPES[dtype]]
        targets.append(TargetTensor(name, dtype, shape, size, kept))
    return tuple(targets)


def main_dtype(targets: Iterable[TargetTensor]) -> str:
    """The type that most bytes are stored in."""
    sizes: defaultdict[str, int] = defaultdict(int)
    for target in targets:
        sizes[target.dtype] += target.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="fp32")


def split_shards(targets: Iterable[TargetTensor], max_bytes: int) -> tuple[Shard, ...]:
    """Fill files with whole tensors, in order, up to `max_bytes` each.

    In a file, wide types come first: so every tensor is aligned, as readers that map it want.
    """
    files: list[list[TargetTensor]] = []
    room = 0
    for target in targets:
        if target.num_bytes > room or not files:
            files.append([])
            room = max_bytes
        files[-1].append(target)
        room -= target.num_bytes
    return tuple(
        Shard(
            file_name(i, len(files)),
            tuple(
                t.name for t in sorted(tensors, key=lambda t: -FLOAT_TYPES[LONG_DTYPES[t.dtype]])
            ),
            sum(t.num_bytes for t in tensors),
        )
        for i, tensors in enumerate(files)
    )


def _dtype(given: set[str], num_dims: int, options: ConvertOptions) -> str:
    if options.dtype != "keep" and num_dims > 1:
        return options.dtype
    if len(given) == 1:
        return next(iter(given))
    return "fp64" if "fp64" in given else "fp32"
