"""`--recalibrate`: KV sized from a measured graph reserve. No GPU is needed: a stand-in claims graphs."""

import json
import random
import sys
from pathlib import Path

import pytest
import yaml

from cli.inspect_cache.test_solve import pasted
from cli.program import REAL, TESTS, Program
from engine.memory.test_memory_plan import GIB, LARGE, MIB, gpu
from engine.memory.test_memory_plan_refusals import random_case
from minivllm_cli.errors import CliError
from minivllm_cli.inspect_cache.solve import check_has_graphs, recalibrate
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.errors import CapacityError
from minivllm_engine.core.stats import LoadReport
from minivllm_engine.memory.devices import host_memory
from minivllm_engine.memory.fit import Fit
from minivllm_engine.memory.layout import MemoryPlan
from minivllm_engine.memory.plan import try_plan
from minivllm_engine.memory.sizes import graph_sizes

# The program whose engine claims to have captured graphs that hold GRAPH_BYTES.
WITH_GRAPHS = [sys.executable, str(TESTS / "cli" / "graphs_minivllm.py")]


def on_gpu(config: EngineConfig) -> Fit:
    return try_plan(LARGE, config, gpu(8 * GIB))


def measured(plan: MemoryPlan, num_bytes: int) -> LoadReport:
    return LoadReport(1.0, 2.0, 3.0, graph_sizes(plan.max_graph_batch), num_bytes, plan.graph_bytes)


def test_what_the_graphs_did_not_take_goes_to_the_kv_blocks() -> None:
    config = EngineConfig.create(
        engine={"max_num_seqs": 64}, cache={"snapshot_memory": "100MiB", "num_blocks": 200}
    )
    plan = on_gpu(config).plan
    room = EngineConfig.create(engine={"max_num_seqs": 64}, cache={"snapshot_memory": "100MiB"})
    most = on_gpu(room).plan.num_blocks
    for spare in (-100 * MIB, 0, 10 * MIB, plan.graph_bytes):
        found = recalibrate(measured(plan, plan.graph_bytes - spare), plan, config, on_gpu)
        assert found.num_blocks == 200
        gained = found.plan.num_blocks - most
        assert abs(gained * plan.block_bytes - spare) < plan.block_bytes
        assert found.plan.memory - plan.memory == spare


def test_the_yaml_leads_to_the_plan_and_one_block_more_does_not_fit() -> None:
    rng, checked = random.Random(31), 0
    for _ in range(1000):
        model, device, config = random_case(rng)

        def planner(other: EngineConfig, model=model, device=device) -> Fit:
            return try_plan(model, other, device)

        result = planner(config)
        if not result.ok or not result.plan.max_graph_batch:
            continue
        plan = result.plan
        report = measured(plan, int(plan.graph_bytes * rng.uniform(0, 1.2)))
        try:
            found = recalibrate(report, plan, config, planner)
        except CapacityError:
            assert report.graph_bytes > plan.graph_bytes
            continue
        again = planner(pasted(config, found.yaml()))
        assert again.ok and again.plan == found.plan
        assert again.plan.max_num_seqs == plan.max_num_seqs, "what the reserve was measured for"
        assert again.plan.graph_bytes == report.graph_bytes
        more = yaml.safe_load(found.yaml())
        more["cache"]["num_blocks"] += 1
        beyond = planner(pasted(config, yaml.dump(more)))
        useful = (plan.max_num_seqs + again.plan.num_snapshots) * again.plan.blocks_per_sequence
        gave_way = "cache.snapshot_memory" in {one.key for one in beyond.lowered}
        assert not beyond.ok or gave_way or again.plan.num_blocks >= useful
        checked += 1
    assert checked > 30


def test_graphs_that_do_not_fit_are_refused_with_what_does() -> None:
    config = EngineConfig.create(engine={"max_num_seqs": 100, "max_model_len": 4096})
    plan = on_gpu(config).plan
    with pytest.raises(CapacityError) as caught:
        recalibrate(measured(plan, plan.graph_bytes + 3 * GIB), plan, config, on_gpu)
    assert "are reserved" in caught.value.what and "--set engine." in (caught.value.hint or "")


