"""The log of the engine and of Python, as lines of the console."""

import logging

from minivllm_cli.console.streams import Console
from minivllm_cli.errors import Problem


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._timed = console.verbosity > 1
        self._warned: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno == logging.WARNING:
            # The checkpoint is looked at before and while it is loaded: once is enough.
            if text in self._warned:
                return
            self._warned.add(text)
        if record.levelno >= logging.ERROR:
            self._console.error(Problem(text))
        elif record.levelno >= logging.WARNING:
            self._console.warn(text)
        else:
            seconds = f"{record.relativeCreated / 1000:8.3f} s " if self._timed else ""
            self._console.dim(f"{seconds}{record.name}: {text}")


def route_logging(console: Console) -> None:
    """Send the engine's log, and Python warnings, to `console`."""
    level = logging.WARNING
    if console.quiet:
        level = logging.ERROR
    elif console.verbosity:
        level = logging.INFO if console.verbosity == 1 else logging.DEBUG
    handler = _ConsoleHandler(console)
    logging.captureWarnings(True)
    for name in ("minivllm_engine", "minivllm_cli", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
    if console.json_events:
        # What other libraries log would reach stderr past the console, as lines that are no JSON.
        logging.getLogger().handlers = [handler]
