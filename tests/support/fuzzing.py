"""How much a fuzz test tries: little in `make test`, for as long as is wanted in `make fuzz`."""

import os
from collections.abc import Callable
from typing import TypeVar

from minivllm_engine.core.errors import EngineError

Result = TypeVar("Result")


def examples(few: int) -> int:
    """Return how many examples a fuzz test draws: `few` times FUZZ_TIMES, or `few`."""
    return few * int(os.environ.get("FUZZ_TIMES", "1"))


def attempt(call: Callable[[], Result]) -> Result | EngineError:
    """Return the result of a call, or the error of ours that it raised."""
    try:
        return call()
    except EngineError as error:
        return error
