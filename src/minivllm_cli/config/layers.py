"""The layers of configuration above the files: environment variables, flags and `--set`."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from minivllm_cli.config.config_file import Entry, Place, compose, read_tree
from minivllm_cli.config.schema import SECTIONS, all_paths, check_value, is_text, unknown_key
from minivllm_cli.config.yaml import parse_value
from minivllm_cli.errors import CliError, Problem

_ENV_PREFIX = "MINIVLLM_"


def read_environment(
    environ: Mapping[str, str],
) -> tuple[list[Entry], list[Problem], list[str]]:
    """What MINIVLLM_* variables set, what is wrong with them, and warnings about unknown ones."""
    names = {_ENV_PREFIX + path.upper().replace(".", "__"): path for path in all_paths()}
    entries: list[Entry] = []
    problems: list[Problem] = []
    warnings: list[str] = []
    for name in sorted(environ):
        if not name.startswith(_ENV_PREFIX):
            continue
        path = names.get(name)
        if path is None:
            near = get_close_matches(name, names, n=1)
            warnings.append(
                f"environment variable {name} is not known"
                + (f"; did you mean {near[0]}?" if near else "")
            )
            continue
        entry, problem = _from_text(
            path, environ[name], source=name, shown=f"{name}={environ[name]}"
        )
        entries += [entry] if entry else []
        problems += [problem] if problem else []
    return entries, problems, warnings


def _from_text(
    path: str, text: str, *, source: str, shown: str
) -> tuple[Entry | None, Problem | None]:
    raw: Any = text
    if not is_text(path):
        try:
            raw = parse_value(text)
        except (yaml.YAMLError, RecursionError):
            return None, Problem(f"{shown}: the value is not YAML", hint="put quotes around it")
    return _checked(path, raw, source=source, shown=shown)


def _checked(
    path: str, raw: Any, *, source: str, shown: str
) -> tuple[Entry | None, Problem | None]:
    if raw is None:
        return Entry(path, None, source, reset=True), None
    value, wrong = check_value(path, raw)
    if wrong:
        return None, Problem(f"{shown}: {path}: {wrong}")
    written = raw if isinstance(raw, str) and not isinstance(value, str) else None
    return Entry(path, value, source, written), None


def read_arguments(
    assignments: Iterable[str], flags: Mapping[str, tuple[str, Any]]
) -> tuple[list[Entry], list[Problem]]:
    """What `--set` and flags set. They are one layer: a key may be given once in it."""
    entries: list[Entry] = []
    problems: list[Problem] = []
    given = {path: _shown(flag, value) for path, (flag, value) in flags.items()}
    for text in assignments:
        found, wrong = _read_assignment(text)
        problems += wrong
        for entry in found:
            if entry.path in given:
                problems.append(
                    Problem(f"{entry.path} is given twice: {given[entry.path]} and --set {text}")
                )
            given[entry.path] = f"--set {text}"
            entries.append(entry)
    for path, (flag, value) in flags.items():
        flagged, problem = _from_flag(path, flag, value)
        entries += [flagged] if flagged else []
        problems += [problem] if problem else []
    return entries, problems


def _from_flag(path: str, flag: str, value: Any) -> tuple[Entry | None, Problem | None]:
    shown = _shown(flag, value)
    if not isinstance(value, str) or is_text(path):  # MODEL and dtype are text
        return _checked(path, value, source=flag, shown=shown)
    # Numbers such as 32K, and lists of them, arrive as text.
    raw: Any = value
    with suppress(yaml.YAMLError, RecursionError):
        raw = parse_value(value)
    if raw is None:  # a flag without a value asks for nothing
        return None, Problem(f"{flag} {value!r}: no value", hint=f"leave {flag} out")
    return _checked(path, raw, source=flag, shown=shown)


def _shown(flag: str, value: Any) -> str:
    if value is True:
        return flag
    values = value if isinstance(value, list) else [value]
    return " ".join(f"{flag} {v}" for v in values)


def _read_assignment(text: str) -> tuple[list[Entry], list[Problem]]:
    key, equals, value = text.partition("=")
    key = key.strip().replace("-", "_")
    shown = f"--set {text}"
    if not equals or not key:
        return [], [Problem(f"{shown}: not KEY=VALUE", hint="--set engine.max_num_seqs=64")]
    if key in SECTIONS:
        return _read_section(key, value, shown)
    if key not in all_paths():
        what, near = unknown_key(key)
        hint = "minivllm generate --print-config shows every key"
        return [], [Problem(f"{shown}: {what}", hint=hint if near is None else f"--set {near}=...")]
    try:
        raw = parse_value(value)
    except (yaml.YAMLError, RecursionError):
        return [], [Problem(f"{shown}: the value is not YAML", hint="put quotes around it")]
    entry, problem = _checked(key, raw, source=shown, shown=shown)
    return [entry] if entry else [], [problem] if problem else []


def _read_section(section: str, value: str, shown: str) -> tuple[list[Entry], list[Problem]]:
    place = Place(shown)
    try:
        root = compose(value, place)
    except CliError as error:
        return [], error.problems
    if not isinstance(root, yaml.MappingNode):
        first = next(iter(SECTIONS[section].model_fields))
        return [], [
            Problem(
                f"{shown}: {section} is a section, not a key", hint=f"--set {section}.{first}=..."
            )
        ]
    entries, problems = read_tree(root, place, Path.cwd(), section=section)
    return entries, problems
