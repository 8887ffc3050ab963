"""Values that a type cannot hold, wherever they get there: named with their number, and with a way out."""

from pathlib import Path

import pytest
import torch

from minivllm_engine.conversion import check, open_source, reader
from minivllm_engine.core.errors import CheckpointError, ConversionError
from support.converted import convert_to
from support.packed_runner import load_model
from support.tiny_checkpoint import random_tensors, tiny_config, write_checkpoint

CONFIG = tiny_config()
REFERENCE = random_tensors(CONFIG)
MATRIX, VECTOR = "model.layers.2.mlp.up_proj.weight", "model.layers.0.linear_attn.A_log"


def with_value(name: str, value: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {key: tensor.to(dtype, copy=True) for key, tensor in REFERENCE.items()}
    tensors[name].view(-1)[1:3] = value
    return tensors


CASES = [
    # tensor, value, stored as, asked for, what cannot hold it (None: it can)
    (MATRIX, 1e300, torch.float64, "keep", "fp32"),
    (MATRIX, -1e300, torch.float64, "fp32", "fp32"),
    (MATRIX, 1e300, torch.float64, "bf16", "bf16"),
    (MATRIX, 1e300, torch.float64, "fp16", "fp16"),
    (MATRIX, 1e30, torch.float64, "keep", None),
    (MATRIX, 1e30, torch.float64, "bf16", None),
    (MATRIX, 3.4e38, torch.float32, "bf16", "bf16"),  # rounds up to infinity
    (MATRIX, 1e30, torch.float32, "keep", None),
    (MATRIX, -7e4, torch.float32, "fp16", "fp16"),
    (MATRIX, 3.4e38, torch.float32, "fp16", "fp16"),
    (MATRIX, 3.4e38, torch.float64, "bf16", "bf16"),
    (MATRIX, 2.0**17, torch.bfloat16, "fp16", "fp16"),
    (VECTOR, 1e300, torch.float64, "keep", "fp32"),  # kept in fp32 whatever is asked for
    (VECTOR, 1e39, torch.float64, "bf16", "fp32"),
    (VECTOR, 7e4, torch.float32, "fp16", None),
    ("model.norm.weight", 1e300, torch.float64, "bf16", "fp32"),  # a vector keeps its type, fp64
]


@pytest.mark.parametrize(("name", "value", "stored", "asked", "too_large_for"), CASES)
def test_values_beyond_a_types_range(
    name: str,
    value: float,
    stored: torch.dtype,
    asked: str,
    too_large_for: str | None,
    tmp_path: Path,
) -> None:
    src = write_checkpoint(tmp_path / "src", CONFIG, with_value(name, value, stored))
    dst = tmp_path / "dst"
    if too_large_for is None:
        convert_to(src, dst, dtype=asked)
        assert check(open_source(src), dst).ok
        load_model(dst)
        return
    with pytest.raises(ConversionError) as caught:
        convert_to(src, dst, dtype=asked)
    assert caught.value.code == "non_finite"
    assert caught.value.why is not None and caught.value.why.startswith(
        f"{name} (2 values too large for {too_large_for}: up to {abs(value):.3g}, "
    )
    hint = str(caught.value.hint)
    assert ("--dtype keep" in hint) == (abs(value) < 3.402e38)
    # Where nothing helps, that is said: of which tensor, which value, and what would have to be done.
    hopeless = f"No dtype has room for {abs(value):.3g}" in hint and f"Correct {name} in" in hint
    assert hopeless == (abs(value) > 3.402e38)
    for dtype in ("keep", "bf16", "fp32"):
        if f"--dtype {dtype}" in hint:
            convert_to(src, tmp_path / dtype, dtype=dtype)
    # Nothing is in the way of the next run.
    assert not (tmp_path / "dst.partial").exists()
    good = write_checkpoint(tmp_path / "src", CONFIG, REFERENCE)
    convert_to(good, dst, dtype=asked)


@pytest.mark.parametrize("earlier", ["nothing", "interrupted"])
def test_a_final_refusal_leaves_nothing_behind(earlier: str, tmp_path: Path) -> None:
    """Also of shards that an earlier, interrupted run had finished."""
    src = write_checkpoint(
        tmp_path / "src", CONFIG, with_value(MATRIX, float("nan"), torch.float32)
    )
    options = {"max_shard_bytes": 100_000}

    def stop(step) -> None:
        if step.phase == "write" and step.shard == 3:
            raise KeyboardInterrupt

    if earlier == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            convert_to(src, tmp_path / "dst", progress=stop, **options)
    for resume in (earlier == "interrupted", False, True):
        with pytest.raises(ConversionError, match="not finite; nothing is published") as caught:
            convert_to(src, tmp_path / "dst", resume=resume, **options)
        assert "--overwrite" not in str(caught.value.hint)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]
    convert_to(write_checkpoint(tmp_path / "src", CONFIG, REFERENCE), tmp_path / "dst", **options)


@pytest.mark.parametrize(
    ("value", "stored", "loaded", "words"),
    [
        (1e300, torch.float64, torch.float32, ("as float32", "1e+300", "nothing wider than fp32")),
        (7e4, torch.float32, torch.float16, ("as float16", "7e+04", "--dtype fp32")),
        (3.4e38, torch.float32, torch.bfloat16, ("as bfloat16", "--dtype fp32")),
        (float("nan"), torch.float32, torch.float16, ("are not finite\n", "training")),
    ],
)
def test_the_loader_looks_at_what_the_model_gets(
    value: float, stored: torch.dtype, loaded: torch.dtype, words: tuple[str, ...], tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path, CONFIG, with_value(MATRIX, value, stored))
    with pytest.raises(CheckpointError) as caught:
        load_model(path, loaded)
    assert MATRIX in caught.value.what
    for word in words:
        assert word in str(caught.value)


def test_counting() -> None:
    wide = torch.tensor([1.0, 1e300, -1e300, float("nan")], dtype=torch.float64)
    assert reader.count_non_finite(wide) == 3
    assert reader.count_non_finite(wide, torch.float64) == 1
    assert reader.largest_finite(wide) == 1e300
    assert reader.largest_finite(torch.tensor([float("-inf"), -2.0])) == 2.0
    assert reader.count_non_finite(torch.zeros(0)) == 0
