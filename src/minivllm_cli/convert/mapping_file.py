"""`--mapping FILE`: a YAML mapping from source names to target names, as the converter takes it."""

from pathlib import Path

import yaml

from minivllm_cli.config_file import Place, compose, read_text
from minivllm_cli.problems import CliError, Problem
from minivllm_engine.printable import printable

_STRING, _NULL = "tag:yaml.org,2002:str", "tag:yaml.org,2002:null"
_FORM = "layers.*.attn.in_prj.weight: layers.*.linear_attn.in_proj_z.weight"


def read_mapping(path: Path) -> tuple[tuple[str, str | None], ...]:
    """The pairs (source pattern, target pattern or None) of a file, in the order in which they stand.

    Raises:
        CliError: the file cannot be read, or everything in it that is no such pair.
    """
    text, place = read_text(path, "mapping", hint="--mapping FILE.yaml")
    root = compose(text, place)
    if not isinstance(root, yaml.MappingNode) or not root.value:
        what = "a mapping file holds lines of SOURCE: TARGET"
        mark = None if root is None else root.start_mark
        raise CliError(place.problem(mark, what, _FORM))
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
        return place.problem(key.start_mark, "a source pattern should be a name", _FORM)
    if key.value in pairs:
        what = f"{printable(key.value)} is there twice"
        return place.problem(key.start_mark, what, "one line for each source")
    if value.tag not in (_STRING, _NULL) or (value.value == "" and value.tag == _STRING):
        what = "a target should be a name, or null to drop the tensor"
        return place.problem(value.start_mark, what, _FORM)
    return None
