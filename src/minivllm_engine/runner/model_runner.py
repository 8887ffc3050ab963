"""The model on its device: weights, pool and one eager step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from minivllm_engine.checkpoint.index import CheckpointIndex
from minivllm_engine.checkpoint.random_weights import RandomWeights
from minivllm_engine.core.config import EngineOptions
from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.core.stats import LoadReport
from minivllm_engine.memory.layout import MemoryPlan
from minivllm_engine.memory.sizes import graph_sizes, prompt_buckets
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.models.layers.step_plan import kv_shape
from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.ops.choice import choose_operations
from minivllm_engine.ops.operations import DeltaNetWeights, Operations
from minivllm_engine.ops.packed import PackedWeight
from minivllm_engine.ops.prompt_buffers import Bucket
from minivllm_engine.runner.cuda_graph_runner import CudaGraphRunner
from minivllm_engine.runner.logit_edits import LogitEdits, SamplingRow
from minivllm_engine.runner.sampler import SampleHandle, draw
from minivllm_engine.runner.scoring import ScoreHandle, score_rows
from minivllm_engine.runner.weights import fill_weights
from minivllm_engine.scheduling.scheduled_batch import ScheduledBatch
from minivllm_engine.tensors.cache_pool import CachePool
from minivllm_engine.tensors.model_input import AwaitedTokens, ModelInput, build_model_input

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gives.

    Attributes:
        logits: [num_sampling, vocab_size], of the sequences that sample.
        scored: one entry for each scored position of each sequence, in order; None for no positions.
        argmax: what `greedy` gives for the logits, where the step has done so already.
    """

    logits: torch.Tensor
    scored: ScoreHandle | None = None
    argmax: tuple[torch.Tensor, torch.Tensor] | None = None


class ModelRunner:
    """Owns the model and its cache pool. A step reads and writes the entries that the batch names.

    Args:
        plan: decides the device, the dtypes and the size of everything.
        options: which operations are wanted.
        operations: these and no others, whatever the options say.
        progress: called as (phase, done, total), for `weights`, and on a GPU for `compile`, `decode
            kernels` and `graphs`.

    Raises:
        BackendUnavailable: the device or a package for it will not do.
    """

    def __init__(
        self,
        weights: CheckpointIndex | RandomWeights,
        model_config: ModelConfig,
        plan: MemoryPlan,
        *,
        options: EngineOptions,
        operations: Operations | None = None,
        progress: Progress | None = None,
    ) -> None:
        dtype, device = TORCH_DTYPES[plan.dtype], torch.device(plan.device.kind)
        shape = kv_shape(model_config, plan.block_size)
        self.operations = operations or choose_operations(device, options, shape, dtype)
        started = time.perf_counter()
        self.model = MiniQwenForCausalLM(model_config, self.operations, dtype=dtype, device=device)
        fill_weights(self.model, weights, progress=progress)
        self.model.pack(tied_head=plan.packs_head)
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
        self._edits = LogitEdits(plan.max_num_seqs, model_config.vocab_size, device)
        self.graphs: CudaGraphRunner | None = None
        self.load_report = LoadReport(weights_s=time.perf_counter() - started)
        if self.operations.graph_decode:
            on_gpu = device.type == "cuda"
            self.graphs = CudaGraphRunner(
                self.model,
                self.pool,
                sizes=graph_sizes(plan.max_graph_batch) if plan.max_graph_batch else (),
                buckets=[
                    Bucket(*sizes)
                    for sizes in prompt_buckets(plan.max_num_batched_tokens, plan.max_num_seqs)
                ],
                max_num_seqs=plan.max_num_seqs,
                max_model_len=plan.max_model_len,
            )
            if on_gpu:
                self._get_ready(self.graphs, plan, progress)

    def _get_ready(
        self, graphs: CudaGraphRunner, plan: MemoryPlan, progress: Progress | None
    ) -> None:
        """Compile all kernels, then capture: nothing of either is left for the first request."""

        def phase(name: str) -> Callable[[int, int], None] | None:
            return None if progress is None else lambda done, total: progress(name, done, total)

        torch.cuda.synchronize()
        started = time.perf_counter()
        warm_up_prompts(self.model, self.pool, plan.max_num_batched_tokens, phase("compile"))
        graphs.warm_up(phase("decode kernels"))
        self._warm_up_draws(graphs.static.logits[:1])
        torch.cuda.synchronize()
        compiled = time.perf_counter()
        torch.cuda.empty_cache()
        free_before = torch.cuda.mem_get_info()[0]
        graphs.capture(phase("graphs"))
        torch.cuda.synchronize()
        self.load_report = LoadReport(
            weights_s=self.load_report.weights_s,
            compile_s=compiled - started,
            capture_s=time.perf_counter() - compiled,
            graph_sizes=graphs.sizes,
            graph_bytes=free_before - torch.cuda.mem_get_info()[0],
            graph_bytes_planned=plan.graph_bytes,
        )

    def allocated_bytes(self) -> dict[str, int]:
        """Return bytes of weights and pools, by the names of the memory plan's rows."""
        return {"weights": held_bytes(self.model), **self.pool.bytes_by_pool()}

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch, awaited: AwaitedTokens | None = None) -> StepOutput:
        """Compute one step. On a GPU it is queued, and what it gives is on its way.

        On an exception the states and KV of the batch's requests are undefined.

        Args:
            awaited: what the step before samples, where sequences of this one await their tokens.
        """
        if batch.restores:
            self.pool.restore(*zip(*batch.restores, strict=True))
        static = None if self.graphs is None else self.graphs.run(batch, awaited)
        if static is not None:
            self._save_snapshots(batch)
            return StepOutput(static[0], argmax=static[1])
        model_input = build_model_input(batch, self.pool, awaited)
        hidden = self.model.hidden_states(model_input, self.pool)
        self._save_snapshots(batch)
        logits = self.model.logits(hidden.index_select(0, model_input.logits_rows))
        if model_input.scored_rows is None:
            return StepOutput(logits)
        rows = hidden.index_select(0, model_input.scored_rows)
        scored = score_rows(rows, batch, self.model.logits, self.model.config.vocab_size)
        return StepOutput(logits, scored)

    def _save_snapshots(self, batch: ScheduledBatch) -> None:
        saves = [(s.slot, s.snapshot) for s in batch.sequences if s.snapshot is not None]
        if saves:
            self.pool.save(*zip(*saves, strict=True))

    @torch.inference_mode()
    def _warm_up_draws(self, logits: torch.Tensor) -> None:
        """Compile what draws, from logits as they are and from edited ones."""
        params = ResolvedSampling(seed=0, top_k=2, top_p=0.5, logprobs=1)
        for forbidden in ((), (0,)):
            row = SamplingRow(params, 0, 0, (), (), forbidden)
            self.draw(StepOutput(logits), [row])

    @torch.inference_mode()
    def draw(self, output: StepOutput, rows: Sequence[SamplingRow]) -> SampleHandle:
        """Queue the drawing of the tokens of a step."""
        ops = self.operations
        return draw(
            output.logits,
            rows,
            greedy=ops.greedy,
            race=ops.race,
            likelihoods=ops.likelihoods,
            argmax=output.argmax,
            edits=self._edits,
        )


