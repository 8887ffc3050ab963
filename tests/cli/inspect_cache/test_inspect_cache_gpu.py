"""Where the device's figures come from: NVML, whoever else is on the GPU, or nothing at all."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm_cli.app import run
from minivllm_engine.memory import devices
from minivllm_engine.memory.devices import DeviceProcess, Gpu, device_of, first_gpu, gpu_state
from support.fake_nvml import Card, FakeNvml, Process
from support.qwen35_08b import CONFIG

MIB, GIB = 2**20, 2**30
FREE = (143_771, 0, 143_000)

Install = Callable[..., FakeNvml]


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put GPUs into this machine, and a model `m` of the 0.8B shape into the working directory."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(*cards: Card, driver: bool = True) -> FakeNvml:
        fake = FakeNvml(*cards, driver=driver)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def test_the_gpu_that_is_here_is_planned_for(nvml: Install, capsys: Any) -> None:
    own = os.getpid()
    nvml(Card(memory=(143_771, 40_000, 103_000), processes=[Process(own, 39_500 * MIB)]))
    assert run(["inspect-cache", "m", "--json", "-v"]) == 0
    out, err = capsys.readouterr()
    device = json.loads(out)["devices"][0]
    assert (device["name"], device["kind"]) == ("GPU 0 NVIDIA H200", "cuda")
    assert device["total"] == 143_771 * MIB
    name = Path(f"/proc/{own}/comm").read_text().strip()
    assert device["other_processes"] == [
        {"pid": own, "name": name, "bytes": 39_500 * MIB},
        {"pid": None, "name": "not listed", "bytes": 500 * MIB},
    ]
    rows = {row["name"]: row["bytes"] for row in device["rows"]}
    assert rows["other processes"] == 40_000 * MIB
    assert rows["driver"] == 771 * MIB
    assert sum(rows.values()) == device["total"]
    assert f"pid {own} {name}" in err


def test_k15_another_process_on_the_gpu_is_named(nvml: Install, capsys: Any) -> None:
    nobody = 2**22 + 1  # above the largest pid of Linux
    nvml(Card(memory=(143_771, 141_000, 2_000), processes=[Process(nobody, 140_000 * MIB)]))
    assert run(["inspect-cache", "m", "--device", "cuda"]) == 4
    out, err = capsys.readouterr()
    assert f"pid {nobody} (?) holds 136.72 GiB on GPU 0 NVIDIA H200" in err
    assert "too much" in out


def test_cuda_without_a_gpu_is_refused_and_auto_falls_back_with_a_note(
    nvml: Install, capsys: Any
) -> None:
    nvml(driver=False)
    assert run(["inspect-cache", "m", "--device", "cuda"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: no usable CUDA device")
    assert "--memory 80GiB" in err
    assert run(["inspect-cache", "m"]) == 0
    out, err = capsys.readouterr()
    assert "on CPU" in out and "device: cpu" in err


def test_a_size_on_the_command_line_beats_the_gpu_that_is_here(nvml: Install, capsys: Any) -> None:
    nvml(Card(memory=FREE))
    assert run(["inspect-cache", "m", "--memory", "24GiB"]) == 0
    assert "a GPU of 24.00 GiB" in capsys.readouterr().out


def test_env_lists_the_gpus(nvml: Install, capsys: Any) -> None:
    nvml(Card(memory=FREE), Card("NVIDIA GB10", memory=None))
    assert run(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["gpus"] == [
        {"name": "NVIDIA H200", "driver": "570.124.06", "memory": 143_771 * MIB},
        {"name": "NVIDIA GB10", "driver": "570.124.06", "memory": None},
    ]


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        (None, "a"),
        ("1,0", "b"),
        ("GPU-bbbb", "b"),
        ("GPU-cccc", None),
        ("7", None),
        ("", None),
        ("-1", None),
        ("NoDevFiles", None),
    ],
)
def test_the_gpu_that_is_visible_first_is_used(
    nvml: Install, visible: str | None, name: str | None
) -> None:
    fake = nvml(Card("a", uuid="GPU-aaaa-1"), Card("b", uuid="GPU-bbbb-2"))
    gpu = first_gpu({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert (gpu and gpu.name) == name
    assert fake.begun == 0, "what was begun was ended"


def test_what_the_driver_does_not_tell_is_none(nvml: Install) -> None:
    nvml(Card(memory=None, processes=[Process(1, None)]))
    gpu, state = first_gpu({}), gpu_state({})
    assert gpu is not None and (gpu.total, gpu.processes) == (None, ())
    assert device_of(gpu) is None
    assert state is not None and state.pids == {1}
    assert (state.clock_mhz, state.power_cap_w, state.temperature_c) == (None, None, None)


def test_without_a_driver_or_the_library_there_is_no_gpu(
    nvml: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(driver=False)
    assert (devices.list_gpus(), first_gpu({}), gpu_state({})) == ([], None, None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (devices.list_gpus(), first_gpu({}), gpu_state({})) == ([], None, None)


def test_memory_that_no_process_claims_is_somebodys_all_the_same() -> None:
    listed = (DeviceProcess(1, "a", 2 * GIB),)
    device = device_of(Gpu(0, "GPU", "1", 10 * GIB, 3 * GIB, 6 * GIB, listed))
    assert device is not None
    assert device.held_by_others == 3 * GIB
    assert device.processes[-1] == DeviceProcess(None, "not listed", GIB)
    assert device.reserved == GIB
