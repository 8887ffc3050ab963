"""What an engine takes of the card is what was planned: weights, pools and graphs."""

import pytest
import torch

from minivllm_engine.runner.cuda_graph_runner import CudaGraphRunner
from support.device_engine import GIB, Rig
from support.engine_checks import greedy_params
from support.on_card import needs_card

pytestmark = needs_card


@pytest.fixture
def reserved_by_capture(monkeypatch) -> list[int]:
    """What torch reserved while graphs were captured: other tests on the card do not show in it."""
    found, capture = [], CudaGraphRunner.capture

    def measured(self, *args) -> None:
        before = torch.cuda.memory_reserved()
        capture(self, *args)
        torch.cuda.synchronize()
        found.append(torch.cuda.memory_reserved() - before)

    monkeypatch.setattr(CudaGraphRunner, "capture", measured)
    return found


def test_what_is_allocated_agrees_with_the_plan(tiny_model, rig: Rig, reserved_by_capture) -> None:
    """Pools of 6 GiB, so that a hundredth of them is more than the libraries' own scratch memory."""
    # The library's workspace of this stream is there before and after.
    torch.mm(*torch.ones(2, 64, 64, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with rig.engine(tiny_model, num_blocks=6 * GIB // 8192, share=12 * GIB, poisoned=False) as llm:
        plan = llm._plan
        allocated = torch.cuda.memory_allocated() - allocated
        reserved = torch.cuda.memory_reserved() - reserved
        rows = {row.name: row.num_bytes for row in plan.rows(from_headers=True)}
        actual = llm.allocated_bytes()
        for name in ("state slots", "snapshots", "KV blocks"):
            assert actual[name] == rows[name], name
        assert actual["weights"] == pytest.approx(rows["weights"], rel=0.01)
        pools = plan.weight_bytes + plan.pool_bytes
        text = (
            f"weights and pools {pools:,} planned, {allocated:,} allocated, {reserved:,} reserved"
        )
        assert 0.99 * pools <= allocated <= 1.01 * pools, text
        (graphs,) = reserved_by_capture
        assert 0.99 * pools <= reserved <= 1.01 * pools + graphs, f"{text}, {graphs:,} by graphs"
        assert graphs <= plan.graph_bytes, f"{graphs:,} by graphs, {plan.graph_bytes:,} planned"


def test_d9_steps_after_the_capture_stay_within_the_plan(tiny_model, rig: Rig) -> None:
    """The largest step that the plan allows, after graphs: no more than weights, pools and activations."""
    with rig.engine(tiny_model, max_num_batched_tokens=2048) as llm:
        plan = llm._plan
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        prompts = [[i] * 256 for i in range(8)]
        outs = llm.generate(prompts, greedy_params(20))
        assert not any(out.error for out in outs)
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= plan.activation_bytes, f"{peak:,}, {plan.activation_bytes:,} planned"


def test_closing_gives_the_memory_back(tiny_model, rig: Rig) -> None:
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    llm = rig.engine(tiny_model, num_blocks=100_000)
    llm.add_request([1, 2, 3], greedy_params(50))
    for _ in range(5):
        llm.step()
    held = torch.cuda.memory_allocated() - before
    assert held > 700 << 20
    llm.close()
    # The workspaces of the libraries stay. Kept segments would be too small for the next engine's pools.
    assert torch.cuda.memory_allocated() - before < 80 << 20
    assert torch.cuda.memory_reserved() - reserved < 120 << 20


def test_e15_out_of_memory_ends_one_request_only(tiny_model, rig: Rig, monkeypatch) -> None:
    """torch's own error, in the middle of a batch and with a step in flight."""
    prompts = [[i + 1] * (9 + i) for i in range(4)]
    with rig.engine(tiny_model) as llm:
        runner = llm._loop.open_runner()
        run = runner.run
        expected = llm.generate(prompts, greedy_params(12))
        llm.clear_cache()

        def greedy_for_memory(batch, awaited):
            output = run(batch, awaited)
            for sequence in batch.sequences:
                request = sequence.request
                at = sequence.start + sequence.length - len(request.prompt_ids)
                if request.prompt_ids[0] == 3 and at == 4:
                    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            return output

        monkeypatch.setattr(runner, "run", greedy_for_memory)
        outs = llm.generate(prompts, greedy_params(12))
        bad = outs.pop(2)
        assert bad.error is not None and "out of memory" in bad.error.what
        del expected[2]
        for out, other in zip(outs, expected, strict=True):
            assert out.outputs[0].token_ids == other.outputs[0].token_ids
        monkeypatch.undo()
        assert llm.generate(prompts, greedy_params(12))[2].error is None
        llm.check_integrity()
