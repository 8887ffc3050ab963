"""The adapters to FlashAttention, of flash-attn and of torch, with stand-ins: the libraries need a card."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from minivllm_engine.core.errors import BackendUnavailable, ConfigError
from minivllm_engine.ops.attention import flash
from minivllm_engine.ops.attention.reference import KVShape
from support import flash_stand_in
from support.kernel_checks import assert_close
from support.kernel_checks.attention import expected_of, make_case, queries_of

SHAPE = KVShape(256, 4, 2, 16)
DECODES = [(0, 1), (255, 1), (256, 1), (600, 1)]
CHUNKS = [(0, 65), (200, 130), (255, 2), (0, 300)]
BATCHES = {"decodes": DECODES, "chunks": CHUNKS, "mixed": DECODES + CHUNKS}


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("flash_attn")
    module.__version__ = "2.8.3.post2"
    module.flash_attn_varlen_func = flash_stand_in.flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_stand_in.flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    flash._flash_attention.cache_clear()
    yield module
    flash._flash_attention.cache_clear()


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spans", BATCHES.values(), ids=BATCHES)
def test_flash_attn_gets_what_it_takes(spans: list[tuple[int, int]], dtype: torch.dtype) -> None:
    case = make_case(SHAPE, spans, dtype)
    plan = flash.FlashAttentionPlan.build(case.batch, SHAPE, dtype)
    out = flash.paged_attention(queries_of(case), case.keys, case.values, plan)
    assert_close(out, expected_of(case), f"attention over {spans}")


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize(
    ("shape", "dtype", "what", "remedy"),
    [
        (replace(SHAPE, block_size=64), torch.float16, "64", "cache.block_size=256"),
        (SHAPE, torch.float32, "float32", "engine.dtype=bf16"),
        (replace(SHAPE, head_dim=264), torch.float16, "264", "attention_backend=triton"),
        (replace(SHAPE, head_dim=20), torch.float16, "20", "attention_backend=triton"),
    ],
    ids=["blocks", "dtype", "head too large", "head of no grain"],
)
def test_what_flash_attn_does_not_take_is_named_with_a_remedy(
    shape: KVShape, dtype: torch.dtype, what: str, remedy: str
) -> None:
    batch = make_case(SHAPE, DECODES, torch.float16).batch
    with pytest.raises(ConfigError) as caught:
        flash.FlashAttentionPlan.build(batch, shape, dtype)
    assert what in caught.value.what and remedy in caught.value.hint
    assert "triton" in caught.value.hint


@pytest.mark.parametrize("version", ["2.7.4.post1", "3.0.0b1", "1.0.9", "unknown"])
def test_another_version_of_flash_attn_is_refused(flash_attn: ModuleType, version: str) -> None:
    flash_attn.__version__ = version
    with pytest.raises(BackendUnavailable) as caught:
        flash.check_flash(SHAPE, torch.float16)
    assert version in caught.value.why and "pip install 'flash-attn>=2.8,<3'" in caught.value.hint


def test_later_versions_of_flash_attn_2_are_taken(flash_attn: ModuleType) -> None:
    flash_attn.__version__ = "2.10.0"
    flash.check_flash(SHAPE, torch.bfloat16)


def test_a_missing_flash_attn_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    flash._flash_attention.cache_clear()
    with pytest.raises(BackendUnavailable) as caught:
        flash.check_flash(SHAPE, torch.float16)
    assert "--no-build-isolation" in caught.value.hint and "flash_attn" in caught.value.why
