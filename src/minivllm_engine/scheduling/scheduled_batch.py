"""What the scheduler hands to the model: a step's requests, and which of their tokens are computed."""

from dataclasses import dataclass
from typing import NamedTuple

from minivllm_engine.core.request import Request


class ScheduledSequence(NamedTuple):
    """One request's part of a step: its tokens `start` to `start + length`.

    `samples` says that the last token is among them, so that the step yields the next one.
    `awaits` says that its token, a single one, is still to come from the step before.
    `snapshot` is where its state goes after the step, if it is to be kept. `scored` are the positions
    whose logits are wanted because they tell the logprob of the prompt's next token, or those of
    `Request.targets`.
    """

    request: Request
    start: int
    length: int
    block_table: tuple[int, ...]
    slot: int
    samples: bool
    snapshot: int | None = None
    scored: range = range(0)
    awaits: bool = False


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A step: the first `num_decodes` sequences have one token each, longer chunks follow.

    Before it, the states of `restores` (snapshot, slot) are copied, for the requests `restored`, which may
    run in a later step only.
    """

    sequences: tuple[ScheduledSequence, ...]
    num_decodes: int
    restores: tuple[tuple[int, int], ...] = ()
    restored: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(sequence.length for sequence in self.sequences)
