"""The model on its device: weights, pool and one eager step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from minivllm_engine.cache_pool import CachePool
from minivllm_engine.checkpoint_index import CheckpointIndex
from minivllm_engine.memory_plan import MemoryPlan
from minivllm_engine.model_config import ModelConfig
from minivllm_engine.model_input import build_model_input
from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.random_weights import RandomWeights
from minivllm_engine.request import PositionLogprobs
from minivllm_engine.sampler import score
from minivllm_engine.scheduler import ScheduledBatch, ScheduledSequence
from minivllm_engine.weights import fill_weights

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gives.

    Attributes:
        logits: [num_sampling, vocab_size], of the sequences that sample.
        scored: one entry for each scored position of each sequence, in order; None where the logits
            are dead.
    """

    logits: torch.Tensor
    scored: tuple[PositionLogprobs | None, ...] = ()


class ModelRunner:
    """Owns the model and its cache pool. A step reads and writes the entries that the batch names."""

    def __init__(
        self,
        weights: CheckpointIndex | RandomWeights,
        model_config: ModelConfig,
        plan: MemoryPlan,
        *,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        dtype = TORCH_DTYPES[plan.dtype]
        self.model = MiniQwenForCausalLM(model_config, dtype=dtype, device=device)
        fill_weights(self.model, weights, progress=progress)
        self.pool = CachePool(
            model_config,
            num_slots=plan.max_num_seqs,
            num_blocks=plan.num_blocks,
            num_snapshots=plan.num_snapshots,
            block_size=plan.block_size,
            dtype=dtype,
            state_dtype=TORCH_DTYPES[plan.state_dtype],
            device=device,
        )

    def allocated_bytes(self) -> dict[str, int]:
        """Bytes of weights and pools, by the names of the memory plan's rows."""
        return {"weights": held_bytes(self.model), **self.pool.bytes_by_pool()}

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> StepOutput:
        """Compute one step.

        On an exception the states and KV of the batch's requests are undefined.
        """
        if batch.restores:
            self.pool.restore(*zip(*batch.restores, strict=True))
        model_input = build_model_input(batch, self.pool)
        hidden = self.model.hidden_states(model_input, self.pool)
        saves = [(s.slot, s.snapshot) for s in batch.sequences if s.snapshot is not None]
        if saves:
            self.pool.save(*zip(*saves, strict=True))
        logits = self.model.logits(hidden.index_select(0, model_input.logits_rows))
        if model_input.scored_rows is None:
            return StepOutput(logits)
        tokens = [token for sequence in batch.sequences for token in _scored_tokens(sequence)]
        rows = hidden.index_select(0, model_input.scored_rows)
        scored = score(rows, tokens, self.model.logits, self.model.config.vocab_size)
        return StepOutput(logits, tuple(scored))


def _scored_tokens(sequence: ScheduledSequence) -> Iterator[tuple[int, int]]:
    """The token after each scored position, and how many of the likeliest are wanted beside it."""
    request = sequence.request
    for position in sequence.scored:
        yield request.prompt_ids[position + 1], request.params.prompt_logprobs or 0


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of all tensors that a model's modules hold, each storage counted once."""
    storages: dict[int, int] = {}
    for module in model.modules():
        for value in (*module._parameters.values(), *vars(module).values()):
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, torch.Tensor):
                    storage = one.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
