"""The configuration of one run: layers merged, every value with the place it came from.

Precedence: defaults < the model's generation config (sampling only) < the user's own file < files in order <
environment < flags and `--set`. A request's own sampling comes last and is not this file's business.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from minivllm_cli.config.bench_options import BenchOptions
from minivllm_cli.config.config_file import Entry, Place, compose, read_config_file, read_tree
from minivllm_cli.config.schema import (
    SECTIONS,
    ChatOptions,
    OutputOptions,
    all_paths,
    check_value,
    default_of,
    is_text,
    unknown_key,
)
from minivllm_cli.config.yaml import parse_value
from minivllm_cli.errors import CliError, Problem
from minivllm_engine.core.config import (
    CacheOptions,
    EngineConfig,
    EngineOptions,
    GraphOptions,
    SamplingOptions,
)
from minivllm_engine.core.sampling_params import ResolvedSampling, SamplingParams
from minivllm_engine.core.suggest import suggest

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
        """Return a key's value: what was set, else the default. `sampling.*` may be None; see `sampling`."""
        entry = self.entries.get(path)
        return default_of(path) if entry is None else entry.value

    def source(self, path: str) -> str:
        """Say where a value comes from: "cfg.yaml:12", "--seed", "generation_config.json", "default"."""
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
        return os.path.normpath(entry.base / os.path.expanduser(value))

    @cached_property
    def engine_config(self) -> EngineConfig:
        """The sections that the engine owns, to be handed to `LLM(config=...)`."""
        return EngineConfig(
            engine=EngineOptions(**self._set_keys("engine")),
            cache=CacheOptions(**self._set_keys("cache")),
            graph=GraphOptions(**self._set_keys("graph")),
            sampling=SamplingOptions(**self._set_keys("sampling")),
        )

    @property
    def chat(self) -> ChatOptions:
        """Section `chat`."""
        return ChatOptions(**self._set_keys("chat"))

    @property
    def bench(self) -> BenchOptions:
        """Section `bench`."""
        return BenchOptions(**self._set_keys("bench"))

    @property
    def output(self) -> OutputOptions:
        """Section `output`."""
        return OutputOptions(**self._set_keys("output"))

    def sampling(self, own: SamplingParams | None = None, *, index: int = 0) -> ResolvedSampling:
        """Return what a request is sampled with: its own values, then ours, the model's, the built-in ones.

        `index` is the request's place in the run: without a seed of its own it gets `sampling.seed + index`.
        """
        seed = self.engine_config.sampling.seed + index
        if own is None or not own.model_fields_set:
            return replace(self._default_sampling, seed=seed)
        return own.resolved(*self._sampling_layers, seed=seed)

    def with_value(self, path: str, value: Any) -> "Settings":
        """Return the same with one key set, to ask what would be."""
        entries = {**self.entries, path: Entry(path, value, "asked")}
        return Settings(entries, self.model_sampling, self.warnings)

    def with_model_sampling(self, recommended: SamplingOptions) -> "Settings":
        """Return the same, with what the model's generation config recommends below what was set."""
        return Settings(self.entries, recommended, self.warnings)

    def resolved(self, path: str) -> Any:
        """Return a value as `get` does, but for a sampling key that nobody set the one in force."""
        value = self.get(path)
        if value is None and path.startswith("sampling."):
            return getattr(self.sampling(), path.removeprefix("sampling."))
        return value

    @cached_property
    def _sampling_layers(self) -> list[SamplingOptions]:
        own = self.engine_config.sampling
        return [own] if self.model_sampling is None else [own, self.model_sampling]

    @cached_property
    def _default_sampling(self) -> ResolvedSampling:
        return SamplingParams().resolved(*self._sampling_layers, seed=0)

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
    warnings = _read_environment(environ, layers, problems)
    _read_arguments(assignments, flags or {}, layers, problems)
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
    environ: Mapping[str, str], entries: list[Entry], problems: list[Problem]
) -> list[str]:
    """Add what MINIVLLM_* variables set, and what is wrong with them; warnings about unknown ones."""
    names = {_ENV_PREFIX + path.upper().replace(".", "__"): path for path in all_paths()}
    warnings: list[str] = []
    for name in sorted(name for name in environ if name.startswith(_ENV_PREFIX)):
        path, text = names.get(name), environ[name]
        if path is None:
            near = suggest(name, names)
            ending = f"; did you mean {near}?" if near else ""
            warnings.append(f"environment variable {name} is not known{ending}")
            continue
        read = _read_value if is_text(path) else _read_text
        read(path, text, name, f"{name}={text}", entries, problems)
    return warnings


