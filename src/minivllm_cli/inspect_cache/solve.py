"""`--solve`: the largest value of one key that fits, as YAML to paste."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from minivllm_cli.engine import ModelShape
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.memory.fit import Fit
from minivllm_engine.memory.limits import (
    largest_max_model_len,
    unlowered_max_num_seqs,
    with_engine,
)
from minivllm_engine.memory.suggest import Planner

_MEANING = {
    "max_num_seqs": (
        "the most sequences, with a KV block each, that fit beside one",
        "of max_model_len tokens and the state snapshots",
    ),
    "max_model_len": (
        "the longest sequence, within the model's positions, that",
        "fits beside max_num_seqs state slots and the state snapshots",
    ),
}


class Solvable(StrEnum):
    """Keys of section `engine` that can be solved for."""

    MAX_NUM_SEQS = "max_num_seqs"
    MAX_MODEL_LEN = "max_model_len"


@dataclass(frozen=True, slots=True)
class Solution:
    """The largest `key`, and the plan that it gives together with the other one of the two keys."""

    key: Solvable
    result: Fit

    @property
    def engine(self) -> dict[str, int]:
        plan = self.result.plan
        return {"max_num_seqs": plan.max_num_seqs, "max_model_len": plan.max_model_len}

    def document(self) -> dict[str, Any]:
        """As it stands in the JSON document."""
        meaning = " ".join(_MEANING[self.key.value])
        return {"key": self.key.value, "meaning": meaning, "config": {"engine": self.engine}}

    def yaml(self) -> str:
        """A config file, or a part of one."""
        first, *more = _MEANING[self.key.value]
        fitting = self.result.plan.full_length_requests
        lines = [
            f"# {self.key.value} is {first}",
            *(f"# {text}" for text in more),
            f"# requests of max_model_len tokens at once: {fitting:,}",
            "engine:",
            *(f"  {key}: {value}" for key, value in self.engine.items()),
        ]
        return "".join(f"{line}\n" for line in lines)


def without(config: EngineConfig, key: Solvable) -> EngineConfig:
    """`config` with the key that is to be found left open."""
    return with_engine(config, **{key.value: None})


def solve(
    key: Solvable, shape: ModelShape, config: EngineConfig, result: Fit, planner: Planner
) -> Solution:
    """The largest value of `key` that fits beside everything else of a plan, nothing of it lowered.

    Args:
        config: with `key` left open.
        result: of it, and it fits.
    """
    plan = result.plan
    if key is Solvable.MAX_NUM_SEQS:
        count = unlowered_max_num_seqs(config, result, planner).value
        length = plan.max_model_len
    else:
        count = plan.max_num_seqs
        positions = shape.config.max_position_embeddings
        length = largest_max_model_len(config, result, planner, positions=positions)
    return Solution(key, planner(with_engine(config, max_num_seqs=count, max_model_len=length)))
