"""How `bench` measures: lengths, order, caches, warm-ups, decode windows. Mostly on the fake engine."""

import itertools
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.bench.conftest import Bench
from cli.bench.fake_bench_engine import Behaviour, FakeMachine
from minivllm_cli.bench.requests import make_repetition
from minivllm_cli.bench.variant import EAGER, GRAPH
from minivllm_cli.bench.workload import Workload
from minivllm_cli.config.bench_options import Length


def rows_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in document["rows"]}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["prefill", "mixed"])
@pytest.mark.parametrize("length", [1, 7, 1024])
def test_k18_requested_lengths_are_the_measured_ones(
    machine: FakeMachine, bench: Bench, kind: str, length: int, late: bool
) -> None:
    machine.behaviour = Behaviour(device="cpu", late=late)
    gen = 1 if kind == "prefill" else 5
    more = [] if kind == "prefill" else ["--gen-len", gen]
    done = bench(
        *("--workload", kind, "--prompt-len", length, "--batch", "3", "--reps", 2, "--json", "-q"),
        *more,
    )
    assert done.code == 0, done.err
    (row,) = done.document["rows"]
    assert row["requested"] == [length, gen]
    for sample in row["samples"]:
        assert (sample["in_tokens"], sample["out_tokens"]) == (3 * length, 3 * gen)


def test_k18_an_engine_that_ends_early_is_an_error(machine: FakeMachine, bench: Bench) -> None:
    machine.behaviour = Behaviour(one_short=True)
    done = bench("--workload", "mixed", "--batch", 1, "--prompt-len", 9, "--gen-len", 6)
    assert done.code == 1
    assert "ran 9 + 5 tokens and not 9 + 6" in done.err


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("budget", [10**9, 100])
def test_decode_times_steps_alone_with_all_requests_running(
    machine: FakeMachine, bench: Bench, budget: int, late: bool
) -> None:
    """With a small budget the first requests decode while the last prompts are still read."""
    machine.behaviour = Behaviour(budget=budget, late=late, prompt_s=0.1)
    done = bench(
        *("--workload", "decode", "--batch", 3, "--depth", 300, "--gen-len", 10, "--reps", 1),
        *("--warmup", 1, "--set", "engine.max_num_batched_tokens=100", "--json", "-q"),
    )
    assert done.code == 0, done.err
    for row in done.document["rows"]:
        assert row["requested"] == [300, 10]
        for sample in row["samples"]:
            assert sample["steps"] == 10
            assert (sample["in_tokens"], sample["out_tokens"]) == (900, 30)
            assert (
                sample["wall_s"] < 0.1
            )  # on the clock of the fake; reading a prompt would be in it
        assert row["itl_ms"]["n"] == 30 and row["itl_ms"]["p99"] < 100
    assert all(pair["equal"] == pair["of"] == 3 for pair in done.document["equal"])


def test_variants_take_turns_on_the_same_prompts_from_an_empty_cache(
    machine: FakeMachine, bench: Bench
) -> None:
    done = bench(
        *("--workload", "prefill", "--prompt-len", 20, "--batch", 1),
        *("--reps", 3, "--warmup", 1, "--json", "-q"),
    )
    (engine,) = machine.engines
    log = [entry for entry in engine.log if entry[0] != "graphs"]
    assert [entry[0] for entry in log] == ["clear", "add"] * 8
    added = [entry for entry in log if entry[0] == "add"]
    assert [graphs for _, _, graphs, _ in added] == [False, True] * 4
    prompts = [ids for _, ids, _, _ in added]
    assert prompts[0::2] == prompts[1::2]  # a variant gets what the other got
    assert len(set(prompts)) == 4  # and every repetition something new
    orders = [[s["order"] for s in row["samples"]] for row in done.document["rows"]]
    assert orders == [[1, 3, 5], [2, 4, 6]]