def _read_arguments(
    assignments: Iterable[str],
    flags: Mapping[str, tuple[str, Any]],
    entries: list[Entry],
    problems: list[Problem],
) -> None:
    """Add what `--set` and flags set. They are one layer: a key may be given once in it."""
    given = {path: _shown(flag, value) for path, (flag, value) in flags.items()}
    for text in assignments:
        found: list[Entry] = []
        _read_assignment(text, found, problems)
        for entry in found:
            if entry.path in given:
                problems.append(
                    Problem(f"{entry.path} is given twice: {given[entry.path]} and --set {text}")
                )
            given[entry.path] = f"--set {text}"
        entries += found
    for path, (flag, value) in flags.items():
        shown, raw = _shown(flag, value), value
        if isinstance(value, str) and not is_text(path):
            with suppress(yaml.YAMLError, RecursionError):  # else the schema refuses the text
                raw = parse_value(value)
            if raw is None:  # a flag without a value asks for nothing
                problems.append(Problem(f"{flag} {value!r}: no value", hint=f"leave {flag} out"))
                continue
        _read_value(path, raw, flag, shown, entries, problems)


def _read_text(
    path: str, text: str, source: str, shown: str, entries: list[Entry], problems: list[Problem]
) -> None:
    """Add the value of one key from its YAML."""
    try:
        raw = parse_value(text)
    except (yaml.YAMLError, RecursionError):
        problems.append(Problem(f"{shown}: the value is not YAML", hint="put quotes around it"))
        return
    _read_value(path, raw, source, shown, entries, problems)


def _read_value(
    path: str, raw: Any, source: str, shown: str, entries: list[Entry], problems: list[Problem]
) -> None:
    if raw is None:
        entries.append(Entry(path, None, source, reset=True))
        return
    value, wrong = check_value(path, raw)
    if wrong:
        problems.append(Problem(f"{shown}: {path}: {wrong}"))
        return
    written = raw if isinstance(raw, str) and not isinstance(value, str) else None
    entries.append(Entry(path, value, source, written))


def _shown(flag: str, value: Any) -> str:
    if value is True:
        return flag
    values = value if isinstance(value, list) else [value]
    return " ".join(f"{flag} {v}" for v in values)


def _read_assignment(text: str, entries: list[Entry], problems: list[Problem]) -> None:
    key, equals, value = text.partition("=")
    key = key.strip().replace("-", "_")
    shown = f"--set {text}"
    if not equals or not key:
        problems.append(Problem(f"{shown}: not KEY=VALUE", hint="--set engine.max_num_seqs=64"))
    elif key in SECTIONS:
        _read_section(key, value, shown, entries, problems)
    elif key not in all_paths():
        what, near = unknown_key(key)
        hint = "minivllm generate --print-config shows every key"
        problems.append(Problem(f"{shown}: {what}", hint=f"--set {near}=..." if near else hint))
    else:
        _read_text(key, value, shown, shown, entries, problems)


def _read_section(
    section: str, value: str, shown: str, entries: list[Entry], problems: list[Problem]
) -> None:
    place = Place(shown)
    try:
        root = compose(value, place)
    except CliError as error:
        problems += error.problems
        return
    if not isinstance(root, yaml.MappingNode):
        hint = f"--set {section}.{next(iter(SECTIONS[section].model_fields))}=..."
        problems.append(Problem(f"{shown}: {section} is a section, not a key", hint=hint))
        return
    found, wrong = read_tree(root, place, Path.cwd(), section=section)
    entries += found
    problems += wrong
