"""Looking at an engine's cache while it runs and when it ends: `--cache-dump`, SIGUSR1, the view `run`."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from minivllm_cli.config.settings import Settings
from minivllm_cli.console.streams import Console
from minivllm_cli.errors import OutputFailed
from minivllm_engine.core.atomic_file import write_atomic
from minivllm_engine.protocol.strict_json import dump_line

if TYPE_CHECKING:
    from minivllm_cli.cache_dump.live_document import LiveDocument
    from minivllm_engine.engine.prepare import PreparedModel
    from minivllm_engine.llm import LLM


class CacheWatch:
    """Takes the document of an engine between two steps, and at its end.

    Args:
        document: makes it; None watches nothing, and every method does nothing.
        path: where it is written; None keeps it only.
        announce: say so when a signal had it written.

    Attributes:
        last: the document as it was taken last; None before.
    """

    def __init__(
        self,
        document: "LiveDocument | None",
        path: Path | None,
        console: Console,
        *,
        announce: bool = True,
    ) -> None:
        self._document, self._path = document, path
        self._console, self._announce = console, announce
        self._llm: LLM | None = None
        self._asked = False
        self._failure: OutputFailed | None = None
        self.last: dict[str, Any] | None = None

    @contextmanager
    def answering_signals(self) -> Iterator[None]:
        """Let SIGUSR1 have the file written within, as soon as an engine is between two steps."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self._path is None or self._document is None or not in_main_thread:
            yield
            return
        old = signal.signal(signal.SIGUSR1, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, old)

    @contextmanager
    def over(self, llm: "LLM") -> Iterator[None]:
        """Watch `llm` run within; at the end, however it comes, take and write the document."""
        self._llm = llm
        try:
            yield
        finally:
            self._llm = None
            if self._document is not None:
                self._keep(self._document.now(llm))

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Raise at the end, as `check`; or warn, where something else went wrong already."""
        try:
            yield
        except BaseException:
            self.warn()
            raise
        self.check()

    def poll(self) -> None:
        """Write the file if a signal asked for it. To be called between two steps."""
        if not self._asked or self._llm is None:
            return
        self._asked = False
        assert self._document is not None
        self._keep(self._document.now(self._llm))
        self.warn()
        if self._failure is None and self._announce:
            self._console.note(f"cache dump: {self._path}")

    def without_engine(self) -> None:
        """Write the plan alone: no engine was needed."""
        if self._document is not None:
            self._keep(self._document.planned())

    def warn(self) -> None:
        """Say so if the file could not be written."""
        if self._failure is not None:
            self._console.warn(self._failure.problems[0].what)

    def check(self) -> None:
        """Check, when everything else is done, that the file was written.

        Raises:
            OutputFailed: it could not be.
        """
        if self._failure is not None:
            raise self._failure

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if self._llm is not None and not self._llm.has_unfinished:  # nobody will poll soon
            self.poll()

    def _keep(self, document: dict[str, Any]) -> None:
        self.last, self._failure = document, None
        if self._path is None:
            return
        try:
            write_atomic(self._path, dump_line(document))
        except OSError as error:
            self._failure = OutputFailed(
                f"cannot write {self._path}: {error.strerror or error}",
                why="the answers are not concerned",
                hint="make room there, or name another --cache-dump",
            )


def cache_watch(
    path: Path | None,
    source: str,
    settings: Settings,
    prepared: "PreparedModel",
    console: Console,
    *,
    announce: bool = True,
) -> CacheWatch:
    """Make the watch of `--cache-dump`; one that does nothing where the flag was not given."""
    if path is None:
        return CacheWatch(None, None, console)
    from minivllm_cli.cache_dump.live_document import LiveDocument

    return CacheWatch(LiveDocument(source, settings, prepared), path, console, announce=announce)
