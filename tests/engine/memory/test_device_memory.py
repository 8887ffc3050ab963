"""The memory that a process may use: the machine's, or less by a limit on it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.errors import CapacityError
from minivllm_engine.engine.out_of_memory import shortage_named
from minivllm_engine.engine.prepare import prepare
from minivllm_engine.memory.devices import LIBRARY_BYTES, cgroup_limits, host_memory
from minivllm_engine.memory.plan import plan_memory
from minivllm_engine.model_config.config import ModelConfig

GIB = 1 << 30


@pytest.mark.parametrize(
    ("table", "files", "limits"),
    [
        ("0::/user/job\n", {"user/job/memory.max": "5", "user/memory.max": "max"}, [5]),
        ("0::/user/job\n", {"user/job/memory.max": "7", "user/memory.max": "3"}, [7, 3]),
        ("0::/elsewhere\n", {"memory.max": "9"}, [9]),
        (
            "5:cpu:/a\n4:memory,x:/a\n",
            {"memory/a/memory.limit_in_bytes": "6", "memory/memory.limit_in_bytes": "8"},
            [6, 8],
        ),
        ("4:memory:/a\n0::/\n", {"memory.max": "hm"}, []),
        ("nonsense\n::\n", {}, []),
    ],
)
def test_limits_of_control_groups_of_both_versions(tmp_path, table, files, limits) -> None:
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "table").write_text(table)
    assert list(cgroup_limits(tmp_path / "table", tmp_path / "groups")) == limits
    assert list(cgroup_limits(tmp_path / "nothing", tmp_path)) == []


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_limit_of_the_process_is_its_memory(kind) -> None:
    script = (
        f"import resource; resource.setrlimit(resource.{kind}, (2 << 30, 2 << 30));"
        "from minivllm_engine.memory.devices import host_memory; print(host_memory().total)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == 2 * GIB - LIBRARY_BYTES


def test_b4_an_engine_runs_within_the_limit_of_its_process() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (4_096_000_000,) * 2);"
        "import sys; sys.argv = ['minivllm', 'generate', 'demo', '-p', 'Define zebra.'];"
        "from minivllm_cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (
        0,
        "Any of several fleet black-and-white striped African equines.\n",
    ), done.stderr


def test_the_pools_of_few_sequences_are_what_they_can_use() -> None:
    path = Path(prepare("demo", EngineConfig()).path)
    model = ModelConfig.from_dir(path)

    def pools(**engine) -> int:
        return plan_memory(model, EngineConfig.create(engine=engine), 64 * GIB).memory

    assert pools() == 4 * GIB
    assert pools(max_num_seqs=1) == 256 << 20
    assert pools(max_num_seqs=1) < pools(max_num_seqs=64) < pools(max_num_seqs=200) <= 4 * GIB
    assert pools(max_num_seqs=1, cpu_memory="1GiB") == GIB


def test_b4_memory_that_runs_out_on_a_cpu_names_the_key_that_helps() -> None:
    prepared = prepare("demo", EngineConfig.create(engine={"device": "cpu"}))
    with pytest.raises(CapacityError) as caught, shortage_named(prepared):
        torch.empty(1 << 60, dtype=torch.uint8)
    key, _, value = caught.value.hint.removeprefix("--set ").partition("=")
    assert key == "engine.cpu_memory"
    config = EngineConfig.create(engine={"device": "cpu", "cpu_memory": value})
    plan = plan_memory(prepared.model_config, config, host_memory())
    assert plan.pool_bytes <= prepared.plan.pool_bytes // 2
    with pytest.raises(RuntimeError, match="another"), shortage_named(prepared):
        raise RuntimeError("another fault")
