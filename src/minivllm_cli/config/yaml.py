"""YAML as we read and write it: 1.2 numbers, true and false alone are booleans, positions are kept."""

import re
from typing import Any

import yaml

_RESOLVERS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


_DEEPEST = 64  # brackets within brackets: PyYAML takes time by their square
_MOST_NODES = 100_000  # with all aliases written out: nine lines of them can stand for a billion


class Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars: `1e-3` is a float, `no` a string, `017` seventeen."""

    def fetch_flow_collection_start(self, token: Any) -> None:
        """Open a bracket, but for one that lies too deep."""
        if self.flow_level == _DEEPEST:
            raise yaml.scanner.ScannerError(None, None, "nested too deeply", self.get_mark())
        super().fetch_flow_collection_start(token)

    def compose_document(self) -> yaml.Node | None:
        """Compose a document that is of bounded size."""
        node: yaml.Node | None = super().compose_document()
        if node is not None and _size(node, {}) > _MOST_NODES:
            what = "its aliases stand for too much"
            raise yaml.composer.ComposerError(None, None, what, node.start_mark)
        return node


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Count nodes as if each alias were written out; one that stands in itself never ends."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = _MOST_NODES + 1  # while it is counted
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


class Dumper(yaml.SafeDumper):
    """Writes what Loader reads back as the same value."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# PyYAML's own resolvers read YAML 1.1: none of them is kept.
Loader.yaml_implicit_resolvers = {}
Dumper.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _RESOLVERS:
    for _kind in (Loader, Dumper):
        _chars: list[Any] = [*_first, *([""] if _tag.endswith("null") else [])]
        _kind.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _chars)


def _construct_int(loader: Loader, node: yaml.ScalarNode) -> int:
    digits = loader.construct_scalar(node).replace("_", "")
    try:
        return int(digits)
    except ValueError:  # Python's limit, of 4,300 digits
        raise yaml.constructor.ConstructorError(
            None, None, f"an integer of {len(digits):,} digits is too large", node.start_mark
        ) from None


def _construct_float(loader: Loader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _represent_float(dumper: Dumper, value: float) -> yaml.ScalarNode:
    text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _represent_str(dumper: Dumper, value: str) -> yaml.ScalarNode:
    style = '"' if value.splitlines() not in ([], [value]) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
Dumper.add_representer(float, _represent_float)
Dumper.add_representer(str, _represent_str)


def parse_value(text: str) -> Any:
    """Parse `text` as one YAML node.

    Raises:
        yaml.YAMLError: it is none.
    """
    return yaml.load(text, Loader)


def dump_value(value: Any) -> str:
    """Write one value on one line, as YAML that `parse_value` reads back."""
    if isinstance(value, tuple):
        value = list(value)
    text: str = yaml.dump(
        value, Dumper=Dumper, default_flow_style=True, width=10**9, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")
