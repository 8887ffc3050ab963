"""A request as the engine runs it: one sequence in the scheduler."""

from dataclasses import dataclass, field
from typing import Any, Literal

from minivllm_engine.core.outputs import CacheUse, PositionLogprobs, RowScore
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


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens whose logprobs are wanted, behind a context of their own. `num_bytes` is that of their text."""

    context_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReadyScore:
    """Continuations to be scored, with nothing left to choose: what `LLM.add_score` takes too.

    Attributes:
        prompt_ids: the prompt as it was encoded by itself; a context may be shorter, see `Continuation`.
    """

    prompt_ids: tuple[int, ...]
    continuations: tuple[Continuation, ...]
    params: ResolvedSampling

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that must be computed: all but a continuation's last."""
        return max(len(one.context_ids) + len(one.token_ids) - 1 for one in self.continuations)


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
        targets: of a request that only scores: at each of its prompt's last positions the ids whose
            logprobs as the next token are wanted. It samples nothing.
        reuse_end: the cache must leave the last token before it to be computed; None: the last known.
        row_scores: one entry a position of `targets`, as far as they are scored.
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
    targets: tuple[tuple[int, ...], ...] = ()
    reuse_end: int | None = None
    row_scores: list[RowScore] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: the prompt and what was sampled."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_reusable(self) -> int:
        """Tokens of which all but the last may come from the cache."""
        return self.num_tokens if self.reuse_end is None else self.reuse_end

    def scored_range(self, start: int, end: int) -> range:
        """Return the positions from `start` to `end` whose logits tell a logprob that is still wanted.

        After a preemption tokens that were scored before are only computed again.
        """
        length = len(self.prompt_ids)
        if self.targets:
            first = length - len(self.targets) + len(self.row_scores)
            return range(max(start, first), min(end, length))
        # Outputs of one request share their prompt: the first one scores it.
        if self.params.prompt_logprobs is None or self.index:
            return range(0)
        return range(max(start, len(self.prompt_logprobs)), min(end, length - 1))

    def targets_at(self, position: int) -> tuple[int, ...]:
        """Return the ids that are wanted at a position of `scored_range`."""
        return self.targets[position - len(self.prompt_ids) + len(self.targets)]

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
