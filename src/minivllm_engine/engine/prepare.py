"""Everything that can be known and refused before weights are loaded: files, config and memory. No torch."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import tokenizers
from tokenizers import models

from minivllm_engine.checkpoint.index import CheckpointIndex, resolve_model
from minivllm_engine.checkpoint.random_weights import RandomWeights
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.errors import ConfigError, RequestError
from minivllm_engine.core.units import count_text
from minivllm_engine.memory.device_choice import choose_device
from minivllm_engine.memory.devices import DeviceMemory
from minivllm_engine.memory.layout import MemoryPlan
from minivllm_engine.memory.plan import plan_memory
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.model_config.generation_config import GenerationConfig, load_generation_config
from minivllm_engine.model_config.shapes import shape_config
from minivllm_engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedModel:
    """A model whose parts agree with each other and whose engine fits in memory.

    Attributes:
        index: where the weights come from.
        config: with every `auto` resolved.
        asked_for: the config as it was given.
        end_ids: the union of the end ids in config.json, generation_config.json and the tokenizer.
    """

    path: Path
    model_config: ModelConfig
    index: CheckpointIndex | RandomWeights
    tokenizer: Tokenizer
    generation_config: GenerationConfig
    plan: MemoryPlan
    config: EngineConfig
    asked_for: EngineConfig
    end_ids: frozenset[int]


def prepare(model: str | Path, config: EngineConfig) -> PreparedModel:
    """Check a model and a config as far as it goes without loading weights. Warns by logging.

    Raises:
        BackendUnavailable: the device that was asked for is not there.
        CheckpointError: a file is missing or broken, or two of them disagree.
        CapacityError, ConfigError: a value that was set does not fit.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise ConfigError(f"model {model!r} is neither a directory nor 'demo'")
    device = choose_device(config.engine)
    path = resolve_model(model)
    model_config = ModelConfig.from_dir(path)
    index = CheckpointIndex.open(path)
    index.check(model_config)
    if index.num_skipped:
        logger.warning(
            "%s of parts that are not used (vision, MTP) are left out",
            count_text(index.num_skipped, "tensor"),
        )
    tokenizer = Tokenizer.for_model(path, model_config.vocab_size)
    return prepare_parts(
        path=path,
        model_config=model_config,
        weights=index,
        tokenizer=tokenizer,
        generation_config=load_generation_config(path),
        config=config,
        device=device,
    )


def prepare_parts(
    *,
    path: Path,
    model_config: ModelConfig,
    weights: CheckpointIndex | RandomWeights,
    tokenizer: Tokenizer,
    generation_config: GenerationConfig,
    config: EngineConfig,
    device: DeviceMemory,
) -> PreparedModel:
    """Do the second half of `prepare`, for parts that were read or made and agree with each other.

    Raises:
        BackendUnavailable, CapacityError, ConfigError: as `prepare`.
    """
    if config.graph.enabled and device.kind != "cuda":
        raise ConfigError(
            "graph.enabled true needs a GPU",
            why=f"this run uses {device.kind}",
            hint="--set graph.enabled=false",
        )
    if config.graph.enabled and not config.engine.can_capture:
        raise ConfigError(
            "graph.enabled is true, and reference operations cannot be captured",
            why=f"engine.attention_backend {config.engine.attention_backend}, "
            f"engine.gated_delta_decode {config.engine.gated_delta_decode}",
            hint="--set graph.enabled=false",
        )
    plan = plan_memory(model_config, config, device, tied=weights.seems_tied(model_config))
    logger.info("%s", _what_can_hit(plan))
    end_ids = {
        *model_config.eos_token_ids,
        *generation_config.eos_token_ids,
        *tokenizer.eos_ids,
    }
    for end_id in sorted(i for i in end_ids if not 0 <= i < model_config.vocab_size):
        logger.warning("%s: eos_token_id %d is no token of this model and is ignored", path, end_id)
        end_ids.discard(end_id)
    return PreparedModel(
        path=path,
        model_config=model_config,
        index=weights,
        tokenizer=tokenizer,
        generation_config=generation_config,
        plan=plan,
        config=_resolve(config, plan),
        asked_for=config,
        end_ids=frozenset(end_ids),
    )


def _what_can_hit(plan: MemoryPlan) -> str:
    pools = (
        f"{count_text(plan.num_snapshots, 'state snapshot')}, {count_text(plan.num_blocks, 'KV block')} of "
        f"{plan.block_size} tokens"
    )
    if not plan.prefix_cache:
        return f"prefix cache: off; {pools}"
    shortest = plan.min_reusable_prefix
    if shortest is None:
        return f"prefix cache: no prefix can hit; {pools}"
    return f"prefix cache: the shortest prefix that can hit has {shortest} tokens; {pools}"


def _resolve(config: EngineConfig, plan: MemoryPlan) -> EngineConfig:
    update = {
        "device": plan.device.kind,
        "max_num_seqs": plan.max_num_seqs,
        "max_model_len": plan.max_model_len,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "dtype": plan.dtype,
        "state_dtype": plan.state_dtype,
    }
    if plan.device.kind == "cpu":
        update["cpu_memory"] = plan.memory
    engine = config.engine.model_copy(update=update)
    cache = config.cache.model_copy(
        update={"num_blocks": plan.num_blocks, "snapshot_memory": plan.snapshot_bytes}
    )
    return config.model_copy(update={"engine": engine, "cache": cache})


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
    """Prepare a model with random weights, of a shape that `shape_config` knows.

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
