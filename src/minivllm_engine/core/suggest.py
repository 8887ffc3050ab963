"""The name that was probably meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def suggest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name nearest to `name`, or None if none is near.

    Args:
        cutoff: similarity from 0 to 1 (Ratcliff and Obershelp's) that it must reach.
    """
    near = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return near[0] if near else None
