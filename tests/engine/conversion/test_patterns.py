"""Patterns of names: what a user writes is what the table and the errors print."""

import re
from pathlib import Path

import pytest
import torch

from minivllm_engine.conversion import ConvertOptions, Plan, open_source, plan_conversion
from minivllm_engine.conversion.patterns import as_regex, filled, matches
from minivllm_engine.core.errors import ConfigError
from support.tiny_checkpoint import OFFICIAL, nested, random_tensors, tiny_config, write_checkpoint

CONFIG = tiny_config()


@pytest.mark.parametrize(
    ("pattern", "name", "groups"),
    [
        ("a.b", "a.b", ()),
        ("a.b", "axb", None),
        ("layers.*.x", "layers.3.x", ("3",)),
        ("layers.*.x", "layers.3.y.x", None),
        ("layers.**.x", "layers.3.y.x", ("3.y",)),
        ("**", "a.b.c", ("a.b.c",)),
        ("a.**", "a", None),
        ("layers.{0-2,7}.x", "layers.2.x", ("2",)),
        ("layers.{0-2,7}.x", "layers.7.x", ("7",)),
        ("layers.{0-2,7}.x", "layers.3.x", None),
        ("layers.{10-12}.*", "layers.11.w", ("11", "w")),
        ("a.{x}.b", "a.{x}.b", ()),  # braces without numbers are just that
        ("a[0].(b)", "a[0].(b)", ()),
        ("a.*", "a.\n", ("\n",)),
    ],
)
def test_matching(pattern: str, name: str, groups: tuple[str, ...] | None) -> None:
    match = as_regex(pattern).fullmatch(name)
    assert (None if match is None else match.groups()) == groups
    if groups is not None:
        assert filled(pattern, groups) == name


def test_a_range_cannot_use_up_the_memory() -> None:
    for numbers in ("0-999999999999", "9" * 5000, ",".join(["0-9999"] * 3)):
        for wrong in (
            {"renames": (("a.{" + numbers + "}.b", None),)},
            {"allow_unmatched": ("a.{" + numbers + "}.b",)},
            {"allow_missing": ("a.{" + numbers + "}.b",)},
        ):
            with pytest.raises(ConfigError, match="in braces"):
                ConvertOptions(**wrong)


MISTAKES = [
    # source, target, the character from 1 that is pointed at, words of what
    ("layers.{9-1}.x", None, 8, "the range 9-1 is empty"),
    ("a.{}.x", None, 3, "stands for no number"),
    *(
        ("a.{" + item + "}.x", None, 3, "is no number")
        for item in (
            "a-b",
            "x",
            "-3",
            "-3--1",
            "1-",
            "1-2-3",
            "1,,2",
            ",1",
            "0, 1",
            "01",
            "00-03",
            "١",
        )
    ),
    ("a.{1.x", None, 3, "without its other half"),
    ("a.1}.x", None, 4, "without its other half"),
    ("a.in_proj_{qkv,z}.w", None, 11, "braces inside a segment"),
    ("a.{0}{1}.w", None, 3, "braces inside a segment"),
    ("a.b*.w", None, 4, "a * inside a segment"),
    ("a.***.w", None, 3, "a * inside a segment"),
    ("a..w", None, 3, "an empty segment"),
    (".a", None, 1, "an empty segment"),
    ("a.", None, 3, "an empty segment"),
    ("a.*", "b.*.*", 5, "more * than on the left"),
    ("a.b", "b.{1}", 3, "more * than on the left"),
    ("a.*", "b.{3}", 3, "{3} where the left has *"),
    ("a.{0-2}.x", "a.{3-5}.x", 3, "{3-5} where the left has {0-2}"),
    ("a.*", "b.$1", 3, "'$' in the name of a target"),
    ("a.*", "b.\\1", 3, "in the name of a target"),
    ("a.*", "b.{name}", 3, "is no number"),
    ("a.*", "b c", 2, "' ' in the name of a target"),
    ("a", "ä.w", 1, "'ä' in the name of a target"),
]


@pytest.mark.parametrize(("source", "target", "at", "what"), MISTAKES)
def test_what_cannot_be_meant_is_refused_where_it_stands(
    source: str, target: str | None, at: int, what: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ConvertOptions(renames=((source, target),))
    refused = caught.value
    assert what in refused.what and refused.what.endswith(f"(character {at})")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("a.{1-1}.x", "a.{1-1}.x"),
        ("a.{1,1}.x", None),
        ("a.{0-3,2}.x", None),
        ("a.{0-9999}.x", "a.*.x"),
        ("a.*.b.**", "x.**.y.*"),
        ("it's $1 (here)", "norm.weight"),
        ("**", "a.**"),
    ],
)
def test_what_can_be_meant_is_taken(source: str, target: str | None) -> None:
    assert ConvertOptions(renames=((source, target),)).renames == ((source, target),)


