"""What can only be seen while no other process uses the card: skipped while others do, other tests too.

PYTHONPATH=src python -m pytest -p no:xdist tests/gpu/test_alone_on_the_card.py
"""

import os

import pytest
import torch

from minivllm_engine import LLM, EngineConfig, SamplingParams
from minivllm_engine.engine.prepare import prepare_random
from support.on_card import needs_card, others_on_card

pytestmark = needs_card


@pytest.fixture
def alone() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("tests run side by side")
    if others_on_card():
        pytest.skip("another process holds memory of this card")


@pytest.mark.usefixtures("alone")
def test_d9_a_start_at_nine_tenths_leaves_memory_free() -> None:
    """0.8B shape, bf16, default sizes: free memory after the start, and after long prompts and decodes."""
    config = EngineConfig.create(engine={"device": "cuda", "gpu_memory_utilization": 0.9})
    with LLM(prepare_random("0.8b", config)) as llm:
        report, plan = llm.load_report, llm._plan
        free, total = torch.cuda.mem_get_info()
        assert total - free <= 0.92 * total, f"{total - free:,} of {total:,} in use"
        measured = f"graphs took {report.graph_bytes:,}, planned {report.graph_bytes_planned:,}"
        assert report.graph_bytes <= report.graph_bytes_planned == plan.graph_bytes, measured
        params = SamplingParams(temperature=0.9, max_tokens=20, ignore_eos=True)
        prompts = [[i + 1] * (4096 if i < 8 else 33) for i in range(plan.max_num_seqs)]
        outs = llm.generate(prompts, params)
        assert not any(out.error for out in outs)
        after = torch.cuda.mem_get_info()[0]
        assert after > 0.05 * total, f"{after:,} of {total:,} left"
        print(f"{measured}; free {free:,} after the start, {after:,} after the work")