def test_prompts_are_the_same_in_every_process_and_different_in_every_repetition() -> None:
    workload = Workload("mixed", 2, prompt=Length(3, 9), gen=Length(1, 4), num_prompts=4)
    first = make_repetition(workload, 0, 1000)
    assert first == make_repetition(workload, 0, 1000)
    assert first != make_repetition(workload, 1, 1000)
    assert len({len(r.prompt_ids) for r in make_repetition(workload, 0, 1000).requests}) > 1
    for request in first.requests:
        assert 3 <= len(request.prompt_ids) <= 9 and request.gen in (1, 2, 3, 4)
        assert request.params.ignore_eos and request.params.temperature == 0


@pytest.mark.parametrize("kind", ["prefill", "mixed", "prefix"])
def test_lengths_that_are_drawn_are_those_of_every_repetition_and_variant(
    machine: FakeMachine, bench: Bench, kind: str
) -> None:
    more = [] if kind == "prefill" else ["--gen-len", "2~50"]
    args = ("--workload", kind, "--prompt-len", "3~90", "--batch", 4, "--num-prompts", 6, *more)
    done = bench(*args, "--reps", 4, "--warmup", 1, "--json", "-q")
    assert done.code == 0
    (engine,) = machine.engines
    found = [len(ids) for entry, ids, *_ in (e for e in engine.log if e[0] == "add")]
    assert len(set(found)) > 2, "nothing was drawn"
    rows = done.document["rows"]
    samples = [sample for row in rows for sample in row["samples"]]
    assert len({(s["in_tokens"], s["out_tokens"]) for s in samples}) == 1
    assert {tuple(row["requested"]) for row in rows} == {
        (samples[0]["in_tokens"], samples[0]["out_tokens"])
    }


def test_the_lengths_of_a_repetition_do_not_depend_on_its_number() -> None:
    workload = Workload("mixed", 2, prompt=Length(3, 900), gen=Length(1, 400), num_prompts=9)
    shapes = {
        tuple((len(r.prompt_ids), r.gen) for r in make_repetition(workload, number, 99).requests)
        for number in range(5)
    }
    assert len(shapes) == 1
    other = make_repetition(replace(workload, prompt=Length(3, 901)), 0, 99)
    assert tuple((len(r.prompt_ids), r.gen) for r in other.requests) not in shapes


def test_k17_two_equal_runs_hit_nothing(machine: FakeMachine, bench: Bench) -> None:
    args = ("--workload", "prefill", "--prompt-len", 256, "--batch", 2, "--reps", 5, "--json", "-q")
    for _ in range(2):
        done = bench(*args)
        assert [row["prefix_hit"] for row in done.document["rows"]] == [0.0, 0.0]
        assert not [text for text in done.document["warnings"] if "prefix cache" in text]


def test_k17_hits_outside_prefix_workloads_are_a_warning(
    machine: FakeMachine, bench: Bench
) -> None:
    machine.behaviour = Behaviour(leaky=True)
    done = bench("--workload", "prefill", "--prompt-len", 256, "--batch", 1, "--json")
    assert rows_of(done.document)["graph"]["prefix_hit"] > 0.5
    assert "graph: 75.0% of the prompt tokens came from the prefix cache" in done.err
    # The first variant runs prompts that nobody has run.
    assert rows_of(done.document)["eager"]["prefix_hit"] == 0.0


def test_k19_first_uses_are_outside_the_samples(machine: FakeMachine, bench: Bench) -> None:
    machine.behaviour = Behaviour(first_use_s=0.3, eager_s=0.002, graph_s=0.001)
    args = ("--workload", "decode", "--batch", 2, "--gen-len", 4, "--json")
    done = bench(*args)
    for row in done.document["rows"]:
        assert all(sample["wall_s"] < 0.25 for sample in row["samples"])
    assert done.document["load"]["capture_s"] == 2.0


def test_k19_without_warm_up_the_outlier_is_named(machine: FakeMachine, bench: Bench) -> None:
    machine.behaviour = Behaviour(first_use_s=0.3, eager_s=0.002, graph_s=0.002)
    done = bench("--workload", "prefill", "--prompt-len", 4, "--batch", 2, "--warmup", 0, "--json")
    assert "eager: the first sample of 5" in done.err
    assert rows_of(done.document)["eager"]["ttft_ms"]["p50"] < 250


