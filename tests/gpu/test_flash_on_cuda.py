"""flash-attn itself, where it is installed: against the reference over poisoned memory, and in an engine.

Elsewhere the adapter is tested with a stand-in that has flash-attn's signatures.
"""

from collections.abc import Iterator

import pytest
import torch

from minivllm_engine import LLM
from minivllm_engine.ops.attention import flash
from minivllm_engine.ops.attention.reference import KVShape
from support.device_engine import Rig
from support.engine_checks import greedy_params
from support.kernel_checks import assert_close
from support.kernel_checks.attention import batch_on, expected_of, make_case, queries_of
from support.on_card import needs_card
from support.oracle import Oracle, agrees

pytest.importorskip("flash_attn", reason="flash-attn is not installed")
pytestmark = needs_card

CUDA = torch.device("cuda")
# The heads of the 0.8B and 4B shapes and of the demo model.
SHAPES = {
    "8_of_2": KVShape(256, 8, 2, 256),
    "16_of_4": KVShape(256, 16, 4, 256),
    "demo": KVShape(512, 4, 2, 64),
}
DECODES = [(0, 1), (255, 1), (256, 1), (600, 1), (4095, 1)]
CHUNKS = [(0, 65), (200, 130), (255, 2), (0, 500), (3000, 64)]
BATCHES = {"decodes": DECODES, "chunks": CHUNKS, "mixed": DECODES + CHUNKS}
NEW_TOKENS = 24


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spans", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_as_the_reference(shape: KVShape, spans: list[tuple[int, int]], dtype: torch.dtype) -> None:
    case = make_case(shape, spans, dtype)
    plan = flash.FlashAttentionPlan.build(batch_on(case, CUDA), shape, dtype)
    q, keys, values = (x.to(CUDA) for x in (queries_of(case), case.keys, case.values))
    out = flash.paged_attention(q, keys, values, plan)
    assert_close(out, expected_of(case), f"attention over {spans}")


@pytest.fixture(scope="module")
def llm(rig: Rig) -> Iterator[LLM]:
    """The demo model in bf16 over blocks of 256, its pools full of NaN, graphs of 1, 2, 4 and 8."""
    options = {"dtype": "bf16", "attention_backend": "flash"}
    with rig.engine("demo", block_size=256, num_blocks=40, **options) as llm:
        yield llm


@pytest.mark.parametrize("graphs", [True, False], ids=["graph", "eager"])
def test_answers_of_the_demo_model(llm: LLM, graphs: bool) -> None:
    """Prompts of 5, 255, 256, 257 and 700 tokens, twice: the second time from the prefix cache.

    bf16 against fp32 on the CPU: where the best two tokens lie within 0.5, either is right.
    """
    oracle = Oracle("demo", NEW_TOKENS, device="cpu")
    text = llm.tokenizer.encode("A word is defined by what it is used for. " * 100)
    prompts = [text[:length] for length in (5, 255, 256, 257, 700)]
    llm.use_graphs(graphs)
    llm.clear_cache()
    for _ in range(2):
        outs = llm.generate(prompts, greedy_params(NEW_TOKENS))
        assert not any(out.error for out in outs)
        ties = sum(
            not agrees(out.outputs[0], oracle(prompt), tie=0.5, tolerance=0.5)
            for out, prompt in zip(outs, prompts, strict=True)
        )
        assert ties <= 1
    assert outs[-1].usage.cached_tokens >= 512
