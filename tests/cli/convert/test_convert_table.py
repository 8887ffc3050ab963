"""The table of a plan: everything is there, in the width that there is."""

from pathlib import Path

import pytest

from minivllm_cli.convert.table import braces, mapping_table, plan_text, problem_lines
from minivllm_engine.conversion import ConvertOptions, Needs, Plan, Problem, Row, Source

LAYER = "model.language_model.layers.*"
ROWS = (
    Row(
        f"{LAYER}.linear_attn.in_proj_qkvz.weight",
        36,
        (
            "model.layers.*.linear_attn.in_proj_qkv.weight",
            "model.layers.*.linear_attn.in_proj_z.weight",
        ),
        "qkvz-interleaved",
        "split rows",
        "bf16",
        False,
        9_771_050_598,
    ),
    Row(
        f"{LAYER}.linear_attn.A_log",
        36,
        ("model.layers.*.linear_attn.A_log",),
        "root",
        "rename",
        "fp32",
        True,
        13_824,
    ),
    Row("model.visual.**", 390, (), "text-only", "drop", "", False, 966_367_641),
)
PROBLEMS = (
    Problem(
        "unmatched",
        "layers.6.linear_attn.in_prj_ba.weight",
        nearest=(("layers.6.linear_attn.in_proj_ba.weight", 1),),
    ),
    Problem("missing", "model.layers.{6,7}.linear_attn.in_proj_a.weight", count=2),
    Problem("wrong_shape", "model.norm.weight", detail="[63], config.json asks for [64]"),
)


def _plan(problems: tuple[Problem, ...] = ()) -> Plan:
    source = Source(
        Path("src"), Path("src"), "safetensors", (), (), (), Path("src/config.json"), {}, (), ()
    )
    return Plan(
        source=source,
        options=ConvertOptions(),
        style=("qkvz-interleaved",),
        rows=ROWS,
        problems=problems,
        candidates=(),
        pieces=(),
        targets=(),
        dropped=(),
        shards=(),
        config={},
        notes=(),
        bytes_in=19_542_101_196,
        bytes_out=18_575_733_555,
        bytes_head=0,
        missing=(),
        needs=Needs(disk=23_944_000_000, disk_free=440_234_147_840, ram=6_012_954_214),
    )


def test_k40_at_80_columns_no_line_is_wider_and_nothing_is_lost() -> None:
    lines = mapping_table(ROWS, 80)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for row in ROWS:
        assert f"{row.count} " in text
    assert "split rows" in text and "fp32 kept" in text and "9.10 GiB" in text
    # Names are folded, and none is cut.
    names = "".join(line[5:].split("  ")[0] for line in lines)
    assert all(row.source in names for row in ROWS)
    assert "model.layers.*.linear_attn.in_proj_{qkv,z}.weight" in names
    assert "(dropped: rule text-only)" in names


def test_k40_the_same_words_where_there_is_room() -> None:
    words = sorted(" ".join(mapping_table(ROWS, None)).split())
    for width in (120, 200):
        lines = mapping_table(ROWS, width)
        assert max(map(len, lines)) <= width
        assert sorted(" ".join(lines).split()) == words


def test_into_a_pipe_every_row_has_one_line() -> None:
    header, *rows = mapping_table(ROWS, None)
    assert len(rows) == len(ROWS)
    assert header.split() == ["n", "source", "→", "target", "op", "dtype", "size"]
    at = [line.index("→") for line in (header, *rows)]
    assert len(set(at)) == 1


def test_problems_name_the_nearest_and_keep_to_the_width() -> None:
    narrow = problem_lines(PROBLEMS, 80)
    assert max(map(len, narrow)) <= 80
    assert narrow[:2] == [
        "UNMATCHED    layers.6.linear_attn.in_prj_ba.weight",
        "             nearest: layers.6.linear_attn.in_proj_ba.weight (1 edit)",
    ]
    assert problem_lines(PROBLEMS, None)[1:] == [
        "MISSING      model.layers.{6,7}.linear_attn.in_proj_a.weight   no source",
        "WRONG SHAPE  model.norm.weight   [63], config.json asks for [64]",
    ]


def test_a_sentence_goes_over_several_lines_on_a_terminal() -> None:
    sentence = " ".join(["its rows may lie one after the other"] * 8)
    problem = Problem("ambiguous", "layers.*.in_proj_qkvz.weight", detail=sentence)
    lines = problem_lines([problem], 80)
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()) == f"AMBIGUOUS {problem.name} {sentence}"
    assert problem_lines([problem], None) == [f"AMBIGUOUS  {problem.name}   {sentence}"]


def test_totals_count_every_problem_and_show_what_is_needed() -> None:
    text = plan_text(_plan(PROBLEMS), Path("dst"), 80)
    assert "0 tensors: 0 used · 1 unmatched · 2 missing · 1 of a wrong shape" in text
    assert "in 18.20 GiB → out 17.30 GiB in 0 files" in text
    assert "disk needed 22.30 GiB (free 410.00 GiB) · peak RAM 5.60 GiB" in text
    assert text.startswith("convert-weights --dry-run  src → dst   mapping qwen3_5@")


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a.x"], "a.x"),
        (["m.gate_proj.w", "m.up_proj.w"], "m.{gate,up}_proj.w"),
        (["x.q", "x.q2"], "x.q{,2}"),
        (["q.w", "k.w", "v.w"], "{q,k,v}.w"),
    ],
)
def test_names_are_written_as_one(names: list[str], shown: str) -> None:
    assert braces(names) == shown