def test_cold_and_warm_prefixes(machine: FakeMachine, bench: Bench) -> None:
    done = bench(
        *("--workload", "prefix", "--depth", 128, "--prompt-len", 10, "--gen-len", 3),
        *("--groups", 2, "--batch", 2, "--num-prompts", 6, "--eager", "--reps", 2, "--warmup", 0),
        *("--json", "-q"),
    )
    rows = rows_of(done.document)
    cold, warm = rows["eager cold"], rows["eager warm"]
    assert (cold["prefix_hit"], cold["kv_hit"]) == (0, 0)
    assert warm["prefix_hit"] == pytest.approx(128 / 138)
    assert [s["cached_tokens"] for s in warm["samples"]] == [6 * 128] * 2
    (pair,) = done.document["equal"]
    assert (pair["equal"], pair["of"]) == (12, 12)
    added = [entry for entry in machine.engines[0].log if entry[0] == "add"]
    # A cold sample: 6 requests without the cache; a warm one: 2 primers, then 6 with it.
    assert [used for *_, used in added] == ([False] * 6 + [True] * 8) * 2
    prefixes = {ids[:128] for _, ids, _, _ in added[:6]}
    assert len(prefixes) == 2 and prefixes == {ids[:128] for _, ids, _, _ in added[6:8]}


def test_other_tokens_are_named_and_fail_where_that_was_asked(
    machine: FakeMachine, bench: Bench
) -> None:
    machine.behaviour = Behaviour(other_token=2)
    args = ("--workload", "mixed", "--batch", 2, "--prompt-len", 5, "--gen-len", 4, "--json")
    done = bench(*args)
    assert done.code == 0
    (pair,) = done.document["equal"]
    assert (pair["equal"], pair["of"]) == (0, 10)
    first = pair["first_divergence"]
    assert (first["repetition"], first["request"], first["position"]) == (0, 0, 2)
    assert first["ids"][1] == (first["ids"][0] + 1) % 2048
    strict = bench(*args, "--strict-equal")
    assert strict.code == 5
    assert "error: eager and graph gave other tokens (--strict-equal)" in strict.err


@pytest.mark.parametrize(("flags", "variants"), [([], 2), (["--graph"], 1), (["--eager"], 1)])
def test_variants_that_were_asked_for(
    machine: FakeMachine, bench: Bench, flags: list[str], variants: int
) -> None:
    done = bench("--suite", "quick", *flags, "--json", "-q")
    found = [row["variant"] for row in done.document["rows"]]
    assert found == ([flags[0].removeprefix("--")] if flags else ["eager", "graph"])
    assert len(found) == variants
    # Graphs that nobody asked for are not captured.
    assert bool(done.document["load"]["graph_sizes"]) == (flags != ["--eager"])
    assert done.document["rows"][0]["tok_s"]["n"] == 3


def test_a_batch_above_the_largest_graph_is_a_warning(machine: FakeMachine, bench: Bench) -> None:
    done = bench("--workload", "decode", "--batch", 6, "--gen-len", 2, "--reps", 1, "--json")
    assert "batch 6 is above the largest graph (4): its steps run eagerly" in done.err


def test_verify_replays_what_reused_a_prefix(machine: FakeMachine, bench: Bench) -> None:
    args = ("--workload", "prefix", "--batch", 2, "--num-prompts", 4, "--eager", "--reps", 1)
    good = bench(*args, "--verify", 2, "--json")
    assert good.code == 0
    assert good.document["verify"] | {"largest_gap": 0} == {
        "reused": 4, "replayed": 2, "equal": 2, "ties": 0, "different": 0, "largest_gap": 0
    }  # fmt: skip
    machine.behaviour = Behaviour(leaky=True)
    bad = bench(*args, "--verify", 1)
    assert bad.code == 5
    assert "verify: request 0: the answer has the same tokens as its cold replay" in bad.err


