"""Plans: what is told before anything is written, from headers alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minivllm_engine.checkpoint.names import expected_tensors
from minivllm_engine.checkpoint.rules import BLOCK_ROWS, CANONICAL, FOREIGN
from minivllm_engine.conversion import (
    ConvertOptions,
    Plan,
    explain,
    open_source,
    plan_conversion,
    planning,
    problems,
)
from minivllm_engine.conversion.explaining import proposal
from minivllm_engine.conversion.layouts import num_rows, place_blocks
from minivllm_engine.core.errors import CheckpointError, ConfigError
from minivllm_engine.model_config.config import ModelConfig
from support import converted as layouts
from support.tiny_checkpoint import (
    OFFICIAL,
    nested,
    official_dtypes,
    random_tensors,
    tiny_config,
    write_checkpoint,
)

CONFIG = tiny_config()
REFERENCE = random_tensors(CONFIG)


def plan_of(tensors, path: Path, config=CONFIG, **options) -> Plan:
    source = open_source(write_checkpoint(path, config, tensors))
    return plan_conversion(source, ConvertOptions(**options), dst=path / "dst")


def problems_of(plan: Plan) -> set[tuple[str, str]]:
    return {(problem.kind, problem.name) for problem in plan.problems}


def test_planning_safetensors_loads_no_torch(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, REFERENCE)
    script = (
        "import sys; from minivllm_engine.conversion import explain, open_source, plan_conversion;"
        f"plan = plan_conversion(open_source({str(tmp_path)!r}));"
        "assert plan.ok and plan.to_json()['ok'];"
        "explain(plan, 'model.norm.weight');"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_table_of_rules_agrees_with_what_a_model_has() -> None:
    """Canonical rules cover every expected tensor, each block once, with as many rows as it has."""
    changes = ({}, {"attention_bias": True, "linear_num_value_heads": 6, "head_dim": 16})
    for config in (ModelConfig.from_dict(tiny_config(**change), "c") for change in changes):
        names = {rule.tensor for rule in CANONICAL}
        for name, dims in expected_tensors(config).items():
            tensor = name.split(".", 3)[3] if ".layers." in name else name.removeprefix("model.")
            assert tensor in names
            (rule,) = [rule for rule in CANONICAL if rule.tensor == tensor]
            assert num_rows(rule, config) == dims[0][1], name
        blocks = [block for rule in CANONICAL for block in rule.blocks]
        assert sorted(blocks) == sorted(BLOCK_ROWS)
        for rule in (*CANONICAL, *FOREIGN):
            rows = [
                row
                for place in place_blocks(rule, config).values()
                for start, end in place.runs()
                for row in range(start, end)
            ]
            assert sorted(rows) == list(range(num_rows(rule, config))), rule.name


def test_g8_nothing_is_dropped_in_silence(tmp_path: Path) -> None:
    """Unused and missing tensors are all in one report, by pattern, with the nearest names."""
    tensors = dict(REFERENCE)
    for i in range(3):
        name = f"model.layers.{i}.linear_attn.in_proj_b.weight"
        tensors[name.replace("in_proj_b", "in_prj_b")] = tensors.pop(name)
    del tensors["model.layers.2.linear_attn.A_log"]
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(128, 64)
    tensors["extra.weight"] = torch.zeros(3)
    tensors["model.norm.weight"] = torch.zeros(65)
    plan = plan_of(tensors, tmp_path)
    assert problems_of(plan) == {
        ("unmatched", "model.layers.{0-2}.linear_attn.in_prj_b.weight"),
        ("unmatched", "model.layers.9.mlp.up_proj.weight"),
        ("unmatched", "extra.weight"),
        ("wrong_shape", "model.norm.weight"),
        ("missing", "model.layers.{0-2}.linear_attn.in_proj_b.weight"),
        ("missing", "model.layers.2.linear_attn.A_log"),
    }
    by_name = {(problem.kind, problem.name): problem for problem in plan.problems}
    misspelt = by_name["unmatched", "model.layers.{0-2}.linear_attn.in_prj_b.weight"]
    assert misspelt.count == 3
    assert misspelt.nearest[0] == ("layers.*.linear_attn.in_proj_b.weight", 1)
    missing = by_name["missing", "model.layers.{0-2}.linear_attn.in_proj_b.weight"]
    assert missing.nearest[0] == ("model.layers.*.linear_attn.in_prj_b.weight", 1)
    assert by_name["unmatched", "model.layers.9.mlp.up_proj.weight"].detail == (
        "the config has 4 layers (0-3)"
    )
    assert by_name["wrong_shape", "model.norm.weight"].detail == (
        "is [65], config.json asks for [64]"
    )
    document = plan.to_json()
    assert not document["ok"] and len(document["unmatched"]) == 3 and len(document["missing"]) == 2
    json.dumps(document, allow_nan=False)


def test_near_names_are_not_looked_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source of noise: 3 ms for each name made this half a minute."""
    looked = []
    monkeypatch.setattr(problems, "nearest", lambda *args: looked.append(args) or ())
    noise = {f"odd{i}.{i % 7}.k{i % 13}": torch.zeros(1) for i in range(2_000)}
    plan = plan_conversion(open_source(write_checkpoint(tmp_path, CONFIG, REFERENCE | noise)))
    assert sum(problem.count for problem in plan.problems) == 2_000
    assert proposal(plan).text.endswith("--allow-unmatched GLOB for each")
    assert len(looked) == 200


