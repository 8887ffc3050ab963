"""Where the device's figures come from: nvidia-smi, whoever else is on the GPU, or nothing at all."""

import json
import stat

import pytest

from cli.program import REAL, Program
from minivllm_engine.memory.device_memory import DeviceProcess
from minivllm_engine.memory.nvidia_smi import Gpu, device_of, parse_gpus, parse_processes
from support.qwen35_08b import CONFIG

MIB, GIB = 2**20, 2**30
H200 = "0, NVIDIA H200, 570.124.06, 143771, {used}, {free}"


def nvidia_smi(program: Program, gpu: str, apps: str = "") -> dict[str, str]:
    """The environment with an `nvidia-smi` that prints these lines and logs how it was called."""
    folder = program.home / "bin"
    folder.mkdir(exist_ok=True)
    script = folder / "nvidia-smi"
    log = program.home / "smi.log"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in\n'
        f"*query-gpu*) echo '{gpu}';;\n*query-compute-apps*) echo '{apps}';;\nesac\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.fixture
def real(program: Program) -> Program:
    program.command = REAL
    (program.home / "m").mkdir()
    (program.home / "m" / "config.json").write_text(json.dumps(CONFIG))
    return program


def test_the_gpu_that_is_here_is_planned_for(real: Program) -> None:
    path = nvidia_smi(
        real, H200.format(used=40_000, free=103_000), "812, /usr/bin/python3.11, 39500"
    )
    done = real.run("inspect-cache", "m", "--json", **path)
    (record,) = done.records
    device = record["devices"][0]
    assert (device["name"], device["kind"]) == ("GPU 0 NVIDIA H200", "cuda")
    assert device["total"] == 143_771 * MIB
    assert device["other_processes"] == [
        {"pid": 812, "name": "python3.11", "bytes": 39_500 * MIB},
        {"pid": None, "name": "not listed", "bytes": 500 * MIB},
    ]
    rows = {row["name"]: row["bytes"] for row in device["rows"]}
    assert rows["other processes"] == 40_000 * MIB
    assert rows["driver"] == 771 * MIB
    assert sum(rows.values()) == device["total"]
    assert "    pid 812 python3.11: 38.57 GiB" in done.err_lines


def test_k15_another_process_on_the_gpu_is_named(real: Program) -> None:
    path = nvidia_smi(real, H200.format(used=141_000, free=2_000), "812, python, 140000")
    done = real.run("inspect-cache", "m", "--device", "cuda", **path)
    assert done.code == 4
    assert "pid 812 (python) holds 136.72 GiB on GPU 0 NVIDIA H200" in done.err
    assert "too much" in done.out


def test_cuda_without_a_gpu_is_refused_and_auto_falls_back_with_a_note(real: Program) -> None:
    nothing = {"PATH": "/nowhere"}
    done = real.run("inspect-cache", "m", "--device", "cuda", **nothing)
    assert (done.code, done.out) == (2, "")
    assert done.err_lines[0] == "error: no usable CUDA device"
    assert "--memory 80GiB" in done.err_lines[-1]
    done = real.run("inspect-cache", "m", **nothing)
    assert done.code == 0
    assert "CPU with" in done.out and "device: cpu" in done.err


def test_hidden_gpus_are_not_planned_for(real: Program) -> None:
    path = nvidia_smi(real, H200.format(used=0, free=143_000))
    assert "CPU with" in real.run("inspect-cache", "m", CUDA_VISIBLE_DEVICES="", **path).out
    assert "H200" in real.run("inspect-cache", "m", CUDA_VISIBLE_DEVICES="3,1", **path).out
    assert "-i 3 --query-gpu" in (real.home / "smi.log").read_text()


def test_a_size_on_the_command_line_beats_the_gpu_that_is_here(real: Program) -> None:
    path = nvidia_smi(real, H200.format(used=0, free=143_000))
    done = real.run("inspect-cache", "m", "--memory", "24GiB", **path)
    assert "a GPU of 24.00 GiB" in done.out
    assert not (real.home / "smi.log").exists()


def test_env_lists_the_gpus(real: Program) -> None:
    path = nvidia_smi(real, H200.format(used=0, free=143_000))
    (facts,) = real.run("env", "--json", **path).records
    expected = {"name": "NVIDIA H200", "driver": "570.124.06", "memory": 143_771 * MIB}
    assert facts["gpus"] == [expected]


def test_lines_of_nvidia_smi_are_read_whatever_is_missing() -> None:
    text = (
        "0, NVIDIA H200, 570.1, 143771, 0, 143167\n"
        "1, Odd, Name, 570.1, [N/A], [Not Supported], [N/A]\n"
        "No devices were found\n\n"
    )
    first, second = parse_gpus(text)
    assert (first.index, first.name, first.total) == (0, "NVIDIA H200", 143_771 * MIB)
    assert (second.name, second.total, second.used) == ("Odd, Name", None, None)
    assert device_of(second) is None
    lines = "812, C:\\Python\\python.exe, 100\n900, a, b, [N/A]\nnone, x, 5\n901, /opt/my, app, 7\n"
    assert parse_processes(lines) == (
        DeviceProcess(812, "python.exe", 100 * MIB),
        DeviceProcess(901, "my, app", 7 * MIB),
    )


def test_memory_that_no_process_claims_is_somebodys_all_the_same() -> None:
    listed = (DeviceProcess(1, "a", 2 * GIB),)
    device = device_of(Gpu(0, "GPU", "1", 10 * GIB, 3 * GIB, 6 * GIB, listed))
    assert device is not None
    assert device.held_by_others == 3 * GIB
    assert device.processes[-1] == DeviceProcess(None, "not listed", GIB)
    assert device.reserved == GIB