def held_bytes(model: torch.nn.Module) -> int:
    """Return bytes of all tensors that a model's modules hold, each storage counted once."""
    storages: dict[int, int] = {}
    packed = 0
    for module in model.modules():
        for value in (*module._parameters.values(), *vars(module).values()):
            if isinstance(value, PackedWeight):
                packed += value.nbytes
            parts = vars(value).values() if isinstance(value, DeltaNetWeights) else (value,)
            for part in parts:
                for one in part if isinstance(part, tuple) else (part,):
                    if isinstance(one, torch.Tensor):
                        storage = one.untyped_storage()
                        storages[storage.data_ptr()] = storage.nbytes()
    return packed + sum(storages.values())


# Kernels are compiled anew for one sequence and for several, and tuned anew by classes of length.
_LENGTHS = ((64,), (7, 9), (512,), (300, 212), (2048,))


@torch.inference_mode()
def warm_up_prompts(
    model: MiniQwenForCausalLM,
    pool: CachePool,
    max_tokens: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Compute prompts of several lengths, the longest of `max_tokens`, in the sinks of the pool."""
    wanted: list[tuple[int, ...]] = [
        lengths for lengths in reversed(_LENGTHS) if sum(lengths) < max_tokens
    ]
    # The longest first: FLA tunes its kernels on what it sees first.
    if max_tokens >= 1024:
        wanted = [(max_tokens // 8 - 64,) * 8 + (64,) * 8, *wanted]
        wanted = [(max_tokens // 8,) * 8, (max_tokens,), *wanted]
    else:
        wanted = [(max_tokens,), *wanted]
    for done, lengths in enumerate(wanted):
        if progress is not None:
            progress(done, len(wanted))
        for decodes in (0, 1):
            batch = _sink_batch(pool, (1,) * decodes + lengths, decodes)
            model(batch, pool)


def _sink_batch(pool: CachePool, lengths: tuple[int, ...], num_decodes: int) -> ModelInput:
    """Prompts whose states and KV all go to the sinks, over each other."""
    num_tokens = sum(lengths)

    def filled(*shape: int, value: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int64, device=pool.device)

    blocks = -(-max(lengths) // pool.block_size)
    positions = torch.cat([torch.arange(n, device=pool.device) for n in lengths])
    return ModelInput(
        token_ids=filled(num_tokens, value=0),
        positions=positions,
        starts=(0,) * len(lengths),
        lengths=lengths,
        slots=filled(len(lengths), value=pool.sink_slot),
        block_tables=filled(len(lengths), blocks, value=pool.sink_block),
        kv_slots=pool.sink_block * pool.block_size + positions % pool.block_size,
        logits_rows=torch.arange(len(lengths), device=pool.device),
        num_decodes=num_decodes,
    )
