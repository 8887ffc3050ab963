"""The terminal: streams, progress, signals, logging. This file is imported before the signals are handled."""

from collections.abc import Sequence
from itertools import pairwise


def wants_json_events(args: Sequence[str]) -> bool:
    """Tell whether a command line asks for JSON on stderr. For what happens before it is parsed."""
    return "--progress=json" in args or ("--progress", "json") in pairwise(args)
