"""What `--solve` prints is a config that the planner accepts, for any config that it was solved for."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from engine.memory.test_memory_plan_refusals import random_case
from minivllm_cli.engine import ModelShape
from minivllm_cli.inspect_cache.solve import Solvable, solve, without
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.memory.fit import Fit
from minivllm_engine.memory.plan import try_plan


def pasted(config: EngineConfig, text: str) -> EngineConfig:
    """`config` with the printed YAML over it, read as a config file is."""
    content: dict[str, Any] = config.model_dump(exclude_unset=True)
    for section, keys in yaml.safe_load(text).items():
        content[section] = {**content.get(section, {}), **keys}
    return EngineConfig.model_validate(content)


def test_every_solution_is_accepted_and_is_the_largest() -> None:
    rng, outcomes = random.Random(21), Counter[str]()
    for _ in range(1500):
        model, device, config = random_case(rng)
        key = rng.choice(list(Solvable))

        def planner(other: EngineConfig, model=model, device=device) -> Fit:
            return try_plan(model, other, device)

        config = without(config, key)
        result = planner(config)
        if not result.ok:
            outcomes["nothing fits"] += 1
            continue
        shape = ModelShape(Path("m"), model, model.tie_word_embeddings, from_headers=False)
        solution = solve(key, shape, config, result, planner)
        again = planner(pasted(config, solution.yaml()))
        assert again == solution.result and again.ok, f"{config} on {device}: {solution.yaml()}"
        value = solution.engine[key]
        assert value == getattr(again.plan, key)
        # Nothing gave way that had not done so before, and one more would not do.
        lowered = {one.key for one in result.lowered} | {"engine.cpu_memory"}
        assert {one.key for one in again.lowered} <= lowered
        assert "engine.max_num_seqs" not in {one.key for one in again.lowered}
        outcomes[key] += 1
        if key is Solvable.MAX_MODEL_LEN and value == model.max_position_embeddings:
            continue
        content = solution.engine | {key: value + 1}
        beyond = planner(pasted(config, yaml.dump({"engine": content})))
        few_blocks = key is Solvable.MAX_NUM_SEQS and beyond.plan.num_blocks <= value
        assert not beyond.ok or few_blocks or {one.key for one in beyond.lowered} - lowered
    assert min(outcomes[key] for key in Solvable) > 50
