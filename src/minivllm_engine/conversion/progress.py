"""Counting bytes for a progress callback."""

from collections.abc import Callable
from typing import Literal

from minivllm_engine.conversion.report import Progress

Phase = Literal["compare", "resume", "write", "hash", "verify", "check"]
Callback = Callable[[Progress], None]


class Counter:
    """Adds up the bytes of one phase and tells the callback, if there is one; also at its start.

    Args:
        num_shards: files of the phase.
        total_bytes: of the phase; with none there is nothing to tell.
    """

    def __init__(
        self, callback: Callback | None, phase: Phase, num_shards: int, total_bytes: int
    ) -> None:
        self._callback = callback
        self._phase: Phase = phase
        self._num_shards = num_shards
        self._total = total_bytes
        self._done = 0
        self._shard = 1
        if total_bytes:
            self.advance(0)

    def enter_shard(self, number: int) -> None:
        """`number` counts from 1."""
        self._shard = number

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._callback:
            self._callback(
                Progress(self._phase, self._shard, self._num_shards, self._done, self._total)
            )
