"""`--solve` and `--recalibrate`: sizes that fit as planned, or as measured, as YAML to paste."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from minivllm_cli.engine import ModelShape
from minivllm_cli.errors import CliError
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.errors import CapacityError
from minivllm_engine.core.stats import LoadReport
from minivllm_engine.core.units import count_text, format_size
from minivllm_engine.memory.fit import Fit, Planner
from minivllm_engine.memory.layout import MemoryPlan
from minivllm_engine.memory.suggest import (
    largest_max_model_len,
    suggest_changes,
    unlowered_max_num_seqs,
    with_engine,
)

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
        """Write it as it stands in the JSON document."""
        meaning = " ".join(_MEANING[self.key.value])
        return {"key": self.key.value, "meaning": meaning, "config": {"engine": self.engine}}

    def yaml(self) -> str:
        """Write a config file, or a part of one."""
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
    """Return `config` with the key that is to be found left open."""
    return with_engine(config, **{key.value: None})


def solve(
    key: Solvable, shape: ModelShape, config: EngineConfig, result: Fit, planner: Planner
) -> Solution:
    """Find the largest value of `key` that fits beside everything else of a plan, nothing lowered.

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


@dataclass(frozen=True, slots=True)
class Recalibration:
    """A plan made with the graph reserve of a load report, beside the one that is in force.

    Attributes:
        num_blocks: KV blocks in force.
        plan: its `graph_bytes` are the measured ones.
    """

    report: LoadReport
    num_blocks: int
    plan: MemoryPlan

    @property
    def config(self) -> dict[str, dict[str, int]]:
        """The keys that lead to `plan`: the reserve, what it was measured for, what it leaves room for."""
        return {
            "engine": {
                "max_num_seqs": self.plan.max_num_seqs,
                "max_model_len": self.plan.max_model_len,
            },
            "cache": {"num_blocks": self.plan.num_blocks},
            "graph": {"reserve": self.plan.graph_bytes},
        }

    def document(self) -> dict[str, Any]:
        """Write it as it stands in the JSON document."""
        return {
            "load": asdict(self.report),
            "kv_blocks": {"in_force": self.num_blocks, "measured": self.plan.num_blocks},
            "config": self.config,
        }

    def yaml(self) -> str:
        """Write a config file, or a part of one."""
        report, sizes = self.report, self.report.graph_sizes
        lines = [
            f"# graph reserve: {format_size(report.graph_bytes_planned)} planned, "
            f"{format_size(report.graph_bytes)} measured",
            f"#   {count_text(len(sizes), 'graph')}, of batches up to {sizes[-1]}",
            f"# KV blocks: {self.num_blocks:,} in force, "
            f"{self.plan.num_blocks:,} with the measured reserve",
        ]
        for section, keys in self.config.items():
            lines += [f"{section}:", *(f"  {key}: {value}" for key, value in keys.items())]
        return "".join(f"{line}\n" for line in lines)


def check_has_graphs(plan: MemoryPlan) -> None:
    """Refuse before anything is loaded what cannot be measured.

    Raises:
        CliError: the engine of this plan captures no graphs.
    """
    if plan.max_graph_batch:
        return
    if plan.device.kind == "cpu":
        raise CliError(
            "--recalibrate measures CUDA graphs, and there are none on a CPU",
            hint="minivllm inspect-cache plan shows the estimate for a GPU: --memory 80GiB",
        )
    raise CliError(
        "--recalibrate measures CUDA graphs, and they are off", hint="--set graph.enabled=true"
    )


def recalibrate(
    report: LoadReport, plan: MemoryPlan, config: EngineConfig, planner: Planner
) -> Recalibration:
    """Plan again with the measured reserve, for as many sequences as it was measured for.

    Args:
        plan: in force, and made from `config`.
        planner: plans for the same model and device with another config.

    Raises:
        CapacityError: with what the graphs really take, the plan in force does not fit.
    """
    engine = config.engine.model_copy(update={"max_num_seqs": plan.max_num_seqs})
    graph = config.graph.model_copy(update={"reserve": report.graph_bytes})
    cache = config.cache.model_copy(update={"num_blocks": None})
    measured = config.model_copy(update={"engine": engine, "graph": graph, "cache": cache})
    result = planner(measured)
    if not result.ok:
        changes = suggest_changes(measured, planner)
        raise CapacityError(
            f"the graphs take {format_size(report.graph_bytes)}, and "
            f"{format_size(plan.graph_bytes)} are reserved: with them the plan does not fit",
            hint=", or ".join(map(str, changes)) or None,
        )
    found = Recalibration(report, plan.num_blocks, result.plan)
    _check(found, config, planner)
    return found


def _check(found: Recalibration, config: EngineConfig, planner: Planner) -> None:
    """The keys, set as a user would set them, must lead to the very plan they were taken from."""
    content = config.model_dump(exclude_unset=True)
    for section, keys in found.config.items():
        content[section] = {**content.get(section, {}), **keys}
    again = planner(EngineConfig.model_validate(content))
    assert again.ok and again.plan == found.plan, "a plan is a function of what was set"
