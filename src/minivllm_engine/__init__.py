"""minivllm's engine: hybrid Gated DeltaNet + attention language models.

Importing this package loads no torch; its public names load what they need when first used.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Models are local directories: nothing this package imports may look for them anywhere else.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# torch's threads wait for each other by spinning for milliseconds. Where another program has one of the
# cores they burn what they wait for: a small model was seen to run at a fortieth of its speed. After a
# tenth of that time they sleep, which costs some 10 % where all cores are free.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from minivllm_engine.core.config import EngineConfig
    from minivllm_engine.core.errors import (
        BackendUnavailable,
        CapacityError,
        CheckpointError,
        ConfigError,
        EngineError,
        RequestError,
    )
    from minivllm_engine.core.outputs import FinishReason, RequestOutput
    from minivllm_engine.core.sampling_params import SamplingParams
    from minivllm_engine.core.stats import EngineStats
    from minivllm_engine.llm import LLM

_HOME = {
    "LLM": "llm",
    "EngineStats": "core.stats",
    "EngineConfig": "core.config",
    "SamplingParams": "core.sampling_params",
    "RequestOutput": "core.outputs",
    "FinishReason": "core.outputs",
    "EngineError": "core.errors",
    "ConfigError": "core.errors",
    "CheckpointError": "core.errors",
    "CapacityError": "core.errors",
    "RequestError": "core.errors",
    "BackendUnavailable": "core.errors",
}

__all__ = [
    "LLM",
    "BackendUnavailable",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "EngineConfig",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
