"""Whether stderr speaks JSON. Imported before the signals are handled: it imports next to nothing."""

from collections.abc import Sequence
from itertools import pairwise


def wants_json_events(args: Sequence[str]) -> bool:
    """Does a command line ask for JSON on stderr? For what happens before it is parsed."""
    return "--progress=json" in args or ("--progress", "json") in pairwise(args)