def test_without_graphs_there_is_nothing_to_measure() -> None:
    cpu = try_plan(LARGE, EngineConfig(), host_memory(16 * GIB)).plan
    with pytest.raises(CliError, match="none on a CPU"):
        check_has_graphs(cpu)
    off = EngineConfig.create(graph={"enabled": False})
    with pytest.raises(CliError, match="they are off"):
        check_has_graphs(on_gpu(off).plan)
    check_has_graphs(on_gpu(EngineConfig()).plan)


def test_a_reserve_that_is_set_takes_the_place_of_the_estimate() -> None:
    plan = on_gpu(EngineConfig.create(graph={"reserve": "300MiB"})).plan
    assert plan.graph_bytes == 300 * MIB
    rows = {row.name: row.num_bytes for row in plan.rows(from_headers=True)}
    assert rows["graph reserve"] == 300 * MIB and sum(rows.values()) == 8 * GIB
    off = EngineConfig.create(graph={"reserve": "300MiB", "enabled": False})
    assert on_gpu(off).plan.graph_bytes == 0
    cpu = try_plan(LARGE, EngineConfig.create(graph={"reserve": "1GiB"}), host_memory(16 * GIB))
    assert cpu.plan.graph_bytes == 0


def test_on_a_cpu_the_command_is_refused_before_anything_is_loaded(
    program: Program, tiny_model: Path
) -> None:
    program.command = REAL
    source = program.write_lines("in.jsonl", [{"prompt_token_ids": [1, 2]}])
    done = program.run("inspect-cache", tiny_model, "run", "-i", source, "--recalibrate")
    assert (done.code, done.out) == (2, "")
    assert done.err_lines[-2].startswith("error: --recalibrate measures CUDA graphs")
    assert done.err_lines[-1].startswith("try: ") and "loading" not in done.err
    done = program.run("inspect-cache", tiny_model, "--recalibrate")
    assert done.code == 2 and "--recalibrate goes with the view run" in done.err


def run(program: Program, model: Path, *args: str, graph_bytes: int, **env: str):
    program.command = WITH_GRAPHS
    source = program.write_lines("in.jsonl", [{"prompt_token_ids": [1, 2], "max_tokens": 2}])
    args = ("inspect-cache", str(model), "run", "-i", str(source), "--recalibrate", *args)
    return program.run(*args, GRAPH_BYTES=str(graph_bytes), **env)


def test_the_command_prints_the_yaml_and_moves_the_table(
    program: Program, tiny_model: Path
) -> None:
    done = run(program, tiny_model, graph_bytes=MIB)
    assert done.code == 0, done.err
    config = yaml.safe_load(done.out)
    assert config["graph"] == {"reserve": MIB}
    assert "1.00 MiB measured" in done.out.splitlines()[0]
    assert max(map(len, done.out.splitlines())) <= 80
    row = next(line for line in done.err_lines if line.startswith("  graph reserve"))
    assert row.endswith("1.00 MiB") and len(row) <= 80
    assert "warning: graph reserve" not in done.err
    document = json.loads(run(program, tiny_model, "--json", "-q", graph_bytes=MIB).out)
    assert document["recalibration"]["config"] == config
    assert document["recalibration"]["load"]["graph_bytes"] == MIB
    blocks = document["recalibration"]["kv_blocks"]
    assert blocks["in_force"] == document["pools"]["kv"]["total"]
    assert blocks["measured"] == config["cache"]["num_blocks"]


def test_a_reserve_that_was_too_small_is_a_warning(program: Program, tiny_model: Path) -> None:
    done = run(program, tiny_model, graph_bytes=900 * MIB)
    assert "graph reserve: 943,718,400 bytes are allocated and" in " ".join(done.err_lines)
