"""A model with a known shape, random weights and no tokenizer: speed can be measured without a checkpoint."""

from pathlib import Path
from typing import NoReturn

import tokenizers
from tokenizers import models

from minivllm_engine.checkpoint.random_weights import RandomWeights
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.errors import RequestError
from minivllm_engine.engine.prepare import PreparedModel, prepare_parts
from minivllm_engine.memory.device_choice import choose_device
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.model_config.generation_config import GenerationConfig
from minivllm_engine.model_config.shapes import shape_config
from minivllm_engine.text.tokenizer import Tokenizer


class NoTokenizer(Tokenizer):
    """Knows no token: every id is no text, and text cannot be encoded."""

    def __init__(self) -> None:
        super().__init__(tokenizers.Tokenizer(models.BPE()), {}, None)

    def encode(self, text: str) -> NoReturn:
        """Refuse.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            "this model has random weights and no tokenizer", hint="send prompt_token_ids"
        )


def prepare_random(shape: str, config: EngineConfig, *, seed: int = 0) -> PreparedModel:
    """As `prepare`, for random weights of a shape that `model_shapes.SHAPES` names.

    Raises:
        BackendUnavailable, CapacityError, ConfigError: as `prepare`.
    """
    return prepare_parts(
        path=Path(f"random-{shape}"),
        model_config=ModelConfig.from_dict(shape_config(shape), source=f"shape {shape}"),
        weights=RandomWeights(seed),
        tokenizer=NoTokenizer(),
        generation_config=GenerationConfig(),
        config=config,
        device=choose_device(config.engine),
    )
