"""What is proposed for a plan with problems has been tried: it mends something and loses no tensor."""

import shlex
from pathlib import Path

import pytest
import torch
import yaml

from minivllm_engine.conversion import ConvertOptions, Plan, open_source, plan_conversion
from minivllm_engine.conversion.explaining import _scalar, proposal
from minivllm_engine.conversion.problems import counts_of
from support.converted import convert_to, files_of
from support.tiny_checkpoint import random_tensors, tiny_config, write_checkpoint

Tensors = dict[str, torch.Tensor]
CONFIG = tiny_config()
REFERENCE = random_tensors(CONFIG)
MISSPELT = (
    ("up_proj", "up_prj"),
    ("gate_proj", "gte_proj"),
    ("q_norm", "qnorm"),
    ("A_log", "Alog"),
)


def renamed(*pairs: tuple[str, str]) -> Tensors:
    out = {}
    for name, tensor in REFERENCE.items():
        for old, new in pairs:
            name = name.replace(old, new)
        out[name] = tensor.clone()
    return out


def follow(source: Path, **options: object) -> tuple[Plan, int]:
    """The plan after every proposed mapping was taken, and how many there were."""
    plan = plan_conversion(open_source(source), ConvertOptions(**options))  # type: ignore[arg-type]
    for step in range(10):
        mapping = proposal(plan).mapping if plan.problems else None
        if mapping is None:
            return plan, step
        better = plan_conversion(open_source(source), ConvertOptions(renames=mapping))
        before, after = counts_of(plan.problems), counts_of(better.problems)
        assert after.total() < before.total() and all(after[k] <= before[k] for k in after)
        assert len(better.dropped) <= len(plan.dropped)
        plan = better
    raise AssertionError("no end")


