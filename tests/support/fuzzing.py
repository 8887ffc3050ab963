"""How much a fuzz test tries: little in `make test`, for as long as is wanted in `make fuzz`."""

import os


def examples(few: int) -> int:
    """Return how many examples a fuzz test draws: `few` times FUZZ_TIMES, or `few`."""
    return few * int(os.environ.get("FUZZ_TIMES", "1"))
