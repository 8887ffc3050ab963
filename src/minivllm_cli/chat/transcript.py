"""A conversation as a value: turns are added and dropped by making a new one, so rolling back is free."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

Role = Literal["user", "assistant"]
ThinkingInHistory = Literal["drop", "reasoning_content", "inline"]


@dataclass(frozen=True, slots=True)
class Message:
    """What one side said. All fields after `content` belong to answers.

    Attributes:
        reasoning: the thinking before the answer; None where there was none.
        interrupted: the user stopped it, so `content` is what had come by then.
        stats: figures of the statistics line, as they stand in a saved file.
    """

    role: Role
    content: str
    reasoning: str | None = None
    interrupted: bool = False
    finish_reason: str | None = None
    stats: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Transcript:
    """A system text, and questions and answers in turn; a question may be the last."""

    system: str | None = None
    messages: tuple[Message, ...] = ()

    @property
    def num_turns(self) -> int:
        return sum(message.role == "user" for message in self.messages)

    @property
    def last_question(self) -> str | None:
        users = [message.content for message in self.messages if message.role == "user"]
        return users[-1] if users else None

    @property
    def last_answer(self) -> Message | None:
        if self.messages and self.messages[-1].role == "assistant":
            return self.messages[-1]
        return None

    def asked(self, text: str) -> "Transcript":
        """Add a question."""
        return replace(self, messages=(*self.messages, Message("user", text)))

    def answered(self, answer: Message) -> "Transcript":
        """Add the answer to the last question."""
        assert self.messages and self.messages[-1].role == "user"
        return replace(self, messages=(*self.messages, answer))

    def without_answer(self) -> "Transcript":
        """Drop the last answer."""
        assert self.last_answer is not None
        return replace(self, messages=self.messages[:-1])

    def without_turns(self, count: int) -> "Transcript":
        """Drop the last `count` questions and everything said since the first of them."""
        assert 0 <= count <= self.num_turns
        starts = [i for i, message in enumerate(self.messages) if message.role == "user"]
        end = starts[-count] if count else len(self.messages)
        return replace(self, messages=self.messages[:end])

    def with_system(self, text: str | None) -> "Transcript":
        return replace(self, system=text)

    def cleared(self) -> "Transcript":
        """Keep the system text alone."""
        return replace(self, messages=())

    def num_common(self, other: "Transcript") -> int:
        """Count the messages that both begin with."""
        pairs = zip(self.messages, other.messages, strict=False)
        differing = (i for i, (mine, theirs) in enumerate(pairs) if mine != theirs)
        return next(differing, min(len(self.messages), len(other.messages)))

    def for_engine(self, thinking: ThinkingInHistory = "drop") -> list[dict[str, Any]]:
        """Return the messages that the chat template gets.

        Args:
            thinking: whether earlier thinking goes with them, and in which form.
        """
        rows: list[dict[str, Any]] = []
        if self.system is not None:
            rows.append({"role": "system", "content": self.system})
        for message in self.messages:
            row: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.reasoning and thinking == "reasoning_content":
                row["reasoning_content"] = message.reasoning
            elif message.reasoning and thinking == "inline":
                row["content"] = f"<think>\n{message.reasoning}\n</think>\n\n{message.content}"
            rows.append(row)
        return rows


class Branches:
    """Owns the chats that were put aside, by name, in the order in which they were made.

    A branch never changes, so nothing that was said gets lost.
    """

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

    def free_name(self, stem: str, first: int = 1) -> str:
        """Return the first of `stem-first`, `stem-(first + 1)`, ... that is free."""
        return next(name for i in count(first) if (name := f"{stem}-{i}") not in self)

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
        name = occasion if occasion not in self else self.free_name(occasion, 2)
        self.add(name, transcript)
        return name
