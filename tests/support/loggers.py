"""The program sets up logging for its process: what a run of it within a test does is undone."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_NAMES = ("minivllm_engine", "minivllm_cli", "py.warnings", None)


@contextmanager
def loggers_as_they_were() -> Iterator[None]:
    """Put handlers, levels and propagation back at the end."""
    loggers = [logging.getLogger(name) for name in _NAMES]
    before = [(log.handlers[:], log.level, log.propagate) for log in loggers]
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for log, (handlers, level, propagate) in zip(loggers, before, strict=True):
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)
