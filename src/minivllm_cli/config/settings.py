"""The configuration of one run: layers merged, every value with the place it came from.

Precedence: defaults < the model's generation config (sampling only) < files in order < environment <
flags and `--set`. A request's own sampling comes last and is not this file's business.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from minivllm_cli.config.bench_options import BenchOptions
from minivllm_cli.config.config_file import Entry, read_config_file
from minivllm_cli.config.layers import read_arguments, read_environment
from minivllm_cli.config.schema import ChatOptions, OutputOptions, default_of
from minivllm_cli.errors import CliError, Problem
from minivllm_engine.core.config import (
    CacheOptions,
    EngineConfig,
    EngineOptions,
    GraphOptions,
    SamplingOptions,
)
from minivllm_engine.core.sampling_params import ResolvedSampling, SamplingParams


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
        """What a request is really sampled with: its own values, then ours, the model's, the built-in ones.

        `index` is the request's place in the run: without a seed of its own it gets `sampling.seed + index`.
        """
        seed = self.engine_config.sampling.seed + index
        if own is None or not own.model_fields_set:
            return replace(self._default_sampling, seed=seed)
        return own.resolved(*self._sampling_layers, seed=seed)

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
    entries, wrong, warnings = read_environment(environ)
    layers += entries
    problems += wrong
    entries, wrong = read_arguments(assignments, flags or {})
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