def test_the_only_ways_past_the_coverage_rule(tmp_path: Path) -> None:
    tensors = {**REFERENCE, "extra.a": torch.zeros(3), "extra.b": torch.zeros(3)}
    del tensors["model.layers.3.self_attn.q_norm.weight"]
    plan = plan_of(tensors, tmp_path, allow_unmatched=("extra.a",))
    assert problems_of(plan) == {
        ("unmatched", "extra.b"),
        ("missing", "model.layers.3.self_attn.q_norm.weight"),
    }
    plan = plan_of(
        tensors, tmp_path, allow_unmatched=("extra.*",), allow_missing=("*.q_norm.weight",)
    )
    assert plan.ok
    assert [dropped.rule for dropped in plan.dropped] == ["allow-unmatched"] * 2


def test_half_a_fused_tensor_is_missing_rows(tmp_path: Path) -> None:
    """q_gate_proj in one layer makes q_proj the queries alone in all: the gates of the other are missing."""
    config = tiny_config(layer_types=["full_attention", "linear_attention"] * 2)
    tensors = layouts.q_gate_separate(random_tensors(config), config)
    del tensors["model.layers.2.self_attn.q_gate_proj.weight"]
    (problem,) = plan_of(tensors, tmp_path, config).problems
    assert (problem.kind, problem.name) == ("missing", "model.layers.2.self_attn.q_proj.weight")
    assert problem.detail == "rows 32:64, 96:128, 160:192 and 1 more have no source"


def test_layers_that_hold_the_other_mixer(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "linear_attention"]
    plan = plan_of(REFERENCE, tmp_path, tiny_config(layer_types=kinds))
    assert problems_of(plan) == {("layers", "model.layers.0"), ("layers", "model.layers.3")}
    assert plan.problems[0].detail == "holds linear_attention, config.json says full_attention"


def test_an_absent_head_needs_a_tied_config(tmp_path: Path) -> None:
    tensors = {name: t for name, t in REFERENCE.items() if name != "lm_head.weight"}
    (problem,) = plan_of(tensors, tmp_path).problems
    assert (problem.kind, problem.name) == ("missing", "lm_head.weight")
    assert "tie_word_embeddings" in problem.detail
    assert plan_of(tensors, tmp_path, tiny_config(tie_word_embeddings=True)).ok


def test_renames_are_tried_before_the_rules(tmp_path: Path) -> None:
    tensors = {name.replace("mlp.up_proj", "ffn.w3"): tensor for name, tensor in REFERENCE.items()}
    tensors["model.layers.0.ffn.router"] = torch.zeros(3)
    plan = plan_of(
        tensors,
        tmp_path,
        renames=(("layers.*.ffn.w3.*", "layers.*.mlp.up_proj.*"), ("layers.*.ffn.router", None)),
    )
    assert plan.ok
    assert [(d.source, d.rule) for d in plan.dropped] == [("model.layers.0.ffn.router", "rename")]
    (explanation,) = explain(plan, "model.layers.2.ffn.w3.weight")
    assert ("rename", "layers.2.mlp.up_proj.weight") in [
        (step.rule, step.text) for step in explanation.steps
    ]


