"""Remedies in the words of the command line at hand: what is proposed replaces what was typed.

A key may be given once among flags and `--set`, so one that was typed as a flag is told as that flag.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minivllm_cli.config.settings import Settings
from minivllm_engine.core.errors import EngineError

_ASSIGNMENT = re.compile(r"--set ([a-z_]+\.[a-z_]+)=([^\s,;)]+)")


def option(settings: Settings, key: str, value: Any, *, flag: str | None = None) -> str:
    """Write what to type so that a config key has a value.

    Args:
        flag: the one that sets it, for keys that are told by their flag unless `--set` was typed.
    """
    source = settings.source(key)
    if not source.startswith("--set "):
        flag = source if source.startswith("--") else flag
        if flag is not None:
            return f"{flag} {value}"
    return f"--set {key}={value}"


def as_typed(text: str, settings: Settings) -> str:
    """Rewrite each `--set KEY=VALUE` in `text` as its key was typed."""
    return _ASSIGNMENT.sub(lambda found: option(settings, found[1], found[2]), text)


@contextmanager
def remedies_as_typed(settings: Settings) -> Iterator[None]:
    """Rewrite the hints of the engine's errors `as_typed`: it knows keys only."""
    try:
        yield
    except EngineError as error:
        if error.hint is not None:
            error.hint = as_typed(error.hint, settings)
        raise
