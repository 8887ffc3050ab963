"""Which device a run gets, and what it is told where it cannot have the one that it asks for."""

import logging
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from minivllm_engine.core.config import EngineConfig, EngineOptions
from minivllm_engine.core.errors import BackendUnavailable, ConfigError
from minivllm_engine.engine.prepare import prepare
from minivllm_engine.memory import device_choice
from minivllm_engine.memory.device_choice import choose_device
from support.fake_nvml import Card, FakeNvml

GPU, NO_SIZE = Card(), Card("NVIDIA GB10", memory=None)
CANNOT_BE_LOADED = "raise ImportError('loading this takes seconds')"


class Machine:
    """What is installed, and what the driver says: packages that cannot be loaded, and a script."""

    def __init__(self, root: Path, nvml: FakeNvml) -> None:
        self.packages, self.nvml = root / "packages", nvml
        self.packages.mkdir()

    def install(self, *names: str, cuda: bool = True) -> "Machine":
        for name in names:
            package = self.packages / name
            (package / "lib").mkdir(parents=True)
            (package / "__init__.py").write_text(CANNOT_BE_LOADED)
            if name == "torch" and cuda:
                (package / "lib" / "libtorch_cuda.so").touch()
        return self

    def has_gpu(self, *cards: Card) -> "Machine":
        self.nvml.driver, self.nvml.cards = True, cards
        return self


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path, FakeNvml(driver=False))
    monkeypatch.setitem(sys.modules, "pynvml", machine.nvml)
    monkeypatch.setattr(
        device_choice,
        "find_spec",
        lambda name: PathFinder.find_spec(name, [str(machine.packages)]),
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return machine


def refusal(**options: str) -> BackendUnavailable | ConfigError:
    with pytest.raises((BackendUnavailable, ConfigError)) as caught:
        choose_device(EngineOptions(**options))
    assert caught.value.why and caught.value.hint
    return caught.value


def test_a_gpu_that_can_be_used_is_used(machine: Machine) -> None:
    machine.install("torch", "triton", "fla").has_gpu(GPU)
    for kind in ("auto", "cuda"):
        device = choose_device(EngineOptions(device=kind))
        assert (device.kind, device.name) == ("cuda", "GPU 0 NVIDIA H200")
    assert choose_device(EngineOptions(device="cpu")).kind == "cpu"


@pytest.mark.parametrize(
    ("packages", "cuda", "cards", "why"),
    [
        (("torch", "triton", "fla"), False, (GPU,), "torch was built without CUDA"),
        (("torch", "triton", "fla"), True, None, "NVML is missing or lists no GPU"),
        (("torch", "triton", "fla"), True, (), "NVML is missing or lists no GPU"),
        (("torch", "triton", "fla"), True, (NO_SIZE,), "does not say how much memory"),
        (("torch", "fla"), True, (GPU,), "triton is not installed (pip install 'minivllm[cuda]')"),
    ],
)
def test_cuda_is_refused_with_the_reason_and_auto_takes_the_cpu(
    machine: Machine, caplog, packages, cuda, cards, why
) -> None:
    machine.install(*packages, cuda=cuda)
    if cards is not None:
        machine.has_gpu(*cards)
    error = refusal(device="cuda")
    assert error.what == "no usable CUDA device" and why in error.why
    assert error.hint == '--device cpu (in Python: engine={"device": "cpu"})'
    with caplog.at_level(logging.WARNING):
        prepared = prepare("demo", EngineConfig.create(engine={"device": "auto"}))
    assert prepared.plan.device.kind == "cpu"
    told = [r.getMessage() for r in caplog.records if "is not used" in r.getMessage()]
    # Once where there is a GPU, and never where there is none.
    assert len(told) == bool(cards)
    assert all("NVIDIA" in text and why in text for text in told)


def test_a_gpu_that_is_hidden_is_none(machine: Machine, monkeypatch, caplog) -> None:
    machine.install("torch", "triton", "fla").has_gpu(GPU)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device(EngineOptions()).kind == "cpu"
    assert "lists no GPU" in refusal(device="cuda").why
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "engine.gated_delta_prefill is auto"),
        ({"gated_delta_prefill": "fla"}, "engine.gated_delta_prefill is fla"),
        (
            {"gated_delta_prefill": "reference", "gated_delta_decode": "fla"},
            "engine.gated_delta_decode is fla",
        ),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_fla_is_asked_for_where_something_needs_it(machine: Machine, options, why, device) -> None:
    machine.install("torch", "triton").has_gpu(GPU)
    error = refusal(device=device, **options)
    assert "flash-linear-attention" in error.what and error.why == why
    assert error.hint == "pip install 'flash-linear-attention>=0.6,<0.7'"
    assert choose_device(EngineOptions(gated_delta_prefill="reference")).kind == "cuda"
    machine.install("fla")
    assert choose_device(EngineOptions(device=device, **options)).kind == "cuda"


def test_flash_is_asked_for_where_it_is_wanted(machine: Machine) -> None:
    machine.install("torch", "triton", "fla").has_gpu(GPU)
    error = refusal(attention_backend="flash")
    assert error.what == "flash-attn is not installed"
    assert "pip install 'flash-attn" in error.hint
    assert "--set engine.attention_backend=triton" in error.hint
    machine.install("flash_attn")
    assert choose_device(EngineOptions(attention_backend="flash")).kind == "cuda"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_backend", "triton"),
        ("attention_backend", "flash"),
        ("gated_delta_prefill", "fla"),
        ("gated_delta_decode", "fla"),
        ("gated_delta_decode", "triton"),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_backends_of_a_gpu_are_refused_on_a_cpu(machine: Machine, key, value, device) -> None:
    machine.install("torch", cuda=False)
    error = refusal(device=device, **{key: value})
    assert isinstance(error, ConfigError)
    assert error.what == f"engine.{key} {value} needs a GPU" and "cpu" in error.why
    assert error.hint == f"--set engine.{key}=auto"
    for kept in ("auto", "reference"):
        assert choose_device(EngineOptions(device=device, **{key: kept})).kind == "cpu"


def test_nothing_is_loaded_to_choose(machine: Machine) -> None:
    # The packages are there and raise when they are loaded.
    machine.install("torch", "triton", "fla", "flash_attn").has_gpu(GPU)
    script = (
        "import sys;"
        "from support.fake_nvml import Card, FakeNvml;"
        "sys.modules['pynvml'] = FakeNvml(Card());"
        "from minivllm_engine.core.config import EngineOptions;"
        "from minivllm_engine.memory.device_choice import choose_device;"
        "print(choose_device(EngineOptions(attention_backend='flash')).kind)"
    )
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(machine.packages), *filter(None, sys.path)])
    }
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=True
    )
    assert done.stdout == "cuda\n"
