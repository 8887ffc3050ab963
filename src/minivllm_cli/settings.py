"""The configuration of one run: layers merged, every value with the place it came from.

Precedence: defaults < the model's generation config (sampling only) < files in order < environment <
flags and `--set`. A request's own sampling comes last and is not this file's business.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from minivllm_cli.config_file import Entry, Place, compose, read_config_file, read_tree
from minivllm_cli.problems import CliError, Problem
from minivllm_cli.sections import (
    SECTIONS,
    ChatOptions,
    OutputOptions,
    all_paths,
    check_value,
    default_of,
    is_text,
    unknown_key,
)
from minivllm_cli.yaml_reading import parse_value
from minivllm_engine.config import CacheOptions, EngineConfig, EngineOptions, SamplingOptions
from minivllm_engine.request import ResolvedSampling, SamplingParams

_ENV_PREFIX = "MINIVLLM_"


@dataclass(frozen=True)
class Settings:
    """Everything that was configured, resolved.

    Attributes:
        entries: key -> what was set last, for the keys that somebody set.
        model_sampling: what the model's generation config recommends (`with_model_sampling`).
        warnings: for the console.
    """

    entries: Mapping[str, Entry]
    model_sampling: SamplingOptions | None = None
    warnings: tuple[str, ...] = ()

    def get(self, path: str) -> Any:
        """A key's value: what was set, else the default. `sampling.*` may be None; see `sampling`."""
        entry = self.entries.get(path)
        return default_of(path) if entry is None else entry.value

    def source(self, path: str) -> str:
        """Where a key's value comes from: "cfg.yaml:12", "--seed", "generation_config.json", "default"."""
        entry = self.entries.get(path)
        if entry is not None:
            return entry.source
        if path.startswith("sampling.") and self._recommended(path) is not None:
            return "generation_config.json"
        return "default"

    @property
    def model(self) -> str:
        """MODEL: "demo" or a directory, absolute where a config file named it."""
        entry = self.entries.get("model")
        if entry is None:
            return str(default_of("model"))
        value = str(entry.value)
        if entry.base is None or value == "demo":
            return value
        return os.path.normpath(entry.base / Path(value).expanduser())

    @cached_property
    def engine_config(self) -> EngineConfig:
        """The sections that the engine owns, to be handed to `LLM(config=...)`."""
        return EngineConfig(
            engine=EngineOptions(**self._set_keys("engine")),
            cache=CacheOptions(**self._set_keys("cache")),
            sampling=SamplingOptions(**self._set_keys("sampling")),
        )

    @property
    def chat(self) -> ChatOptions:
        """Section `chat`."""
        return ChatOptions(**self._set_keys("chat"))

    @property
    def output(self) -> OutputOptions:
        """Section `output`."""
        return OutputOptions(**self._set_keys("output"))

    def sampling(self, own: SamplingParams | None = None, *, index: int = 0) -> ResolvedSampling:
        """What a request is really sampled with: its own values, then ours, the model's, the built-in ones.

        `index` is the request's place in the run: without a seed of its own it gets `sampling.seed + index`.
        """
        layers = [self.engine_config.sampling]
        if self.model_sampling is not None:
            layers.append(self.model_sampling)
        return (own or SamplingParams()).resolved(*layers, seed=self.get("sampling.seed") + index)

    def with_value(self, path: str, value: Any) -> "Settings":
        """The same with one key set, to ask what would be."""
        entries = {**self.entries, path: Entry(path, value, "asked")}
        return Settings(entries, self.model_sampling, self.warnings)

    def with_model_sampling(self, recommended: SamplingOptions) -> "Settings":
        """The same, with what the model's generation config recommends below what was set."""
        return Settings(self.entries, recommended, self.warnings)

    def resolved(self, path: str) -> Any:
        """As `get`, but a sampling key that nobody set has the value that is in force."""
        value = self.get(path)
        if value is None and path.startswith("sampling."):
            return getattr(self.sampling(), path.removeprefix("sampling."))
        return value

    def _recommended(self, path: str) -> Any:
        if self.model_sampling is None:
            return None
        key = path.removeprefix("sampling.")
        return (
            getattr(self.model_sampling, key)
            if key in self.model_sampling.model_fields_set
            else None
        )

    def _set_keys(self, section: str) -> dict[str, Any]:
        prefix = section + "."
        return {
            p.removeprefix(prefix): e.value for p, e in self.entries.items() if p.startswith(prefix)
        }


def resolve_settings(
    *,
    files: Iterable[Path] = (),
    assignments: Iterable[str] = (),
    flags: Mapping[str, tuple[str, Any]] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Merge all layers.

    Args:
        files: `--config`, in order.
        assignments: `--set`, each "key=value".
        flags: config key -> (flag as it is written, its value), for flags that were typed.

    Raises:
        CliError: everything that is wrong anywhere, at once.
    """
    layers: list[Entry] = []
    problems: list[Problem] = []
    for path in files:
        try:
            entries, wrong = read_config_file(path)
        except CliError as error:
            entries, wrong = [], error.problems
        layers += entries
        problems += wrong
    entries, wrong, warnings = _read_environment(environ)
    layers += entries
    problems += wrong
    entries, wrong = _read_arguments(assignments, flags or {})
    layers += entries
    problems += wrong
    if problems:
        raise CliError(problems)
    merged: dict[str, Entry] = {}
    for entry in layers:
        if entry.reset:
            merged.pop(entry.path, None)
        else:
            merged[entry.path] = entry
    return Settings(merged, warnings=tuple(warnings))


def _read_environment(
    environ: Mapping[str, str],
) -> tuple[list[Entry], list[Problem], list[str]]:
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


def _read_arguments(
    assignments: Iterable[str], flags: Mapping[str, tuple[str, Any]]
) -> tuple[list[Entry], list[Problem]]:
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
    # Flags for numbers such as 32K arrive as text; MODEL and dtype are text.
    raw: Any = value
    if isinstance(value, str) and not is_text(path):
        return _from_text(path, value, source=flag, shown=_shown(flag, value))
    return _checked(path, raw, source=flag, shown=_shown(flag, value))


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
        return [], [Problem(f"{shown}: {what}", hint=near)]
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
