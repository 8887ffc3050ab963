"""Chats that were put aside, by name. A branch never changes, so nothing that was said gets lost."""

from collections.abc import Iterator
from itertools import count

from minivllm_cli.chat.transcript import Transcript


class Branches:
    """Owns the branches of one chat, in the order in which they were made."""

    def __init__(self) -> None:
        self._kept: dict[str, Transcript] = {}

    def __iter__(self) -> Iterator[tuple[str, Transcript]]:
        return iter(self._kept.items())

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def __getitem__(self, name: str) -> Transcript:
        return self._kept[name]

    def add(self, name: str, transcript: Transcript) -> None:
        """Keep `transcript` as `name`, which must be free."""
        assert name not in self._kept
        self._kept[name] = transcript

    def free_number(self, stem: str) -> str:
        """The first of `stem-1`, `stem-2`, ... that is free."""
        return next(name for i in count(1) if (name := f"{stem}-{i}") not in self)

    def keep_safe(self, transcript: Transcript, occasion: str) -> str | None:
        """Keep a chat that is about to be left, unless some branch holds just this already.

        Args:
            occasion: the name, where it is free; else it gets a number.

        Returns:
            The branch that holds it; None where nothing was said in it.
        """
        if not transcript.messages:
            return None
        holder = next((name for name, kept in self if kept == transcript), None)
        if holder is not None:
            return holder
        others = (f"{occasion}-{i}" for i in count(2))
        name = occasion if occasion not in self else next(n for n in others if n not in self)
        self.add(name, transcript)
        return name
