"""Group D: steps by CUDA graph. Tiny model in fp32, pools full of NaN, graphs of 1, 2, 4 and 8."""

from collections.abc import Iterator

import pytest

from minivllm_engine import LLM, ConfigError
from support.device_engine import Rig
from support.engine_checks import graphs, greedy_params
from support.on_card import needs_card
from support.oracle import Oracle, agrees

pytestmark = needs_card


@pytest.fixture(scope="module")
def llm(tiny_model, rig: Rig) -> Iterator[LLM]:
    with rig.engine(tiny_model) as llm:
        yield llm


@pytest.fixture(scope="module")
def larger(tiny_model, rig: Rig) -> Iterator[LLM]:
    """Twelve slots, graphs up to 8."""
    with rig.engine(tiny_model, max_num_seqs=12) as llm:
        yield llm


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_d1_idle_slots_keep_their_bits(llm: LLM, count: int) -> None:
    graphs.check_idle_slots(llm, count)


def test_d3_requests_that_end_one_by_one(llm: LLM, oracle: Oracle) -> None:
    graphs.check_one_by_one(llm, oracle)


def test_d4_every_batch_size(larger: LLM) -> None:
    graphs.check_batch_sizes(larger, range(1, 13))


def test_d6_padding_lanes_have_a_length(llm: LLM) -> None:
    graphs.check_padding_lanes(llm)


def test_d7_one_warning_above_the_largest_graph(larger: LLM, caplog) -> None:
    graphs.check_beyond_the_largest_graph(larger, caplog)


def test_f11_slots_that_lie_apart(llm: LLM) -> None:
    graphs.check_fragmented_slots(llm)


def test_the_graphs_that_were_captured_are_told(llm: LLM, larger: LLM) -> None:
    for engine, sizes in ((llm, (1, 2, 4, 8)), (larger, (1, 2, 4, 8))):
        report = engine.load_report
        assert engine.device == "cuda"
        assert engine.graph_sizes == report.graph_sizes == sizes
        assert min(report.weights_s, report.compile_s, report.capture_s) > 0
        assert report.graph_bytes_planned == engine._plan.graph_bytes > 0


def test_graphs_can_be_switched_off_and_on(llm: LLM) -> None:
    decodes = llm._loop.open_runner().graphs
    for enabled in (False, True):
        llm.use_graphs(enabled)
        assert decodes.enabled is enabled
        assert llm.graph_sizes == (1, 2, 4, 8)


def test_d8_one_slot_and_no_graphs(tiny_model, rig: Rig, oracle: Oracle) -> None:
    """Without graphs none can be asked for; one slot and the sink are enough to run."""
    with rig.engine(tiny_model, max_num_seqs=1, largest_graph=0) as llm:
        assert llm.graph_sizes == ()
        llm.use_graphs(False)
        with pytest.raises(ConfigError, match="there are no CUDA graphs"):
            llm.use_graphs(True)
        outs = llm.generate([[5, 6, 7], [8] * 70], greedy_params(8))
        for out, prompt in zip(outs, ([5, 6, 7], [8] * 70), strict=True):
            assert agrees(out.outputs[0], oracle(prompt))


def test_prompts_by_graph_are_their_launches(tiny_model, rig: Rig) -> None:
    """In bf16, since prompts in fp32 are computed by other operations; every bucket was captured."""
    with rig.engine(tiny_model, dtype="bf16", max_num_batched_tokens=512) as llm:
        runner = llm._loop.open_runner().graphs
        assert set(runner._prompt_graphs) == set(runner.prompts.buckets)
        graphs.check_prompts(llm)


def test_no_kernel_is_compiled_for_a_bucket_that_was_never_seen(tiny_model, rig: Rig) -> None:
    from triton import knobs

    with rig.engine(tiny_model, dtype="bf16", max_num_batched_tokens=512, largest_graph=0) as llm:
        compiled = []
        knobs.runtime.jit_post_compile_hook = lambda **found: compiled.append(found["repr"])
        try:
            llm.generate(
                [[i] * n for i, n in enumerate((70, 3, 130, 64, 1, 200))], greedy_params(3)
            )
            llm.generate([[7] * 300], greedy_params(3))
        finally:
            knobs.runtime.jit_post_compile_hook = None
        assert not compiled