WHOLE: dict[str, tuple[Tensors, int]] = {
    "one misspelt": (renamed(("up_proj", "up_prj")), 1),
    "in one layer": (renamed(("layers.1.mlp.up_proj", "layers.1.mlp.up_prj")), 1),
    "at the root": (renamed(("model.norm", "model.nrm")), 1),
    "another word of the only shape": (renamed(("mlp.up_proj", "mlp.w3")), 1),
    "a part of another name": (renamed(("mlp.up_proj", "ffn.w3")), 1),
    "many misspelt": (renamed(*MISSPELT), 4),
    "another way in each layer": (
        renamed(*((f"{i}.mlp.up_proj", f"{i}.mlp.up_pr{i}j") for i in range(4))),
        4,
    ),
    "below a name of its own": ({f"student.{name}": t for name, t in REFERENCE.items()}, 1),
    "layers under another word": (renamed(("model.layers", "model.blocks")), 1),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_source_that_is_whole_is_converted_by_what_is_proposed(case: str, tmp_path: Path) -> None:
    tensors, steps = WHOLE[case]
    src = write_checkpoint(tmp_path / "src", CONFIG, tensors)
    plan, taken = follow(src)
    assert plan.ok and taken == steps
    convert_to(src, tmp_path / "dst", renames=plan.options.renames)
    convert_to(write_checkpoint(tmp_path / "right", CONFIG, REFERENCE), tmp_path / "wanted")
    assert files_of(tmp_path / "dst") == files_of(tmp_path / "wanted")


UNSURE: dict[str, Tensors] = {
    "two that could be it": renamed(("up_proj", "up_prj"))
    | {n.replace("up_proj", "up_proi"): t for n, t in REFERENCE.items() if "up_proj" in n},
    "one that could be two": renamed(("up_proj", "w3"), ("gate_proj", "w1")),
    "a vector that could be any norm": renamed(("input_layernorm", "scale")),
    "another shape": {n: t for n, t in REFERENCE.items() if n != "model.norm.weight"}
    | {"model.nrm.weight": torch.zeros(65)},
    "nothing like it": {n: t for n, t in REFERENCE.items() if "o_proj" not in n},
    "no name is known": {name.upper(): tensor for name, tensor in REFERENCE.items()},
    "a brace, which no pattern can name": renamed(("model.norm.weight", "model.no{rm.weight")),
    "all twice": REFERENCE | {f"module.{name}": t + 1 for name, t in REFERENCE.items()},
    "half a norm": {**REFERENCE, "model.norm.weight": torch.zeros(32)},
}


@pytest.mark.parametrize("case", UNSURE)
def test_nothing_is_proposed_that_is_a_guess(case: str, tmp_path: Path) -> None:
    src = write_checkpoint(tmp_path / "src", CONFIG, UNSURE[case])
    plan = plan_conversion(open_source(src))
    found = proposal(plan)
    assert plan.problems and found.mapping is None and found.text
    if any(problem.kind == "missing" for problem in plan.problems):
        assert "--allow" not in found.text


def test_a_misspelt_head_is_not_taken_for_a_tied_one(tmp_path: Path) -> None:
    """Obeyed, that advice would make a model that answers nonsense."""
    for i, name in enumerate(("lm_head.w.other", "output.weight", "head")):
        tensors = renamed(("lm_head.weight", name))
        src = write_checkpoint(tmp_path / str(i), CONFIG, tensors)
        plan = plan_conversion(open_source(src))
        assert {problem.kind for problem in plan.problems} == {"unmatched", "missing"}
        said = [proposal(plan).text, *(p.remedy + p.detail for p in plan.problems)]
        assert not any("tie_word_embeddings" in text for text in said)
        plan = plan_conversion(open_source(src), ConvertOptions(allow_unmatched=(name,)))
        assert "tie_word_embeddings" not in proposal(plan).text


MLP = "layers.*.mlp."
MAPPINGS: dict[str, dict[str, str | None]] = {
    "drops a pattern": {MLP + "up_proj.weight": None},
    "drops many": {"layers.*.mlp.**": None},
    "drops by two lines": {MLP + "up_proj.weight": None, MLP + "down_proj.weight": None},
    "onto no name": {MLP + "up_proj.weight": MLP + "upper.weight"},
    "onto another shape": {MLP + "up_proj.weight": MLP + "down_proj.weight"},
    "onto a name that there is": {"model.norm.weight": "layers.0.input_layernorm.weight"},
}


@pytest.mark.parametrize("case", MAPPINGS)
def test_a_line_that_takes_what_the_model_needs_is_to_go(case: str, tmp_path: Path) -> None:
    src = write_checkpoint(tmp_path, CONFIG, REFERENCE)
    renames = tuple(MAPPINGS[case].items())
    plan = plan_conversion(open_source(src), ConvertOptions(renames=renames))
    text = proposal(plan).text
    assert any(f"leave the line '{source}' out" in text for source, _ in renames)
    assert any(problem.detail.startswith("the line '") for problem in plan.problems)
    plan, steps = follow(src, renames=renames)
    assert plan.ok and steps == len(renames)


def test_what_no_rule_knows_can_be_left_out_if_the_model_is_whole(tmp_path: Path) -> None:
    names = ["extra.weight", "it's [odd]", "*", "a.{9-1}.b", "\x1b[2J\n", "n" * 5000, "a..b"]
    for i, name in enumerate(names):
        src = write_checkpoint(tmp_path / str(i), CONFIG, REFERENCE | {name: torch.zeros(1)})
        text = proposal(plan_conversion(open_source(src))).text
        (_, _, typed) = text.partition("if the model is the same without it: --allow-unmatched ")
        (glob,) = shlex.split(typed)
        assert text.isprintable() and len(glob) < 200
        plan = plan_conversion(open_source(src), ConvertOptions(allow_unmatched=(glob,)))
        assert plan.ok and [tensor.source for tensor in plan.dropped] == [name]


@pytest.mark.parametrize("name", ["a.*.{0-2}", "null", "é: {", "x, y", "no", "a\n"])
def test_a_name_is_read_as_it_is_printed(name: str) -> None:
    assert yaml.safe_load(f"{_scalar(name)}: b") == {name: "b"}