@pytest.mark.parametrize("glob", ["a.{9-1}.x", "{}", "x{1,}", "{ 1}*", "a.{-1}"])
def test_a_glob_with_numbers_that_are_none(glob: str) -> None:
    for option in ("allow_unmatched", "allow_missing"):
        with pytest.raises(ConfigError, match="character") as caught:
            ConvertOptions(**{option: (glob,)})
        assert caught.value.what.startswith(f"--{option.replace('_', '-')} {glob!r}: ")


@pytest.mark.parametrize("glob", ["a.{x}.b", "{qkv,z}", "[{]", "a.{0-2}*", "}"])
def test_braces_in_a_glob_that_are_part_of_a_name(glob: str) -> None:
    assert ConvertOptions(allow_unmatched=(glob,)).allow_unmatched == (glob,)


@pytest.mark.parametrize(
    ("name", "glob", "found"),
    [
        ("a.0.b", "a.*", True),
        ("a.0.b", "a.{0-2}.b", True),
        ("a.0.b", "a.{0,1}.*", True),
        ("a.3.b.1.c", "a.{2-3}.b.{0-1}.c", True),
        ("a.3.b", "a.{0-2}.b", False),
        ("a[1]", "a[1]", True),
        ("a1", "a[1]", True),
    ],
)
def test_globs(name: str, glob: str, found: bool) -> None:
    assert matches(name, [glob]) == found


def own_names(prefix: str) -> dict[str, torch.Tensor]:
    tensors = random_tensors(CONFIG, prefix=prefix)
    return {name.replace("mlp.up_proj", "ffn.w3"): tensor for name, tensor in tensors.items()}


def plan_of(tensors: dict[str, torch.Tensor], path: Path, *renames: tuple[str, str | None]) -> Plan:
    config = nested(CONFIG) if any("language_model" in name for name in tensors) else CONFIG
    source = open_source(write_checkpoint(path, config, tensors))
    return plan_conversion(source, ConvertOptions(renames=renames))


WAYS = {
    "as the error prints it": ("model.layers.{0-3}.ffn.w3.weight", "layers.*.mlp.up_proj.weight"),
    "as the table prints it": ("model.layers.*.ffn.w3.weight", "model.layers.*.mlp.up_proj.weight"),
    "braces on both sides": (
        "model.layers.{0-3}.ffn.w3.weight",
        "model.layers.{0-3}.mlp.up_proj.weight",
    ),
    "bare": ("layers.*.ffn.w3.weight", "layers.*.mlp.up_proj.weight"),
    "bare to canonical": ("layers.*.ffn.w3.weight", "model.layers.*.mlp.up_proj.weight"),
    "the rest of it": ("model.layers.*.ffn.w3.**", "model.layers.*.mlp.up_proj.**"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prefix", ["model.", OFFICIAL, "", "module._orig_mod.model."])
def test_a_name_in_any_spelling_of_it(way: str, prefix: str, tmp_path: Path) -> None:
    source, target = WAYS[way]
    for spelling in {source, source.replace("model.", prefix, 1)}:
        plan = plan_of(own_names(prefix), tmp_path, (spelling, target))
        assert plan.ok, spelling
        assert not any("matches no tensor" in note for note in plan.notes)


def test_every_name_that_is_printed_can_be_dropped_by_it(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG, prefix=OFFICIAL)
    extra = [f"{OFFICIAL}layers.{i}.aux.{j}.w" for i in range(3) for j in range(2)]
    extra += [f"{OFFICIAL}layers.{i}.rotor.w" for i in (0, 1, 3)] + ["visual.x.y", "scale"]
    tensors |= {name: torch.zeros(2) for name in extra}
    plan = plan_of(tensors, tmp_path)
    names = [problem.name for problem in plan.problems]
    assert f"{OFFICIAL}layers.{{0,1,3}}.rotor.w" in names
    printed = [(name, None) for name in names]
    plan = plan_of(tensors, tmp_path, *printed, ("visual.**", None))
    assert plan.ok and {dropped.source for dropped in plan.dropped} == set(extra)
    assert {dropped.rule for dropped in plan.dropped} == {"rename"}
    allowed = ConvertOptions(allow_unmatched=tuple(names))
    assert plan_conversion(plan.source, allowed).ok


def test_a_stored_name_is_meant_for_itself_alone(tmp_path: Path) -> None:
    """`norm.weight` in the file, and not `model.norm.weight` whose bare name that is."""
    tensors = random_tensors(CONFIG) | {"norm.weight": torch.zeros(64)}
    plan = plan_of(tensors, tmp_path, ("norm.weight", None))
    assert plan.ok and [dropped.source for dropped in plan.dropped] == ["norm.weight"]


def test_a_drop_that_matches_nothing_says_so_in_words(tmp_path: Path) -> None:
    plan = plan_of(random_tensors(CONFIG), tmp_path, ("extra.*", None), ("w3", "norm.weight"))
    told = [note for note in plan.notes if "matches no tensor" in note]
    assert told == [
        "the drop of 'extra.*' matches no tensor",
        "the rename of 'w3' matches no tensor",
    ]
    assert not re.search(r"\bNone\b", " ".join(plan.notes))
