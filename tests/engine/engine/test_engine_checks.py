"""What `make test-gpu` checks of an engine on the card, here on a CPU: a static step in place of graphs, and
steps launched ahead. And the checks see what they are for: bugs are planted.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.runner import graph_decode as graph_decode
from support.byte_tokenizer import write_byte_tokenizer
from support.device_engine import Rig
from support.engine_checks import graphs, greedy_params, invariance, overlap
from support.graph_reference import graph_reference
from support.oracle import Oracle
from support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig("cpu", graph_reference())


@pytest.fixture(scope="module")
def oracle(tiny_model) -> Oracle:
    return Oracle(tiny_model, 12)


@pytest.fixture(scope="module")
def llm(tiny_model, rig: Rig) -> Iterator[LLM]:
    """Eight slots, graphs of 1, 2, 4 and 8."""
    with rig.engine(tiny_model) as llm:
        yield llm


@pytest.fixture(scope="module")
def larger(tiny_model, rig: Rig) -> Iterator[LLM]:
    """Twelve slots, graphs up to 8."""
    with rig.engine(tiny_model, max_num_seqs=12) as llm:
        yield llm


@pytest.mark.parametrize("count", [3, 5])
def test_d1_idle_slots_keep_their_bits(llm: LLM, count: int) -> None:
    graphs.check_idle_slots(llm, count)


def test_d3_requests_that_end_one_by_one(llm: LLM, oracle: Oracle) -> None:
    graphs.check_one_by_one(llm, oracle)


def test_d4_every_batch_size(larger: LLM) -> None:
    graphs.check_batch_sizes(larger, range(1, 13))


def test_prompts_by_graph_are_their_launches(tiny_model, rig: Rig) -> None:
    with rig.engine(tiny_model, max_num_batched_tokens=512) as llm:
        graphs.check_prompts(llm)


def test_d6_padding_lanes_have_a_length(llm: LLM) -> None:
    graphs.check_padding_lanes(llm)


def test_d7_one_warning_above_the_largest_graph(larger: LLM, caplog) -> None:
    graphs.check_beyond_the_largest_graph(larger, caplog)


def test_f11_slots_that_lie_apart(llm: LLM) -> None:
    graphs.check_fragmented_slots(llm)


def test_invariance(llm: LLM, oracle: Oracle) -> None:
    invariance.check_invariance(llm, oracle, [3, 65, 130])


def test_random_schedules_in_flight(tiny_model, rig: Rig) -> None:
    with rig.engine(tiny_model, num_blocks=20) as llm:
        overlap.check_random_schedules(llm, schedules=8, requests=14)
        assert llm.stats().num_preemptions > 0


def test_stop_strings_in_flight(llm: LLM) -> None:
    overlap.check_stop_strings(llm)


def test_failures_in_flight(llm: LLM, monkeypatch) -> None:
    overlap.check_failures_in_flight(llm, monkeypatch)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_equal_requests_have_one_answer(llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=10, seed=3, ignore_eos=True)
    assert len(overlap.check_one_answer(llm, list(range(20)), params, 20)) == 10


def test_a_step_is_replayed_where_graphs_are_on_and_one_is_large_enough(larger: LLM) -> None:
    decodes = larger._loop.open_runner().graphs
    assert larger.graph_sizes == larger.load_report.graph_sizes == decodes.sizes == (1, 2, 4, 8)
    made, replayed = dict(decodes._graphs), []

    class Counting:
        def __init__(self, size: int) -> None:
            self.size = size

        def replay(self) -> None:
            replayed.append(self.size)
            made[self.size].replay()

    decodes._graphs = {size: Counting(size) for size in made}
    try:
        for enabled, count, size in ((True, 3, 4), (True, 8, 8), (True, 9, None), (False, 3, None)):
            larger.use_graphs(enabled)
            replayed.clear()
            larger.generate([[1 + i] * 5 for i in range(count)], greedy_params(4))
            assert replayed == ([] if size is None else [size] * 3)
    finally:
        decodes._graphs = made
        larger.use_graphs(True)


# -- the kernels themselves, in the interpreter ----------------------------------------------------


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> Iterator[LLM]:
    """Two layers, four slots: a step takes the interpreter half a second."""
    backend = pytest.importorskip("minivllm_engine.ops.kernel_backend")
    if torch.cuda.is_available():
        pytest.skip("with a card, tests/gpu runs the kernels")
    path = write_tiny_checkpoint(
        tmp_path_factory.mktemp("two"), num_hidden_layers=2, full_attention_interval=2
    )
    write_byte_tokenizer(path)
    operations = replace(backend.kernel_operations(chunks="reference"), max_few_rows=0)
    with Rig("cpu", operations).engine(
        path, max_num_seqs=4, num_blocks=40, prefix_cache=False
    ) as llm:
        yield llm


# A padding lane's attention over a sink of NaN.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_d1_idle_slots_keep_their_bits_with_kernels(kernels: LLM) -> None:
    graphs.run_scenario(kernels, graphs.idle_slots(3), graphs=True)


def test_d6_padding_lanes_have_a_length_with_kernels(kernels: LLM) -> None:
    graphs.check_padding_lanes(kernels)


# -- planted bugs ----------------------------------------------------------------------------------


def test_padding_lanes_that_write_are_seen(tiny_model, rig: Rig, monkeypatch) -> None:
    monkeypatch.setattr(graph_decode, "_NOBODY", (0, -1, 0, 7, 16 * 599))
    with rig.engine(tiny_model) as llm, pytest.raises(AssertionError, match="was written"):
        graphs.check_idle_slots(llm, 3)


def test_a_graph_that_differs_from_the_eager_step_is_seen(tiny_model, rig: Rig) -> None:
    with rig.engine(tiny_model) as llm:
        made = llm._loop.runner.graphs._graphs
        made[4] = replace(made[4], size=3)  # a lane is not computed
        with pytest.raises(AssertionError):
            graphs.check_batch_sizes(llm, [4])


def test_the_token_of_another_lane_is_seen(tiny_model, rig: Rig, monkeypatch) -> None:
    fill = graph_decode._HostBuffers.fill

    def swapped(self, sequences, sources, *rest):
        fill(self, sequences, {lane: len(sources) - 1 - at for lane, at in sources.items()}, *rest)

    monkeypatch.setattr(graph_decode._HostBuffers, "fill", swapped)
    with rig.engine(tiny_model) as llm, pytest.raises(AssertionError):
        overlap.check_random_schedules(llm, schedules=2, requests=14)


def test_block_tables_that_go_stale_are_seen(tiny_model, rig: Rig, monkeypatch) -> None:
    write = graph_decode._HostBuffers._write_table

    def kept(self, lane, table):
        if len(table) != len(self._written[lane]):
            write(self, lane, table)

    monkeypatch.setattr(graph_decode._HostBuffers, "_write_table", kept)
    with rig.engine(tiny_model, num_blocks=20) as llm, pytest.raises(AssertionError):
        overlap.check_random_schedules(llm, schedules=8, requests=14)