def test_vision_mtp_and_rotary_buffers_are_dropped_by_rules_with_names(tmp_path: Path) -> None:
    extra = {
        "model.visual.blocks.0.attn.qkv.weight": "text-only",
        "model.visual.merger.norm.bias": "text-only",
        "mtp.layers.0.self_attn.q_proj.weight": "mtp",
        "mtp.fc.weight": "mtp",
        "model.layers.3.self_attn.rotary_emb.inv_freq": "rotary-buffer",
    }
    tensors = random_tensors(CONFIG, prefix=OFFICIAL) | {n: torch.zeros(2) for n in extra}
    plan = plan_of(tensors, tmp_path, nested(CONFIG))
    assert plan.ok
    assert {dropped.source: dropped.rule for dropped in plan.dropped} == extra
    rows = {(row.source, row.count, row.num_bytes) for row in plan.rows if row.op == "drop"}
    assert rows == {
        ("model.visual.**", 2, 16),
        ("mtp.**", 2, 16),
        ("model.layers.*.self_attn.rotary_emb.inv_freq", 1, 8),
    }


def test_every_row_of_the_table_adds_up(tmp_path: Path) -> None:
    tensors = layouts.qkvz_interleaved(random_tensors(CONFIG, prefix=OFFICIAL), CONFIG)
    plan = plan_of(tensors, tmp_path, nested(CONFIG), qkvz_layout="interleaved")
    assert sum(row.count for row in plan.rows) == len(tensors)
    assert sum(row.num_bytes for row in plan.rows) == plan.bytes_in == plan.source.num_bytes
    assert plan.bytes_out == sum(shard.num_bytes for shard in plan.shards)
    assert plan.num_used == len(tensors)
    (row,) = [row for row in plan.rows if "in_proj_qkvz" in row.source]
    assert row.source == "model.language_model.layers.*.linear_attn.in_proj_qkvz.weight"
    assert (row.count, row.op, row.rule) == (3, "interleaved rows", "qkvz-interleaved")
    assert row.targets == (
        "model.layers.*.linear_attn.in_proj_qkv.weight",
        "model.layers.*.linear_attn.in_proj_z.weight",
    )


OPERATIONS = {
    "model.norm.weight": (REFERENCE, {}, "copy"),
    "model.layers.*.mlp.gate_up_proj.weight": (layouts.run_time_names, {}, "split rows"),
    "model.layers.*.self_attn.q_gate_proj.weight": (
        layouts.q_gate_separate,
        {},
        "interleaved rows",
    ),
    "model.layers.*.mixer.A_log": (layouts.run_time_names, {}, "rename"),
    "model.layers.*.input_layernorm.weight": (layouts.mlx_export, {}, "w - 1"),
    "model.layers.*.linear_attn.conv1d.weight": (layouts.mlx_export, {}, "move axis"),
}


@pytest.mark.parametrize("pattern", OPERATIONS)
def test_operations_in_words(pattern: str, tmp_path: Path) -> None:
    layout, options, operation = OPERATIONS[pattern]
    tensors = layout if isinstance(layout, dict) else layout(REFERENCE, CONFIG)
    plan = plan_of(tensors, tmp_path, **options)
    (row,) = [row for row in plan.rows if row.source == pattern]
    assert row.op == operation


@pytest.mark.parametrize("stored", ["fp32", "official", "bf16", "mixed"])
@pytest.mark.parametrize("asked", ["keep", "bf16", "fp16", "fp32"])
def test_types_of_targets(stored: str, asked: str, tmp_path: Path) -> None:
    """Matrices are cast, vectors keep their type, A_log and the DeltaNet norm are fp32 always."""
    tensors = dict(REFERENCE)
    if stored in ("official", "mixed"):
        tensors = official_dtypes(tensors)
    elif stored == "bf16":
        tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    if stored == "mixed":  # parts of one target in two types: the wider counts
        tensors = layouts.q_gate_separate(tensors, CONFIG)
        name = "model.layers.3.self_attn.q_gate_proj.weight"
        tensors[name] = tensors[name].float()
    plan = plan_of(tensors, tmp_path, dtype=asked)
    kept = "fp32" if stored == "fp32" else "bf16"
    for target in plan.targets:
        protected = target.name.endswith(("A_log", "linear_attn.norm.weight"))
        assert target.kept == protected
        if protected:
            assert target.dtype == "fp32", target
        elif len(target.shape) == 1 or asked == "keep":
            wide = stored == "mixed" and target.name.endswith("self_attn.q_proj.weight")
            assert target.dtype == ("fp32" if wide else kept), target
        else:
            assert target.dtype == asked, target
    words = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    expected = words[kept if asked == "keep" else asked]
    assert plan.config["text_config"]["dtype"] == expected
    rows = {row.source: row for row in plan.rows}
    before = "fp32" if stored in ("fp32", "official", "mixed") else "bf16 -> fp32"
    assert rows["model.layers.*.linear_attn.A_log"].dtype == before
    assert rows["model.layers.*.linear_attn.A_log"].kept


