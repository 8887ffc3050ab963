"""Logits of the 0.8B shape against transformers, with random weights whose state lasts. Eager, no prefix
cache; prompts of 65, 200 and 3 tokens side by side and alone, and 8 tokens more one by one.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minivllm_engine.core.config import EngineOptions
from minivllm_engine.ops.attention.reference import KVShape
from minivllm_engine.ops.choice import choose_operations
from minivllm_engine.ops.operations import Operations
from support.engine_checks.logits import Case, flat_config
from support.on_card import needs_card
from support.qwen35_08b import CONFIG

pytestmark = needs_card

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    path: Path = tmp_path_factory.mktemp("shape") / "0.8b"
    yield Case.make(path, flat_config(CONFIG), [65, 200, 3], device="cuda")
    for file in path.iterdir():
        file.unlink()


def operations(dtype: torch.dtype, **options: str) -> Operations:
    return choose_operations(CUDA, EngineOptions(**options), KVShape(16, 8, 2, 256), dtype)


def test_in_fp32(case: Case) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    chosen = operations(torch.float32, gated_delta_prefill="reference")
    case.check_fp32(chosen, tolerance=5e-4)


def test_in_fp32_with_the_chunked_rule_of_fla(case: Case) -> None:
    """FLA multiplies in TF32."""
    case.check_tf32(operations(torch.float32))


def test_in_bf16(case: Case) -> None:
    case.check_bf16(operations(torch.bfloat16))
