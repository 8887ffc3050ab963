"""`--mapping FILE`: a YAML mapping from source names to target names, as the converter takes it."""

from pathlib import Path

import yaml

from minivllm_cli.config.config_file import Place, compose, read_text
from minivllm_cli.errors import CliError, Problem
from minivllm_engine.conversion.patterns import mistake_in_pair
from minivllm_engine.core.escape import escape

_STRING, _NULL = "tag:yaml.org,2002:str", "tag:yaml.org,2002:null"
_FORM = "layers.*.attn.in_prj.weight: layers.*.linear_attn.in_proj_z.weight"


def read_mapping(path: Path) -> tuple[tuple[str, str | None], ...]:
    """Read the pairs (source pattern, target pattern or None) of a file, in their order.

    Raises:
        CliError: the file cannot be read, or everything in it that is no such pair.
    """
    text, place = read_text(path, "mapping", hint="--mapping FILE.yaml")
    root = compose(text, place)
    if not isinstance(root, yaml.MappingNode) or not root.value:
        what = "a mapping file holds lines of SOURCE: TARGET"
        mark = None if root is None else root.start_mark
        held = "nothing" if root is None else "no such line" if _is_mapping(root) else _kind(root)
        raise CliError(place.problem(mark, what, _FORM, why=f"this one holds {held}"))
    pairs: dict[str, str | None] = {}
    problems: list[Problem] = []
    for key, value in root.value:
        wrong = _wrong(key, value, pairs, place)
        if wrong is not None:
            problems.append(wrong)
        else:
            pairs[key.value] = None if value.tag == _NULL else value.value
    if problems:
        raise CliError(problems)
    return tuple(pairs.items())


def _wrong(
    key: yaml.Node, value: yaml.Node, pairs: dict[str, str | None], place: Place
) -> Problem | None:
    if key.tag != _STRING or not key.value:
        what = "a source pattern should be a name"
        return place.problem(key.start_mark, what, _FORM, why=f"YAML reads {_read_as(key)} here")
    if key.value in pairs:
        what = f"{escape(key.value)} is there twice"
        why = "the first line that fits a tensor counts, so this one would never"
        return place.problem(key.start_mark, what, "one line for each source", why=why)
    if value.tag not in (_STRING, _NULL) or (value.value == "" and value.tag == _STRING):
        what = "a target should be a name, or null to drop the tensor"
        return place.problem(
            value.start_mark, what, _FORM, why=f"YAML reads {_read_as(value)} here"
        )
    mistake = mistake_in_pair(key.value, None if value.tag == _NULL else value.value)
    if mistake is None:
        return None
    node = key if mistake.side == "source" else value
    pattern = escape(repr(node.value))
    return place.problem(
        node.start_mark,
        f"{escape(mistake.what)} in {pattern}",
        escape(mistake.hint),
        why=escape(mistake.why),
        after=_column(node, mistake.at, place),
    )


def _column(node: yaml.Node, at: int, place: Place) -> int:
    """Columns from the start of a scalar to its character `at`; 0 where it is written otherwise."""
    lines, mark = place.lines, node.start_mark
    line = lines[mark.line][mark.column :] if mark.line < len(lines) else ""
    quote = 1 if node.style in ("'", '"') else 0  # type: ignore[attr-defined]
    return quote + at if line[quote:].startswith(node.value[: at + 1]) else 0


def _is_mapping(node: yaml.Node) -> bool:
    return isinstance(node, yaml.MappingNode)


def _kind(node: yaml.Node) -> str:
    if _is_mapping(node):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"


def _read_as(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        return _kind(node)
    kind = node.tag.rpartition(":")[2]
    return "an empty text" if not node.value else f"{escape(repr(node.value))} as {kind}"
