"""Reading one YAML config file: every key with its position, every mistake with the line it stands in."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from minivllm_cli.config.schema import SECTIONS, all_paths, check_value, unknown_key
from minivllm_cli.config.yaml import Loader
from minivllm_cli.errors import CliError, Problem
from minivllm_engine.core.suggest import suggest

_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One key that somebody set.

    Attributes:
        path: the key, e.g. "engine.max_num_seqs".
        value: as its section stores it; None where `reset`.
        source: where it was set: "cfg.yaml:12", "--max-num-seqs", "MINIVLLM_MODEL".
        written: the text that was written, where it differs from the value's own ("32K").
        reset: the key goes back to its default.
        base: the directory to which a relative path belongs.
    """

    path: str
    value: Any
    source: str
    written: str | None = None
    reset: bool = False
    base: Path | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A spot in a config file, or the argument that a value was given in."""

    name: str
    lines: tuple[str, ...] = ()

    def problem(
        self,
        mark: yaml.Mark | None,
        what: str,
        hint: str | None = None,
        *,
        why: str | None = None,
        after: int = 0,
    ) -> Problem:
        """Locate `what`: file:line:col with the source line and a caret, or the argument's text.

        Args:
            after: the place is so many characters after `mark`, on its line.
        """
        if mark is None or not self.lines:
            return Problem(f"{self.name}: {what}", why=why, hint=hint)
        line = self.lines[mark.line] if mark.line < len(self.lines) else ""
        column = mark.column + after
        # A tab keeps the caret under its column; other characters become one blank each.
        blanks = "".join(char if char == "\t" else " " for char in line[:column])
        where = f"{self.name}:{mark.line + 1}:{column + 1}"
        return Problem(
            f"{where}: {what}", excerpt=(f"  {line}", f"  {blanks}^"), why=why, hint=hint
        )

    def source(self, mark: yaml.Mark) -> str:
        """Say what `--sources` says of a key at `mark`."""
        return f"{self.name}:{mark.line + 1}" if self.lines else self.name


def read_config_file(path: Path) -> tuple[list[Entry], list[Problem]]:
    """Read the entries of a file in the order in which they stand, and all that is wrong with it.

    Raises:
        CliError: the file cannot be read at all, or is not YAML.
    """
    hint = "--config FILE.yaml"
    if not path.exists() and path.parent.is_dir():
        hint = f"minivllm generate --print-config > {path} writes one with all defaults"
    text, place = read_text(path, "config", hint=hint)
    return read_tree(compose(text, place), place, base=path.resolve().parent)


def read_text(path: Path, kind: str, *, hint: str) -> tuple[str, Place]:
    """Read the text of a file, and the place in which mistakes are found.

    Args:
        kind: what it is called in errors. hint: what to try where it cannot be opened.

    Raises:
        CliError: it cannot be read, or is not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise CliError(
            f"cannot read {kind} {path}: {getattr(error, 'strerror', None) or error}",
            why=f"looked for at {path.absolute()}",
            hint=hint,
        ) from None
    if len(raw) > _MOST_BYTES:
        raise CliError(f"{kind} {path} is larger than {_MOST_BYTES >> 20} MiB", hint=hint)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise CliError(
            f"{path}:{line}: not UTF-8 (byte 0x{raw[error.start]:02x})",
            why=f"it is number {error.start + 1:,} of {len(raw):,}, and starts no character there",
            hint="save the file as UTF-8",
        ) from None
    # As YAML counts lines: PyYAML also breaks at U+0085, U+2028 and U+2029.
    return text, Place(str(path), tuple(text.replace("\r\n", "\n").splitlines()))


def compose(text: str, place: Place) -> yaml.Node | None:
    """Compose the node tree of one YAML document; None where it is empty.

    Raises:
        CliError: not YAML, or several documents.
    """
    try:
        node: yaml.Node | None = yaml.compose(text, Loader)
    except yaml.MarkedYAMLError as error:
        what = error.problem or error.context or "not YAML"
        if "but found another document" in what:
            what = "a config is one document; this is the start of another"
        raise CliError(
            place.problem(
                error.problem_mark or error.context_mark,
                what,
                "correct this line; a text with signs of YAML stands in quotes",
                why=" ".join(
                    str(error.context or "the lines above are YAML, this is none").split()
                ),
            )
        ) from None
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split()) or "nested too deeply"
        raise CliError(
            f"{place.name}: not YAML: {reason}",
            why=f"none of its {len(place.lines):,} lines is taken then",
            hint="save it as plain text, with lines of KEY: VALUE",
        ) from None
    return node


def read_tree(
    root: yaml.Node | None, place: Place, base: Path, *, section: str = ""
) -> tuple[list[Entry], list[Problem]]:
    """Walk a mapping of keys, below `section` or at the top."""
    walk = _Walk(place, base)
    if root is not None:
        walk.mapping(root, section)
    return walk.entries, walk.problems


class _Walk:
    def __init__(self, place: Place, base: Path) -> None:
        self.entries: list[Entry] = []
        self.problems: list[Problem] = []
        self._place = place
        self._base = base

    def mapping(self, node: yaml.Node, section: str) -> None:
        if section and _is_null(node):  # `engine:` with nothing below it
            return
        if not isinstance(node, yaml.MappingNode):
            what = (
                f"section {section} should hold keys"
                if section
                else "a config is a mapping of keys"
            )
            self._wrong(node, what)
            return
        seen: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            if key is None:
                continue
            path = f"{section}.{key}" if section else key
            if path in seen:
                self._wrong(
                    key_node,
                    f"duplicate key {path}, first in line {seen[path].start_mark.line + 1}",
                )
                continue
            seen[path] = key_node
            if not section and key in SECTIONS:
                self.mapping(value_node, key)
            elif path in all_paths():
                self._value(path, key_node, value_node)
            else:
                self._wrong(key_node, *_unknown(section, key))

    def _key(self, node: yaml.Node) -> str | None:
        if isinstance(node, yaml.ScalarNode):
            return str(node.value).replace("-", "_")
        self._wrong(node, "a key should be a plain word")
        return None

    def _value(self, path: str, key_node: yaml.Node, node: yaml.Node) -> None:
        try:
            # The nodes are Loader's own, so is the construction: nothing but plain data comes out.
            raw = Loader("").construct_document(node)
        except yaml.MarkedYAMLError as error:
            self.problems.append(self._place.problem(error.problem_mark, str(error.problem)))
            return
        source = self._place.source(key_node.start_mark)
        if raw is None:
            self.entries.append(Entry(path, None, source, reset=True))
            return
        value, wrong = check_value(path, raw)
        if wrong:
            shown = _short(node.value) if isinstance(node, yaml.ScalarNode) else _kind(node)
            self._wrong(node, f"{path}: {wrong}, not {shown}")
            return
        written = str(raw) if isinstance(raw, str) and not isinstance(value, str) else None
        self.entries.append(Entry(path, value, source, written, base=self._base))

    def _wrong(self, node: yaml.Node, what: str, hint: str | None = None) -> None:
        self.problems.append(self._place.problem(node.start_mark, what, hint))


def _unknown(section: str, key: str) -> tuple[str, str | None]:
    """What is wrong with a key, and what to write in its place."""
    if not section:
        near = suggest(key, SECTIONS)
        return (f"unknown key {key}", near) if near else unknown_key(key)
    what, near = unknown_key(f"{section}.{key}")
    return what, None if near is None else near.removeprefix(f"{section}.")


def _kind(node: yaml.Node) -> str:
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
