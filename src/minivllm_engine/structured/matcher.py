"""Which tokens may come next: a grammar's state along one answer."""

import ctypes
from typing import Any

from minivllm_engine.core.errors import EngineError


def grammar_failed(why: str) -> EngineError:
    """Make the error of an answer that its grammar cannot go on with."""
    return EngineError(
        "the grammar of the answer failed", why=" ".join(why.split()), code="grammar_failed"
    )


class Matcher:
    """The state of a grammar after some tokens. Of one answer alone.

    Args:
        inner: an llguidance matcher without an error, of which nobody else knows.
        num_bytes: of a mask of all tokens.
    """

    def __init__(self, inner: Any, num_bytes: int) -> None:
        self._inner = inner
        self.num_bytes = num_bytes

    def copy(self) -> "Matcher":
        """Return another one in the same state."""
        return Matcher(self._inner.deep_copy(), self.num_bytes)

    @property
    def is_stopped(self) -> bool:
        """Can nothing follow but an end?"""
        return bool(self._inner.is_stopped())

    def consume(self, token_id: int) -> None:
        """Go on by a token.

        Raises:
            EngineError: it was not allowed, or a limit of the grammar was met.
        """
        self._inner.consume_token(token_id)
        self._check()

    def fill(self, address: int) -> None:
        """Write the mask of what may come next: `num_bytes` bytes, a bit a token from the lowest on.

        Raises:
            EngineError: a limit of the grammar was met; the mask is worth nothing.
        """
        self._inner.unsafe_compute_mask_ptr(address, self.num_bytes)
        self._check()

    def mask(self) -> bytes:
        """Return that mask.

        Raises:
            EngineError: as `fill`.
        """
        found: bytes = self._inner.compute_bitmask()
        self._check()
        return found

    def _check(self) -> None:
        # One in error says that it has stopped, and allows end ids: unseen, a torso looks like an answer.
        if self._inner.is_error():
            raise grammar_failed(self._inner.get_error())


class Guide:
    """A matcher along one output: how far it has come, and what went wrong where nobody could be told."""

    def __init__(self, matcher: Matcher) -> None:
        self._start, self._matcher = matcher, matcher.copy()
        self._error: EngineError | None = None
        self.num_bytes = matcher.num_bytes

    @property
    def is_stopped(self) -> bool:
        """Is the answer whole, so that nothing can follow?"""
        return self._matcher.is_stopped

    def fill(self, address: int) -> None:
        """Write the mask as `Matcher.fill` does. Where that fails all is allowed, and `consume` raises."""
        try:
            self._matcher.fill(address)
        except EngineError as error:
            self._error = error
            ctypes.memset(address, 0xFF, self.num_bytes)

    def consume(self, token_id: int) -> None:
        """Go on by a token.

        Raises:
            EngineError: it was not allowed, or the mask before it could not be made.
        """
        if self._error is not None:
            raise self._error
        self._matcher.consume(token_id)

    def check(self, token_ids: list[int]) -> None:
        """Prove that the matcher stands where these tokens lead from the start. For tests."""
        replayed = self._start.copy()
        for token_id in token_ids:
            replayed.consume(token_id)
        assert replayed.is_stopped == self._matcher.is_stopped, "a matcher lost its place"
        assert replayed.mask() == self._matcher.mask(), "a matcher lost its place"
