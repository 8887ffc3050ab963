"""A request as the engine runs it: one sequence in the scheduler."""

from dataclasses import dataclass, field
from typing import Any, Literal

from minivllm_engine.core.outputs import CacheUse, PositionLogprobs
from minivllm_engine.core.sampling_params import ResolvedSampling

RequestStatus = Literal["waiting", "running", "finished"]


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """A request with nothing left to choose: what `LLM.read_request` gives and `LLM.add_request` takes.

    Attributes:
        chat: reasoning is told from the answer.
    """

    prompt_ids: tuple[int, ...]
    params: ResolvedSampling
    chat: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the scheduler: one output of what the user asked for.

    Owned by the scheduler: `status`, `output_ids`, the numbers of tokens and `num_preemptions`. The
    block table's ids belong to the block manager and the slot to the state manager; both are held by
    the request for as long as it runs. The prefix cache keeps what it knows of the request here too.

    Attributes:
        num_computed_tokens: whose state and KV are there.
        num_launched_tokens: those, and those of steps in flight.
        num_awaited: tokens that steps in flight will yield.
        last_turn: how many parts of steps had been launched with its latest one.
        answer_at: in a chat, where the prompt opens the answer: the last tokens of the prompt.
        counted: the cache's sums know of it.
        block_hashes: of its blocks, as far as they were needed.
        num_kept_blocks: blocks of the table that are in the cache.
        boundaries: where snapshots are wanted, ascending.
        goes_on: its prompt begins with all that was computed of an earlier request, answer included.
        rolling_snapshot: the cache's node with the latest snapshot of the answer.
        cache_use: what it found when it first started; None before.
        prompt_logprobs: of the prompt's second token and those after it, as far as they are scored.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: ResolvedSampling
    arrival: int
    index: int = 0
    max_total_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    status: RequestStatus = "waiting"
    block_table: list[int] = field(default_factory=list)
    slot: int | None = None
    num_computed_tokens: int = 0
    num_launched_tokens: int = 0
    num_awaited: int = 0
    num_preemptions: int = 0
    last_turn: int = 0
    answer_at: int | None = None
    counted: bool = True
    block_hashes: list[bytes] = field(default_factory=list)
    num_kept_blocks: int = 0
    boundaries: list[int] = field(default_factory=list)
    goes_on: bool = False
    rolling_snapshot: Any = None
    cache_use: CacheUse | None = None
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: the prompt and what was sampled."""
        return len(self.prompt_ids) + len(self.output_ids)

    def token_at(self, position: int) -> int:
        """Return the id at a position of prompt and output together."""
        length = len(self.prompt_ids)
        return (
            self.prompt_ids[position] if position < length else self.output_ids[position - length]
        )

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the ids of positions `start` to `end` of prompt and output together."""
        prompt_len = len(self.prompt_ids)
        ids = list(self.prompt_ids[start:end])
        if end > prompt_len:
            ids += self.output_ids[max(start - prompt_len, 0) : end - prompt_len]
        return ids
