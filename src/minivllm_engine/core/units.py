"""Numbers as people write them in YAML, on a command line and in error messages."""

import re

_DECIMAL = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_COUNT = re.compile(r"([0-9][0-9_]*)([kKM]?)")
_FRACTION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(%?)")
_SIZE = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(i?)[bB]?")


_LONGEST = 100


def _check_length(text: str) -> None:
    if len(text) > _LONGEST:
        raise ValueError(
            f"{text[:20]!r}... has {len(text):,} characters, and no number here so many"
        )


def parse_count(value: object) -> int:
    """Return a whole number: 32768, "32_768", "32k" (= 32,000) or "32K" (= 32,768).

    Raises:
        ValueError: the text is no such number.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a whole number")
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        _check_length(value)
        match = _COUNT.fullmatch(value.strip())
        if match:
            unit = match[2]
            scale = _BINARY[unit] if unit in _BINARY else _DECIMAL[unit]
            return int(match[1].replace("_", "")) * scale
    raise ValueError(f"{value!r} is not a whole number (like 32768, 32_768, 32k or 32K)")


def parse_size(value: object) -> int:
    """Return a size in bytes: 1073741824, "1GiB", "5GB", "512 MiB".

    Raises:
        ValueError: the text is no such size.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size")
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        _check_length(value)
        match = _SIZE.fullmatch(value.strip())
        if match:
            binary = match[2] and match[3]
            scale = _BINARY[match[2].upper()] if binary else _DECIMAL[match[2].lower()]
            return int(float(match[1].replace("_", "")) * scale)
    raise ValueError(f"{value!r} is not a size (like 2GiB, 5GB or 512MiB)")


def parse_fraction(value: object) -> float:
    """Return a share between 0 and 1: 0.9 or "90%".

    Raises:
        ValueError: the text is no such share.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _FRACTION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a share (like 0.9 or 90%)")
    return float(match[1]) / (100 if match[2] else 1)


def format_size(num_bytes: int) -> str:
    """Write `num_bytes` in the largest binary unit that keeps it at 1 or more, e.g. "9.63 MiB"."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"


def count_text(count: int, noun: str) -> str:
    """Return a number of things: "1 row", "2 rows", "1,024 rows"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
