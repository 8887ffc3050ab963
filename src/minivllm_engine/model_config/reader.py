"""Typed reading of a model's config.json; every failure names the file, the key and the value."""

import math
from collections.abc import Mapping
from typing import Any

from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_REPAIR = "Correct it there, or use the config.json that was saved with these weights."


class ConfigReader:
    """The content of one config.json, nested (`text_config`) or flat.

    Attributes:
        source: what messages call the file.
        text: the level that describes the text model.
        top: the outermost level; the same as `text` in a flat file.
    """

    def __init__(self, content: Mapping[str, Any], source: str) -> None:
        text = content.get("text_config", content)
        if not isinstance(text, Mapping):
            raise CheckpointError(
                f"{source}: text_config is not an object",
                why=f"but {escape(repr(text))}",
                hint=_REPAIR,
            )
        self.source = source
        self.text: Mapping[str, Any] = text
        self.top = content

    def get(self, *keys: str) -> Any:
        """The first of `keys` that is set (not null), on the text level before the top level."""
        levels = (self.text, self.top)
        return next(
            (level[key] for level in levels for key in keys if level.get(key) is not None), None
        )

    def wrong(
        self, key: str, value: object, expected: str, hint: str | None = None
    ) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: {key} is {escape(repr(value))}",
            why=f"expected {expected}",
            hint=hint or _REPAIR,
        )

    def integer(self, key: str, value: object, *, at_least: int = 1) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.wrong(key, value, f"a whole number, {at_least} or more")
        return value

    def number(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, "a number above 0")
        if not 0 < value < math.inf:
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def boolean(self, key: str, value: object) -> bool:
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return bool(value)

    def dtype(self, *keys: str, allowed: tuple[str, ...]) -> str | None:
        """The first of `keys` as "fp32", "bf16" or "fp16", or None where there is none."""
        value = self.get(*keys)
        if value is None:
            return None
        name = _DTYPES.get(str(value).removeprefix("torch."))
        if name not in allowed:
            known = ", ".join(repr(long) for long, short in _DTYPES.items() if short in allowed)
            raise self.wrong(keys[0], value, f"one of {known}")
        return name
