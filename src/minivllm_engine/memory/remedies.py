"""Changes of the configuration with which an engine fits. Each has been accepted by the planner itself."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

from minivllm_engine.core.config import EngineConfig
from minivllm_engine.memory.fit import Fit, largest
from minivllm_engine.memory.layout import SHORTEST_SEQUENCE

MIB = 2**20
_MOST = 3
_MOST_PERCENT = 98  # of a GPU that is worth proposing
_FEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Remedy:
    """Config keys and the values to set them to, as they are written on a command line."""

    changes: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return " ".join(f"--set {key}={value}" for key, value in self.changes)


Planner = Callable[[EngineConfig], Fit]


def changed(config: EngineConfig, remedy: Remedy) -> EngineConfig:
    """`config` with the remedy's values, read as `--set` reads them.

    Raises:
        ValueError: a value is not one that its key can have.
    """
    content: dict[str, Any] = config.model_dump(exclude_unset=True)
    for key, text in remedy.changes:
        section, _, name = key.partition(".")
        value = None if text == "auto" else int(text) if text.isdecimal() else text
        content.setdefault(section, {})[name] = value
    return EngineConfig.model_validate(content)


def find_remedies(config: EngineConfig, plan: Planner) -> tuple[Remedy, ...]:
    """The smallest changes that make `config` fit, at most three; empty where nothing helps.

    First single keys that were set, then more memory, then narrower numbers; changes of several keys
    only where no single one is enough.
    """
    search = _Search(config, plan)
    found: list[Remedy] = [r for r in search.singles() if r is not None]
    if not found:
        combined = search.combined()
        found = [] if combined is None else [combined]
    return tuple(found[:_MOST])


class _Search:
    def __init__(self, config: EngineConfig, plan: Planner) -> None:
        self.config, self.plan = config, plan
        self.device = plan(config).plan.device

    def fits(self, *changes: tuple[str, str]) -> bool:
        return self.plan(changed(self.config, Remedy(changes))).ok

    def singles(self) -> Iterator[Remedy | None]:
        for key in self._set_keys():
            yield self._least(key)
        yield self._enough_blocks()
        yield self._more_memory()
        yield self._fewer_tokens()
        for key in ("engine.dtype", "engine.state_dtype"):
            yield self._if_fits((key, "bf16"))

    def combined(self) -> Remedy | None:
        """Everything as small as it can be, with more memory if need be, then each as large as fits."""
        least = {key: self._smallest(key) for key in self._set_keys()}
        for extra in self._extras():
            changes = least | dict(extra)
            if changes and self.fits(*changes.items()):
                return self._relaxed(changes)
        return None

    def _extras(self) -> Iterator[tuple[tuple[str, str], ...]]:
        """Further changes that make room, in sets of growing size."""
        tokens = min(_FEW_TOKENS, self.plan(self.config).plan.max_num_batched_tokens)
        single = [
            ("engine.max_num_batched_tokens", str(tokens)),
            ("engine.dtype", "bf16"),
            ("engine.state_dtype", "bf16"),
        ]
        if self.config.engine.cpu_memory is not None:
            single.insert(0, ("engine.cpu_memory", "auto"))
        if self.device.kind == "cuda":
            single.insert(0, ("engine.gpu_memory_utilization", f"{_MOST_PERCENT / 100}"))
        return chain.from_iterable(combinations(single, n) for n in range(len(single) + 1))

    def _relaxed(self, changes: dict[str, str]) -> Remedy:
        """Without the changes that are not needed, the others of what was set as small as possible."""
        for key in list(changes):
            others = {k: v for k, v in changes.items() if k != key}
            if others and self.fits(*others.items()):
                changes = others
            elif key in self._set_keys():
                best = self._largest_value(key, tuple(others.items()))
                changes = changes if best is None else {**changes, key: best}
        return Remedy(tuple(changes.items()))

    def _set_keys(self) -> list[str]:
        keys = (
            "engine.max_num_seqs",
            "engine.max_model_len",
            "cache.snapshot_memory",
            "cache.num_blocks",
        )
        return [key for key in keys if self._is_set(key)]

    def _is_set(self, key: str) -> bool:
        section, _, name = key.partition(".")
        return getattr(getattr(self.config, section), name) is not None

    def _asked(self, key: str) -> int:
        section, _, name = key.partition(".")
        return int(getattr(getattr(self.config, section), name))

    def _smallest(self, key: str) -> str:
        least = {"engine.max_num_seqs": "1", "engine.max_model_len": str(SHORTEST_SEQUENCE)}
        return least.get(key, "0" if key == "cache.snapshot_memory" else "auto")

    def _least(self, key: str) -> Remedy | None:
        """The smallest change of one key that was set too large."""
        value = self._largest_value(key, ())
        return None if value is None else Remedy(((key, value),))

    def _largest_value(self, key: str, others: tuple[tuple[str, str], ...]) -> str | None:
        """The largest value of `key` below the one that was set with which it fits."""
        unit, suffix, least = 1, "", 1
        if key == "cache.snapshot_memory":
            # In steps of a MiB, as people write it.
            unit, suffix, least = MIB, "MiB", 0
        elif key == "engine.max_model_len":
            least = SHORTEST_SEQUENCE

        def fits(count: int) -> bool:
            return self.fits(*others, (key, f"{count}{suffix}" if count else "0"))

        count = largest(fits, -(-self._asked(key) // unit) - 1, least)
        return None if count is None else f"{count}{suffix}" if count else "0"

    def _enough_blocks(self) -> Remedy | None:
        """As many blocks as the length that was set needs."""
        length, cache = self.config.engine.max_model_len, self.config.cache
        if length is None or cache.num_blocks is None:
            return None
        return self._if_fits(("cache.num_blocks", str(-(-length // cache.block_size))))

    def _more_memory(self) -> Remedy | None:
        """The least memory for all pools, or the least share of a GPU; less where too much was set."""
        if self.device.kind == "cuda":
            used = self.config.engine.gpu_memory_utilization
            shares = (
                f"{percent / 100:g}" for percent in range(int(used * 100) + 1, _MOST_PERCENT + 1)
            )
            return self._first("engine.gpu_memory_utilization", shares)
        key = "engine.cpu_memory"
        asked = self.config.engine.cpu_memory
        most = self.device.total // MIB

        def fits(mebibytes: int) -> bool:
            return self.fits((key, f"{mebibytes}MiB"))

        # Too little up to some point, enough from there on, too much beyond what is left of the RAM.
        lowest = self._lowest(fits, most)
        if lowest is None:
            return None
        if asked is not None and asked // MIB > lowest:
            best = largest(fits, asked // MIB, lowest)
            return Remedy(((key, f"{best}MiB"),))
        return Remedy(((key, f"{lowest}MiB"),))

    def _lowest(self, fits: Callable[[int], bool], most: int) -> int | None:
        """The least number that fits, where all numbers from it to some larger one do."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            fit = self.plan(changed(self.config, Remedy((("engine.cpu_memory", f"{middle}MiB"),))))
            if fit.ok or fit.plan.memory >= fit.plan.pool_bytes:
                high = middle
            else:
                low = middle + 1
        return low if fits(low) else None

    def _fewer_tokens(self) -> Remedy | None:
        asked = self.plan(self.config).plan.max_num_batched_tokens
        counts = (str(1 << power) for power in range(16, 5, -1) if 1 << power < asked)
        return self._first("engine.max_num_batched_tokens", counts)

    def _first(self, key: str, values: Iterator[str]) -> Remedy | None:
        return next((Remedy(((key, v),)) for v in values if self.fits((key, v))), None)

    def _if_fits(self, change: tuple[str, str]) -> Remedy | None:
        return Remedy((change,)) if self.fits(change) else None
