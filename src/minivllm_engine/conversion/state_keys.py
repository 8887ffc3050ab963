"""Entries of a file of torch.save by name, and how `--state-key` says them.

A key stands as its text: a string as it is, bytes as the UTF-8 in them, anything else as Python prints
it. Levels are joined with dots; where a key has a dot itself, the longest key that fits is taken.
"""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape, listed


def key_text(key: object) -> str:
    """A key as text."""
    if isinstance(key, bytes):
        return key.decode("utf-8", "backslashreplace")
    return str(key)


def level_of(file: Path, level: Mapping[Any, Any]) -> dict[str, Any]:
    """One level by the text of its keys.

    Raises:
        CheckpointError: two keys have one text, such as 1 and "1".
    """
    named: dict[str, Any] = {}
    for key, value in level.items():
        text = key_text(key)
        if text in named:
            raise CheckpointError(
                f"{file} holds two entries that are called {escape(text)}",
                why=f"their keys are of different types, one is {escape(repr(key))}",
                hint="Save the weights alone, under strings: torch.save(model.state_dict(), FILE).",
            )
        named[text] = value
    return named


def walk(root: Any, path: tuple[str, ...]) -> Any:
    """What lies at the end of `path`; None where that leads nowhere."""
    level = root
    for text in path:
        if not isinstance(level, Mapping):
            return None
        level = next((value for key, value in level.items() if key_text(key) == text), None)
    return level


def find_weights_key(file: Path, root: Any, state_key: str) -> tuple[str, ...]:
    """The path that `state_key` names.

    Raises:
        CheckpointError: it names no dictionary.
    """
    path = next(_paths(root, state_key), None)
    if path is None:
        options = [key_option(root, (key_text(key),)) for key in _dictionaries(root)]
        known = [option for option in options if option]
        raise CheckpointError(
            f"{file} has no container {escape(repr(state_key))}",
            why=f"keys at its first level: {listed(map(key_text, root), 8) or 'none'}"
            if isinstance(root, Mapping)
            else f"it holds no dictionary, but {type(root).__name__}",
            hint=f"One that is there: {' or '.join(known[:3])}"
            if known
            else "Leave --state-key out: there is no container in that file.",
        )
    return path


def key_option(root: Any, path: tuple[str, ...]) -> str | None:
    """`--state-key ...` that leads to `path`, ready for a shell; None where none does."""
    text = ".".join(path)
    if not text or escape(text) != text or next(_paths(root, text), None) != path:
        return None
    return f"--state-key {shlex.quote(text)}"


def _dictionaries(root: Any) -> list[Any]:
    if not isinstance(root, Mapping):
        return []
    return [key for key, value in root.items() if isinstance(value, Mapping)]


def _paths(level: Any, text: str) -> Iterator[tuple[str, ...]]:
    """Every way to read `text` as keys of dictionaries, the longest key first."""
    if not isinstance(level, Mapping):
        return
    inner = [(key_text(key), value) for key, value in level.items() if isinstance(value, Mapping)]
    for key, value in sorted(inner, key=lambda pair: -len(pair[0])):
        if key == text:
            yield (key,)
        elif text.startswith(key + "."):
            for rest in _paths(value, text[len(key) + 1 :]):
                yield (key, *rest)