@pytest.mark.parametrize("limit", [1, 40_000, 300_000, 10**9])
def test_shards_hold_each_target_once_within_the_limit(limit: int, tmp_path: Path) -> None:
    plan = plan_of(REFERENCE, tmp_path, max_shard_bytes=limit)
    names = [name for shard in plan.shards for name in shard.tensors]
    assert sorted(names) == sorted(REFERENCE)
    for shard in plan.shards:
        assert shard.num_bytes <= limit or len(shard.tensors) == 1
    assert (plan.shards[0].name == "model.safetensors") == (len(plan.shards) == 1)
    largest = max(shard.num_bytes for shard in plan.shards)
    assert plan.bytes_out + largest < plan.needs.disk < plan.bytes_out + largest + 100_000
    assert plan.needs.disk_free is not None and plan.needs.disk_free > 0


def test_explanations(tmp_path: Path) -> None:
    tensors = layouts.qkvz_interleaved(random_tensors(CONFIG, prefix=OFFICIAL), CONFIG)
    plan = plan_of(tensors, tmp_path, nested(CONFIG), qkvz_layout="interleaved")
    (source,) = explain(plan, "model.language_model.layers.1.linear_attn.in_proj_ba.weight")
    steps = [(step.rule, step.text) for step in source.steps]
    assert steps[1] == ("root", "layers.1.linear_attn.in_proj_ba.weight")
    assert steps[2][0] == "ba-interleaved" and "by linear_num_key_heads" in steps[2][1]
    assert steps[3] == (
        "rows",
        "2 runs of 2 rows, every 4 from 0 -> model.layers.1.linear_attn.in_proj_b.weight "
        "2 runs of 2 rows, every 2 from 0",
    )
    (target,) = explain(plan, "model.layers.1.linear_attn.in_proj_a.weight")
    assert target.side == "target"
    assert "of model.language_model.layers.1.linear_attn.in_proj_ba.weight" in target.steps[1].text
    both = explain(plan, "lm_head.weight")
    assert [explanation.side for explanation in both] == ["source", "target"]
    with pytest.raises(CheckpointError) as caught:
        explain(plan, "lm_hed.weight")
    assert str(caught.value.hint).startswith("Nearest: lm_head.weight")


@pytest.mark.parametrize(
    "wrong",
    [{"dtype": "int8"}, {"qkvz_layout": "x"}, {"q_gate_layout": "x"}, {"max_shard_bytes": 0}],
)
def test_options_are_checked(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ConvertOptions(**wrong)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("layers.*.in_*.weight", "a"), "a \\* inside a segment"),
        (("a.b", "c*"), "a \\* inside a segment"),
        (("a.*", "b.*.*"), "more \\* than"),
        (("a..b", "c"), "empty segment"),
        (("", "c"), "an empty pattern"),
        (("a", ""), "an empty pattern"),
    ],
)
def test_renames_are_checked(pair: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConvertOptions(renames=(pair,))


def test_options_that_decide_nothing_are_told(tmp_path: Path) -> None:
    plan = plan_of(
        REFERENCE,
        tmp_path,
        qkvz_layout="concat",
        q_gate_layout="per-head",
        renames=(("layers.*.ffn.w3", "layers.*.mlp.up_proj.weight"),),
        allow_unmatched=("vision.*",),
        allow_missing=("model.layers.9.*",),
    )
    assert plan.ok
    told = [note for note in plan.notes if "tokenizer" not in note]
    assert len(told) == 4
    for word in ("qkvz_layout", "ffn.w3", "'vision.*'", "'model.layers.9.*'"):
        assert sum(word in note for note in told) == 1, word


def test_memory_is_that_of_the_largest_target_and_what_it_is_made_of(tmp_path: Path) -> None:
    base = planning._BASE_MEMORY
    largest = CONFIG["vocab_size"] * CONFIG["hidden_size"] * 4
    assert plan_of(REFERENCE, tmp_path / "a").needs.ram == base + largest
    assert plan_of(REFERENCE, tmp_path / "b", dtype="bf16").needs.ram == base + largest * 3 // 2
    fused = layouts.qkv_fused(REFERENCE, CONFIG)
    source = fused["model.layers.3.self_attn.qkv_proj.weight"].numel() * 4
    target = REFERENCE["model.layers.3.self_attn.q_proj.weight"].numel() * 4
    assert source + target > largest
    assert plan_of(fused, tmp_path / "c").needs.ram == base + source + target
