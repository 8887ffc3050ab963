"""The one door to the engine: everything else here knows its requests, configs and errors only.

Functions import what they need when they are called, so that help and config errors load no torch.
Tests replace these functions by those of a fake engine.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm_cli.config.settings import Settings

if TYPE_CHECKING:
    from minivllm_engine.engine.prepare import PreparedModel
    from minivllm_engine.llm import LLM
    from minivllm_engine.memory.devices import DeviceMemory
    from minivllm_engine.memory.fit import Planner
    from minivllm_engine.memory.layout import MemoryPlan
    from minivllm_engine.model_config.config import ModelConfig
    from minivllm_engine.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]


def find_model(model: str) -> Path:
    """Find the directory of MODEL, a checkpoint that can be loaded as far as its headers tell.

    Raises:
        CheckpointError: there is no checkpoint in it, or not a whole one.
    """
    from minivllm_engine.checkpoint.index import CheckpointIndex, resolve_model
    from minivllm_engine.model_config.config import ModelConfig

    path = resolve_model(model)
    CheckpointIndex.open(path).check(ModelConfig.from_dir(path))
    return path


def prepare_model(settings: Settings) -> "PreparedModel":
    """Refuse all that can be refused about a model and its config without its weights. Loads no torch.

    Raises:
        EngineError: the checkpoint, the configuration, the memory or the device will not do.
    """
    from minivllm_engine.engine.prepare import prepare

    return prepare(settings.model, settings.engine_config)


def prepare_shape(shape: str, settings: Settings) -> "PreparedModel":
    """Prepare random weights of a known shape as `prepare_model` does. Loads no torch.

    Raises:
        EngineError: the configuration, the memory or the device will not do.
    """
    from minivllm_engine.engine.prepare import prepare_random

    return prepare_random(shape, settings.engine_config)


def add_model_sampling(settings: Settings, model_path: Path) -> Settings:
    """Add the model's generation config below what was set. Loads no torch.

    Raises:
        CheckpointError: generation_config.json is broken.
    """
    from minivllm_engine.model_config.generation_config import load_generation_config

    return settings.with_model_sampling(load_generation_config(model_path).sampling)


def load_tokenizer(model_path: Path) -> "Tokenizer":
    """Load the model's tokenizer, without the model. Loads no torch.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    from minivllm_engine.model_config.config import ModelConfig
    from minivllm_engine.text.tokenizer import Tokenizer

    return Tokenizer.for_model(model_path, ModelConfig.from_dir(model_path).vocab_size)


def plan_memory(
    settings: Settings, model_path: Path, device: "DeviceMemory | None" = None
) -> "MemoryPlan":
    """Plan what the engine will allocate and how long a sequence may be. Loads no torch.

    Args:
        device: as it was before this program's own engine was on it. None: as it is now.

    Raises:
        BackendUnavailable: the device that was asked for cannot be used.
        CapacityError: what was set does not fit.
        ConfigError: what was set is beyond what the model can do.
    """
    from minivllm_engine.memory.device_choice import choose_device
    from minivllm_engine.memory.plan import plan_memory

    shape, config = _shape(model_path), settings.engine_config
    device = device or choose_device(config.engine)
    return plan_memory(shape.config, config, device, tied=shape.tied)


@dataclass(frozen=True)
class ModelShape:
    """What a plan needs to know of a model.

    Attributes:
        tied: the output head is the embedding.
        from_headers: weights were there, and their headers agree with config.json.
    """

    path: Path
    config: "ModelConfig"
    tied: bool
    from_headers: bool

    def planner(self, device: "DeviceMemory") -> "Planner":
        """Return what plans engines for this model on `device`, without a word."""
        from minivllm_engine.memory.fit import Planner

        return Planner(self.config, device, self.tied)


def read_shape(model: str) -> ModelShape:
    """Read the shape of MODEL from its config.json, and from the headers of its weights if it has any.

    Raises:
        CheckpointError: there is no config.json, it cannot be read, or the weights are not those it asks for.
    """
    from minivllm_engine.checkpoint.locate import locate, refuse_what_is_no_model

    path = locate(model)
    if path.is_dir():
        refuse_what_is_no_model(path, [file.name for file in path.iterdir()])
    return _shape(path)


def _shape(path: Path) -> ModelShape:
    from minivllm_engine.checkpoint.index import CheckpointIndex
    from minivllm_engine.model_config.config import ModelConfig

    config = ModelConfig.from_dir(path)
    if not any(path.glob("*.safetensors*")):
        return ModelShape(path, config, config.tie_word_embeddings, from_headers=False)
    index = CheckpointIndex.open(path)
    index.check(config)
    return ModelShape(path, config, index.seems_tied(config), from_headers=True)


def make_planner(settings: Settings, shape: str | None = None) -> "Planner":
    """Make the planner for MODEL, or for random weights of a known shape, on the device that is set.

    Raises:
        EngineError: as `prepare_model` and `prepare_shape`, of the checkpoint or the device.
    """
    from minivllm_engine.memory.device_choice import choose_device
    from minivllm_engine.memory.plan import planner_of
    from minivllm_engine.model_config.config import ModelConfig
    from minivllm_engine.model_config.shapes import shape_config

    device = choose_device(settings.engine_config.engine)
    if shape is None:
        return read_shape(settings.model).planner(device)
    config = ModelConfig.from_dict(shape_config(shape), source=f"shape {shape}")
    return planner_of(config, device)


def longest_allowed(settings: Settings, model_path: Path) -> int:
    """Return the context limit that was set, or the model's, where there is no plan. Loads no torch."""
    from minivllm_engine.model_config.config import ModelConfig

    configured = settings.get("engine.max_model_len")
    return int(configured or ModelConfig.from_dir(model_path).max_position_embeddings)


def open_engine(prepared: "PreparedModel", progress: Progress | None = None) -> "LLM":
    """Load the weights and make an engine. Close it, or use it as a context manager.

    Stdout must have been claimed (console.py) before.

    Raises:
        EngineError: the weights cannot be loaded.
    """
    with _out_of_the_collectors_sight():
        from minivllm_engine.llm import LLM

        return LLM(prepared, progress=progress)


@contextmanager
def _out_of_the_collectors_sight() -> Iterator[None]:
    """What is alive at the end of this is not looked at by Python's garbage collector any more.

    With torch loaded it would take 90 ms for that every few dozen steps, and a sixth of the start.
    """
    gc.unfreeze()  # an engine before this one may be garbage by now
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()


def read_bandwidth(device: str) -> float:
    """Measure the bytes a second at which the device reads its memory. Takes a moment."""
    from minivllm_engine.runner.bandwidth import read_bandwidth

    return read_bandwidth(device)


def reset_peak_memory(device: str) -> None:
    """Begin to look for the peak anew."""
    from minivllm_engine.runner.bandwidth import reset_peak_memory

    reset_peak_memory(device)


def peak_memory(device: str) -> int | None:
    """Count the bytes that tensors held at most since then; None on a CPU."""
    from minivllm_engine.runner.bandwidth import peak_memory

    return peak_memory(device)


def num_threads() -> int:
    """Count the threads that compute on the CPU."""
    from minivllm_engine.runner.bandwidth import num_threads

    return num_threads()
