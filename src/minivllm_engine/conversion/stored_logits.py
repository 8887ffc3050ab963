"""Comparing a model's logits with some that another program has stored: the last word on a conversion."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from minivllm_engine.checkpoint.index import CheckpointIndex, resolve_model
from minivllm_engine.checkpoint.locate import expanded
from minivllm_engine.checkpoint.safetensors_header import TensorEntry, read_header
from minivllm_engine.core.errors import CheckpointError, ConfigError
from minivllm_engine.core.escape import listed
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.runner.weights import load_weights
from minivllm_engine.tensors.cache_pool import CachePool
from minivllm_engine.tensors.model_input import ModelInput

_BLOCK_SIZE = 64
_CPU = torch.device("cpu")

# Of the largest stored logit: what two programs may differ in fp32, and what storing them in 16 bits,
# or weights that were cast to 16 bits after the logits were computed, adds to that.
_FP32_TOLERANCE = 1e-4
_16_BIT_TOLERANCE = {"F32": 0.0, "F64": 0.0, "F16": 2.0**-10, "BF16": 2.0**-7}
_CAST_TOLERANCE = 2.0**-4

_FORM = (
    "Write it with safetensors.torch.save_file({'input_ids': ids, 'logits': logits}, FILE): "
    "ids [T] whole numbers, logits [N, vocab_size] floats of the last N positions."
)


@dataclass(frozen=True, slots=True)
class LogitsReport:
    """How far a model is from stored logits.

    Attributes:
        num_positions: compared, the last ones of the prompt.
        max_difference: largest |difference| of one logit.
        num_other_tokens: positions at which the best token differs.
        tolerance: the difference that is allowed.
    """

    num_positions: int
    max_difference: float
    num_other_tokens: int
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.max_difference <= self.tolerance


def compare_logits(model: str | Path, file: str | Path, *, cast: bool = False) -> LogitsReport:
    """Run one prompt through `model` in fp32 and compare.

    Args:
        model: a model directory.
        file: safetensors with `input_ids` [T], whole numbers, and `logits` [N, vocab_size], floats, of the
            last N <= T positions.
        cast: the model's weights have lost precision since the logits were computed.

    Raises:
        ConfigError: `file` is not such a file, or does not belong to the model.
        CheckpointError: `file` is no safetensors file, or the model cannot be loaded.
    """
    path, file = resolve_model(model), expanded(file)
    config = ModelConfig.from_dir(path)
    ids, expected, stored = _read(file, config.vocab_size)
    network = MiniQwenForCausalLM(config, dtype=torch.float32, device=_CPU)
    load_weights(network, CheckpointIndex.open(path))
    found = _last_logits(network, ids, len(expected))
    share = _FP32_TOLERANCE + _16_BIT_TOLERANCE[stored] + (_CAST_TOLERANCE if cast else 0.0)
    return LogitsReport(
        num_positions=len(expected),
        max_difference=float((found - expected).abs().max()),
        num_other_tokens=int((found.argmax(-1) != expected.argmax(-1)).sum()),
        tolerance=share * max(1.0, float(expected.abs().max())),
    )


def check_stored_logits(file: str | Path, vocab_size: int) -> None:
    """Check that `file` is of the form that `compare_logits` takes, for a model of this vocabulary.

    Raises:
        ConfigError: no, and why.
    """
    _read(expanded(file), vocab_size)


def _read(file: Path, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The prompt [T], the logits [N, vocab_size] in fp32, and the type that they are stored in."""
    try:
        entries = {entry.name: entry for entry in read_header(file)}
    except CheckpointError as error:
        raise ConfigError(error.what, why=error.why, hint=_FORM) from None
    ids, logits = entries.get("input_ids"), entries.get("logits")
    if ids is None or logits is None:
        raise ConfigError(f"{file} has no input_ids and logits", why=_held(entries), hint=_FORM)
    valid = (
        ids.dtype in ("I64", "I32")
        and logits.dtype in _16_BIT_TOLERANCE
        and len(ids.shape) == 1
        and len(logits.shape) == 2
        and 0 < logits.shape[0] <= ids.shape[0]
    )
    if not valid:
        raise ConfigError(f"{file} is not of the form needed", why=_held(entries), hint=_FORM)
    if logits.shape[1] != vocab_size:
        raise ConfigError(
            f"{file} does not belong to this model",
            why=f"its logits have {logits.shape[1]} columns, vocab_size is {vocab_size}",
            hint="Use logits that were stored with the checkpoint that is converted.",
        )
    with safe_open(file, framework="pt", device="cpu") as tensors:
        prompt = tensors.get_tensor("input_ids").long()
        values = tensors.get_tensor("logits").float()
    wrong = int(((prompt < 0) | (prompt >= vocab_size)).sum())
    if wrong:
        raise ConfigError(
            f"{file} holds {wrong} ids outside the vocabulary",
            why=f"vocab_size is {vocab_size}, its ids are {int(prompt.min())} to {int(prompt.max())}",
            hint="Use ids of the model's own tokenizer.",
        )
    wrong = int((~values.isfinite()).sum())
    if wrong:
        raise ConfigError(
            f"{file} holds {wrong} logits that are not finite",
            why=f"of {values.numel():,}; nothing could be compared with them",
            hint="Store the logits of a forward pass that succeeded.",
        )
    return prompt, values, logits.dtype


def _held(entries: Mapping[str, TensorEntry]) -> str:
    parts = [f"{name} {entry.dtype} {list(entry.shape)}" for name, entry in entries.items()]
    return "it holds " + (listed(parts) or "nothing")


@torch.inference_mode()
def _last_logits(network: MiniQwenForCausalLM, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Logits of the last `count` positions of one prompt: [count, vocab_size]."""
    length = len(ids)
    num_blocks = math.ceil(length / _BLOCK_SIZE)
    pool = CachePool(
        network.config,
        num_slots=1,
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        dtype=torch.float32,
        state_dtype=torch.float32,
        device=_CPU,
    )
    batch = ModelInput(
        token_ids=ids,
        positions=torch.arange(length),
        starts=(0,),
        lengths=(length,),
        slots=torch.zeros(1, dtype=torch.int64),
        block_tables=torch.arange(num_blocks)[None],
        kv_slots=torch.arange(length),
        logits_rows=torch.arange(length - count, length),
        num_decodes=0,
    )
    logits: torch.Tensor = network(batch, pool)
    return logits
