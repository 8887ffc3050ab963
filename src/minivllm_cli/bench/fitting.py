"""Whether the rows of a run fit into one engine: how large it must be, and why a row is too large."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm_cli.bench.sampling import decode_spare
from minivllm_cli.bench.workload import Workload
from minivllm_cli.config.settings import Settings
from minivllm_engine.core.units import count_text

if TYPE_CHECKING:
    from minivllm_engine.memory.layout import MemoryPlan

# What a step computes where nothing is set, on a CPU; more on a GPU, where less is spare.
_STEP_TOKENS = 2048
_DEFAULT_MODEL_LEN = 32 * 1024
# Of a repetition, whose ids are Python's: about 40 bytes a token.
_MOST_REQUESTS, _MOST_PROMPT_TOKENS = 1 << 20, 1 << 26


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a row cannot run.

    Attributes:
        what, why: a sentence, and the figures behind it.
        keys: of section `bench`, those to make smaller, best first.
        is_memory: it is memory that is missing.
    """

    what: str
    why: str
    keys: tuple[str, ...]
    is_memory: bool = False


def sized(settings: Settings, workloads: Sequence[Workload], positions: int | None) -> Settings:
    """Size the engine for the largest batch and the longest row, where nothing is set.

    Args:
        positions: of the model, beyond which no sequence can be; None where they are not known.
    """
    if "engine.max_num_seqs" not in settings.entries:
        settings = settings.with_value("engine.max_num_seqs", max(w.batch for w in workloads))
    step = settings.get("engine.max_num_batched_tokens") or _STEP_TOKENS
    longest = max(_needed(workload, step) for workload in workloads)
    own = settings.bench.workload is not None
    if own and longest > _DEFAULT_MODEL_LEN and "engine.max_model_len" not in settings.entries:
        length = longest if positions is None else min(longest, positions)
        settings = settings.with_value("engine.max_model_len", length)
    return settings


def _needed(workload: Workload, step_tokens: int) -> int:
    """Longest sequence that a workload makes of a request."""
    spare = decode_spare(workload, step_tokens) if workload.kind == "decode" else 0
    return workload.longest + spare


def misfit(plan: "MemoryPlan", positions: int, workload: Workload) -> Misfit | None:
    """Say why an engine of that plan cannot run the row; None where it can."""
    return (
        _too_many_requests(workload)
        or _too_many_sequences(plan, workload)
        or _too_long(plan, positions, workload)
        or _too_many_blocks(plan, workload)
    )


def row_name(workload: Workload) -> str:
    """Name a row in a message."""
    return f"{workload.title}, batch {workload.batch:,}"


def _too_many_requests(workload: Workload) -> Misfit | None:
    name = row_name(workload)
    if workload.groups > workload.num_prompts:
        return Misfit(
            f"{name}: {workload.groups:,} groups share prefixes",
            f"a row of {count_text(workload.num_prompts, 'request')} leaves some groups without any",
            ("groups",),
        )
    tokens = workload.num_prompts * (workload.depth + workload.prompt.high)
    if workload.num_prompts <= _MOST_REQUESTS and tokens <= _MOST_PROMPT_TOKENS:
        return None
    return Misfit(
        f"{name}: {count_text(workload.num_prompts, 'request')} with {tokens:,} prompt tokens in a "
        "repetition",
        f"at most {_MOST_REQUESTS:,} and {_MOST_PROMPT_TOKENS:,}: all are made before it starts",
        ("num_prompts", "batch", "prompt_len", "depth"),
    )


def _too_many_sequences(plan: "MemoryPlan", workload: Workload) -> Misfit | None:
    name, batch = row_name(workload), workload.batch
    if batch > plan.max_num_seqs:
        return Misfit(
            f"{name}: {batch:,} sequences at once",
            f"max_num_seqs is {plan.max_num_seqs:,}",
            ("batch",),
        )
    if workload.times_decode and batch > plan.max_num_batched_tokens:
        return Misfit(
            f"{name}: a decode step has {batch:,} tokens",
            f"max_num_batched_tokens is {plan.max_num_batched_tokens:,}",
            ("batch",),
        )
    return None


def _too_long(plan: "MemoryPlan", positions: int, workload: Workload) -> Misfit | None:
    needed = _needed(workload, plan.max_num_batched_tokens)
    if needed <= plan.max_model_len:
        return None
    return Misfit(
        f"{row_name(workload)}: up to {needed:,} tokens a request",
        f"max_model_len is {plan.max_model_len:,}; the model's positions end at {positions:,}",
        ("depth", "prompt_len", "gen_len", "batch"),
    )


def _too_many_blocks(plan: "MemoryPlan", workload: Workload) -> Misfit | None:
    if not workload.times_decode:
        return None
    blocks = -(-_needed(workload, plan.max_num_batched_tokens) // plan.block_size)
    blocks *= workload.batch
    if blocks <= plan.num_blocks:
        return None
    return Misfit(
        f"{row_name(workload)}: {blocks:,} KV blocks",
        f"there are {plan.num_blocks:,}, and all requests run side by side",
        ("batch", "depth", "gen_len"),
        is_memory=True,
    )
