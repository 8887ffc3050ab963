"""`--mapping FILE`: pairs in their order, and mistakes with their place."""

from pathlib import Path

import pytest

from minivllm_cli.convert.mapping_file import read_mapping
from minivllm_cli.errors import CliError


def test_pairs_stay_in_order(tmp_path: Path) -> None:
    file = tmp_path / "map.yaml"
    file.write_text(
        "# a comment\n"
        "layers.*.attn.in_prj.weight: layers.*.linear_attn.in_proj_z.weight\n"
        "extra.bias: null\n"
        "aux.weight: ~\n"
        "'*.scale.weight': norm.weight\n"
    )
    assert read_mapping(file) == (
        ("layers.*.attn.in_prj.weight", "layers.*.linear_attn.in_proj_z.weight"),
        ("extra.bias", None),
        ("aux.weight", None),
        ("*.scale.weight", "norm.weight"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a mapping file holds lines of SOURCE: TARGET"),
        ("- a\n", "1:1: a mapping file holds lines of SOURCE: TARGET"),
        ("{}", "1:1: a mapping file holds lines of SOURCE: TARGET"),
        ("a: b\na: c\n", "2:1: a is there twice"),
        ("a: b\nc: 3\n", "2:4: a target should be a name, or null to drop the tensor"),
        ("a: [b]\n", "1:4: a target should be a name, or null to drop the tensor"),
        ("a: ''\n", "1:4: a target should be a name, or null to drop the tensor"),
        ("1: a\n", "1:1: a source pattern should be a name"),
        ("[a]: b\n", "1:1: a source pattern should be a name"),
        ("a: b: c\n", "1:5: mapping values are not allowed here"),
        ("x: y\nlayers.{9-1}.x: null\n", "2:8: the range 9-1 is empty in 'layers.{9-1}.x'"),
        ("  'a.{}': null\n", "1:6: {} stands for no number"),
        ('"a.{-3}": null\n', "1:4: '-3' is no number"),
        ("a.*: b.{0}\n", "1:8: {0} where the left has *"),
        ("a.*: b.$1\n", "1:8: '$' in the name of a target"),
        ("{a.b: c, d.*: e.*.*}\n", "1:19: more * than on the left"),
        ('"a\\u002e.{1}": null\n', "1:1: an empty segment"),  # written otherwise: where it starts
    ],
)
def test_mistakes_have_their_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "map.yaml"
    file.write_text(text)
    with pytest.raises(CliError) as caught:
        read_mapping(file)
    first, *_ = caught.value.problems
    assert f"map.yaml:{message}".replace("yaml:a", "yaml: a") in first.what


def test_all_mistakes_come_at_once(tmp_path: Path) -> None:
    file = tmp_path / "map.yaml"
    file.write_text("a: 1\nb.{2-1}: null\nc: d\na: ..\n")
    with pytest.raises(CliError) as caught:
        read_mapping(file)
    first, second, third = caught.value.problems
    assert second.lines()[1:] == [
        "  b.{2-1}: null",
        "    ^",
        "why: 2 is more than 1, so it stands for no number",
        "try: Write 1-2.",
    ]
    assert "a: 1" in first.excerpt[0] and "empty segment" in third.what


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="cannot read mapping"):
        read_mapping(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(CliError, match="not UTF-8"):
        read_mapping(tmp_path / "bad.yaml")