@pytest.mark.parametrize("save", [True, False])
def test_an_interrupt_keeps_finished_rows(
    machine: FakeMachine, bench: Bench, save: bool, tmp_path: Any
) -> None:
    steps = itertools.count(1)

    def interrupt(step: int) -> None:
        if next(steps) == 40:
            signal.raise_signal(signal.SIGINT)

    machine.behaviour = Behaviour(device="cpu", on_step=interrupt)
    args = ["--workload", "prefill", "--batch", 1, "--prompt-len", "1,2,3,4,5,6,7,8,9", "--json"]
    path = tmp_path / "bench.json"
    done = bench(*args, *(["--save", path] if save else []))
    assert done.code == 130
    document = done.document
    assert document["complete"] is False
    assert len(document["rows"]) == 5  # of 7 samples each
    where = f" and are in {path}" if save else ""
    assert done.err.splitlines()[-1] == f"5 of 9 rows were finished{where}"
    if save:
        assert path.read_text() == done.out
    assert machine.engines[0].closed


def test_finished_rows_are_on_disk_while_the_next_is_measured(
    machine: FakeMachine, bench: Bench, tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    seen: list[int] = []

    def look(step: int) -> None:
        seen.append(len(json.loads(path.read_text())["rows"]) if path.exists() else 0)

    machine.behaviour = Behaviour(device="cpu", on_step=look)
    args = ("--workload", "prefill", "--batch", 1, "--prompt-len", "1,2,3", "--save", path)
    assert bench(*args, "--reps", 1, "--warmup", 0).code == 0
    assert seen == [0, 1, 2]
    assert json.loads(path.read_text())["complete"] is True


def test_an_engine_that_fails_keeps_finished_rows(
    machine: FakeMachine, bench: Bench, tmp_path: Any
) -> None:
    machine.behaviour = Behaviour(device="cpu", fails_at=9)
    path = tmp_path / "bench.json"
    args = ("--workload", "prefill", "--batch", 1, "--prompt-len", "1,2", "--save", path)
    done = bench(*args)
    assert done.code == 1
    assert "error: engine failed: the fan fell off" in done.err
    assert '"complete":false' in path.read_text()


def test_stages_reproduce_the_table_from_naive_to_graphs(
    machine: FakeMachine, bench: Bench
) -> None:
    done = bench("--suite", "stages", "--reps", 1, "--warmup", 0, "--json", "-q")
    assert done.code == 0, done.err
    assert [row["variant"] for row in done.document["rows"]] == [
        "naive",
        "kv cache",
        "+ fused",
        "+ graph",
    ]
    assert [pair["variants"][1] for pair in done.document["equal"]] == [
        "kv cache",
        "+ fused",
        "+ graph",
    ]
    assert all(pair["equal"] == pair["of"] == 1 for pair in done.document["equal"])
    plain, fused = machine.engines
    assert plain.closed and fused.closed
    assert (plain.config.engine.attention_backend, plain.graph_sizes) == ("reference", ())
    assert plain.config.engine.gated_delta_decode == "reference"
    assert (fused.config.engine.attention_backend, fused.graph_sizes) == ("auto", (1, 2, 4))
    naive = [ids for kind, ids, *_ in (e for e in plain.log if e[0] == "add")][:65]
    assert [len(ids) for ids in naive] == list(range(128, 193))  # all tokens before, each time


def test_stages_on_a_cpu_are_those_that_exist_there(machine: FakeMachine, bench: Bench) -> None:
    machine.behaviour = Behaviour(device="cpu")
    done = bench("--suite", "stages", "--reps", 1, "--warmup", 0, "--json", "-q")
    assert [row["variant"] for row in done.document["rows"]] == ["naive", "kv cache"]
    assert len(machine.engines) == 1


def test_a_shape_needs_no_checkpoint(machine: FakeMachine, bench: Bench) -> None:
    done = bench("--shape", "0.8b", "--suite", "quick", "--json", "-q", model=None)
    assert done.code == 0, done.err
    assert done.document["model"]["name"] == "0.8b random"
    assert machine.engines[0].model_config.vocab_size == 248320


def test_variants_have_the_names_of_the_contract() -> None:
    assert (EAGER.name, GRAPH.name, EAGER.graph, GRAPH.graph) == ("eager", "graph", False, True)
