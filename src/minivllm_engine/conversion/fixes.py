"""What options would mend in a plan: as data that can be tried, and as a command line takes it."""

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from minivllm_engine.conversion.options import ConvertOptions, Renames
from minivllm_engine.conversion.pattern_mistakes import mistake_in_glob, mistake_in_pair
from minivllm_engine.core.escape import escape
from minivllm_engine.core.units import count_text

# Of a key that stands before a colon on its line, by the rules of YAML.
_LONGEST_KEY = 1000
# Globs of one option, and characters of a mapping, that anybody would copy from a message.
_MOST_GLOBS, _MOST_CHARACTERS = 6, 4000
# Characters of a name that are kept at either end of a glob.
_KEPT = 80
# Segments that are kept at either end of a pattern that is too long.
_ENDS = 3
_PLAIN = re.compile(r"[A-Za-z_][\w.*\-]*", re.ASCII)
_YAML_WORDS = frozenset(("null", "true", "false", "yes", "no", "on", "off", "y", "n"))
# In brackets, so that what stands before can be copied.
_INCOMPLETE = " (the target is incomplete then, and no engine loads it)"


@dataclass(frozen=True, slots=True)
class Fix:
    """Changes of options. All of them together are one remedy; none means that no option helps.

    Attributes:
        renames: lines that a mapping needs before those that it has.
        without: sources of lines that a mapping should not have.
        allow_unmatched, allow_missing: further globs.
        qkvz_layout: a layout to choose.
    """

    renames: Renames = ()
    without: tuple[str, ...] = ()
    allow_unmatched: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()
    qkvz_layout: Literal["interleaved", "concat"] | None = None

    @property
    def helps(self) -> bool:
        return self != Fix()

    def applied(self, options: ConvertOptions) -> ConvertOptions:
        """`options` with these changes."""
        return replace(
            options,
            renames=self._mapping(options),
            allow_unmatched=(*options.allow_unmatched, *self.allow_unmatched),
            allow_missing=(*options.allow_missing, *self.allow_missing),
            qkvz_layout=self.qkvz_layout or options.qkvz_layout,
        )

    def text(self, options: ConvertOptions) -> str:
        """What is to be typed beside what `options` came from."""
        parts = []
        if self.renames or self.without:
            parts.append(_mapping_text(self._mapping(options), had_one=bool(options.renames)))
        flags = [option("--allow-unmatched", glob) for glob in self.allow_unmatched]
        flags += [option("--allow-missing", glob) for glob in self.allow_missing]
        flags += [f"--qkvz-layout {self.qkvz_layout}"] if self.qkvz_layout else []
        if flags:
            parts.append(" ".join(flags) + (_INCOMPLETE if self.allow_missing else ""))
        return "; and ".join(parts)

    def to_json(self, options: ConvertOptions) -> dict[str, object]:
        """The same for a program. mapping: the whole of it, or null where it is as it was."""
        changed = self.renames or self.without
        return {
            "mapping": dict(self._mapping(options)) if changed else None,
            "allow_unmatched": list(self.allow_unmatched),
            "allow_missing": list(self.allow_missing),
            "qkvz_layout": self.qkvz_layout,
        }

    def _mapping(self, options: ConvertOptions) -> Renames:
        replaced = {source for source, _ in self.renames} | set(self.without)
        return (*self.renames, *(line for line in options.renames if line[0] not in replaced))


def joined(fixes: Iterable[Fix]) -> Fix:
    """All fixes in one; the first line for a source counts, and many globs become one for all."""
    renames: dict[str, str | None] = {}
    without: dict[str, None] = {}
    unmatched: dict[str, None] = {}
    missing: dict[str, None] = {}
    layout = None
    for fix in fixes:
        renames = renames | {line[0]: line[1] for line in fix.renames if line[0] not in renames}
        without |= dict.fromkeys(fix.without)
        unmatched |= dict.fromkeys(fix.allow_unmatched)
        missing |= dict.fromkeys(fix.allow_missing)
        layout = layout or fix.qkvz_layout
    # Lines for all that begins alike come after those for some of it: the first that fits counts.
    lines = sorted(renames.items(), key=lambda line: (line[0].endswith(".**"), -line[0].count(".")))
    return Fix(tuple(lines), tuple(without), _few(unmatched), _few(missing), layout)


def glob_of(name: str, count: int = 1) -> str:
    """A glob for a name, or a pattern of `count` names, that can be printed and typed."""
    if count == 1 and escape(name) == name and not mistake_in_glob(name):
        return name
    signs = "*?[" if count == 1 else "?["
    short = name if len(name) <= 2 * _KEPT else f"{name[:_KEPT]}\0{name[-_KEPT:]}"
    glob = "".join(_in_glob(char, signs) for char in short)
    if mistake_in_glob(glob):
        glob = glob.replace("{", "?").replace("}", "?")
    return glob.replace("\0", "*")


def source_pattern(pattern: str) -> str:
    """A pattern of stored names as the left of a mapping's line takes it.

    What cannot stand there becomes a sign that stands for it: braces and stars that are part of a name,
    and what is too long for a key.
    """
    kept = ["*" if _odd(segment) else segment for segment in pattern.split(".")]
    if len(".".join(kept)) > _LONGEST_KEY:
        kept = [*kept[:_ENDS], "**", *kept[-_ENDS:]]
    return ".".join(kept)


def too_long(lines: Renames) -> bool:
    """Would nobody copy these lines from a message?"""
    keys = [_scalar(name) for line in lines for name in line if name is not None]
    return max(map(len, keys)) > _LONGEST_KEY or len(mapping_line(lines)) > _MOST_CHARACTERS


def mapping_line(lines: Renames) -> str:
    """Lines of a mapping as one line of YAML, whatever is in their names."""
    parts = [
        f"{_scalar(source)}: {'null' if target is None else _scalar(target)}"
        for source, target in lines
    ]
    return parts[0] if len(parts) == 1 else "{" + ", ".join(parts) + "}"


def option(flag: str, glob: str) -> str:
    """`flag` with a glob for a shell."""
    return f"{flag} {shlex.quote(glob)}"


def _mapping_text(lines: Renames, *, had_one: bool) -> str:
    if not lines:
        return "leave --mapping out"
    if too_long(lines):
        return (
            "--mapping FILE with what --dry-run --json prints under remedy.mapping "
            f"({count_text(len(lines), 'line')})"
        )
    return f"{'another ' if had_one else ''}--mapping FILE with the line {mapping_line(lines)}"


def _few(globs: Iterable[str]) -> tuple[str, ...]:
    found = tuple(globs)
    return ("*",) if len(found) > _MOST_GLOBS or "*" in found else found


def _in_glob(char: str, signs: str) -> str:
    if char == "\0":
        return char
    if not char.isprintable():
        return "?"
    return f"[{char}]" if char in signs else char


def _odd(segment: str) -> bool:
    """Is it no text that may stand in a pattern for itself?"""
    braces = "{" in segment or "}" in segment
    wrong = braces and (not segment.startswith("{") or mistake_in_pair(segment, None) is not None)
    return not segment or wrong or ("*" in segment and segment != "*") or len(segment) > _KEPT * 2


def _scalar(name: str) -> str:
    """A name as YAML has it, on one line whatever is in it."""
    plain = _PLAIN.fullmatch(name) and name.lower() not in _YAML_WORDS
    return name if plain else json.dumps(name)
