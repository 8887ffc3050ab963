"""The refusal of a turn that does not fit the context: what takes the room, and what would help."""

from collections.abc import Callable
from dataclasses import dataclass

from minivllm_cli.chat.prompts import Template
from minivllm_cli.chat.transcript import Transcript
from minivllm_engine.core.errors import RequestError

_ROUND_TO = 1024


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """The context as it is, and whether it could be longer.

    Attributes:
        tokens: prompt and answer together.
        largest: what the model's positions allow.
        fits: would a context of that many tokens fit in memory?
        option: what to type for one of so many tokens.
    """

    tokens: int
    largest: int
    fits: Callable[[int], bool]
    option: Callable[[int], str]

    def check(self, template: Template, asked: Transcript) -> None:
        """Refuse a prompt that leaves no room for one token of an answer. Changes nothing.

        Args:
            asked: the transcript with the new question at its end.

        Raises:
            RequestError: it is too long, or the template refuses these messages.
        """
        total = template.count(asked)
        needed = total + 1
        if needed <= self.tokens:
            return
        question = Transcript(messages=asked.messages[-1:])
        message = template.count(question)
        system = template.count(question.with_system(asked.system)) - message
        history = total - system - message
        raise RequestError(
            f"this turn needs {needed:,} tokens, {needed - self.tokens:,} over the context of "
            f"{self.tokens:,}",
            why=f"system {system:,} + history {history:,} + your message {message:,} "
            "+ 1 for an answer",
            hint=" · ".join(self._remedies(template, asked, needed)) or "a shorter message",
            code="prompt_too_long",
        )

    def _remedies(self, template: Template, asked: Transcript, needed: int) -> list[str]:
        earlier = Transcript(asked.system, asked.messages[:-1])
        question = asked.messages[-1].content

        def needed_after(history: Transcript) -> int:
            return template.count(history.asked(question)) + 1

        remedies: list[str] = []
        for turns in range(1, earlier.num_turns + 1):
            left = needed_after(earlier.without_turns(turns))
            if left <= self.tokens:
                if turns < earlier.num_turns:
                    remedies.append(f"/undo {turns} (frees {needed - left:,})")
                remedies.append("/clear")
                break
        longer = min(-(-needed // _ROUND_TO) * _ROUND_TO, self.largest)
        if longer >= needed and self.fits(longer):
            remedies.append(f"restart with {self.option(longer)} (fits)")
        return remedies
