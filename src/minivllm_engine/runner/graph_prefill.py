"""A step of prompt chunks over buffers that stay where they are, for CUDA graphs.

Its launches, one by one, take the host longer than the GPU. A step is padded to a bucket of tokens and
sequences. Rows past the end are computed and mean nothing; they are written nowhere that counts.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from minivllm_engine.models.layers.step_plan import DeltaPlan, StepPlan, kv_shape
from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.ops.prompt_buffers import Bucket, PromptBucket, PromptBuffers, PromptStep
from minivllm_engine.runner.graph_decode import HostNumbers
from minivllm_engine.scheduling.scheduled_batch import ScheduledSequence
from minivllm_engine.tensors.cache_pool import CachePool


class GraphPrefill:
    """The buffers of prompt chunks, and the step itself, for each of some buckets.

    Args:
        buckets: ascending, the last one the largest in both.

    Attributes:
        logits: [most sequences, vocab_size]: first those of the chunks that sample, in their order.
        sampled, alive: [most sequences], what `greedy` gives for them.
    """

    def __init__(
        self,
        model: MiniQwenForCausalLM,
        pool: CachePool,
        *,
        buckets: Sequence[Bucket],
        max_model_len: int,
    ) -> None:
        graph_chunks = model.operations.graph_chunks
        assert graph_chunks is not None
        self.model, self.pool, self.buckets = model, pool, tuple(buckets)
        largest = Bucket(*(max(sizes) for sizes in zip(*buckets, strict=True)))
        device, pinned = model.device, model.device.type == "cuda"
        self._buffers = PromptBuffers(largest, -(-max_model_len // pool.block_size), device)
        shape = kv_shape(model.config, pool.block_size)
        self._parts: dict[Bucket, tuple[PromptBucket, tuple[object, object, object]]] = {}
        for bucket in self.buckets:
            part = self._buffers.bucket(bucket)
            self._parts[bucket] = part, graph_chunks(part, shape, model.dtype)
        rows = largest.num_seqs
        self.logits = torch.zeros(rows, model.config.vocab_size, dtype=model.dtype, device=device)
        self.sampled = torch.zeros(rows, dtype=torch.int64, device=device)
        self.alive = torch.zeros(rows, dtype=torch.bool, device=device)
        size, tables = len(self._buffers.numbers), tuple(self._buffers.tables.shape)
        # The copy of a step may still be on its way when the next one is prepared.
        self._host = [
            (HostNumbers((size,), pinned=pinned), HostNumbers(tables, pinned=pinned))
            for _ in range(2)
        ]

    def bucket_for(self, sequences: Sequence[ScheduledSequence]) -> Bucket | None:
        """Return the smallest bucket that holds some chunks, or None."""
        num_tokens = sum(sequence.length for sequence in sequences)
        for bucket in self.buckets:
            if num_tokens <= bucket.num_tokens and len(sequences) <= bucket.num_seqs:
                return bucket
        return None

    def load(self, sequences: Sequence[ScheduledSequence], bucket: Bucket) -> int:
        """Queue the copy of a step's numbers. How many of the chunks sample."""
        size = self.pool.block_size
        spans = [np.arange(s.start, s.start + s.length) for s in sequences]
        ends = np.cumsum([s.length for s in sequences]) - 1
        samples = [int(end) for s, end in zip(sequences, ends, strict=True) if s.samples]
        tokens = (s.request.token_ids(s.start, s.start + s.length) for s in sequences)
        kv_slots = [
            np.array(s.block_table)[span // size] * size + span % size
            for s, span in zip(sequences, spans, strict=True)
        ]
        step = PromptStep(
            token_ids=np.fromiter(chain.from_iterable(tokens), np.int32),
            positions=np.concatenate(spans),
            kv_slots=np.concatenate(kv_slots),
            slots=[s.slot for s in sequences],
            starts=[s.start for s in sequences],
            lengths=[s.length for s in sequences],
            logits_rows=samples,
            tables=[s.block_table for s in sequences],
        )
        self._load(step, bucket)
        return len(samples)

    def load_sink(self, bucket: Bucket) -> None:
        """Queue the copy of a full step whose states and KV all go to the sinks, over each other."""
        pool, count = self.pool, bucket.num_seqs
        num_blocks = self._buffers.tables.shape[1]
        longest = num_blocks * pool.block_size
        share, rest = divmod(bucket.num_tokens, count)
        lengths = [min(share + (i < rest), longest) for i in range(count)]
        positions = np.concatenate([np.arange(length) for length in lengths])
        step = PromptStep(
            token_ids=np.zeros(len(positions), dtype=np.int32),
            positions=positions,
            kv_slots=pool.sink_block * pool.block_size + positions % pool.block_size,
            slots=[pool.sink_slot] * count,
            starts=[0] * count,
            lengths=lengths,
            logits_rows=range(count),
            tables=[[pool.sink_block] * num_blocks] * count,
        )
        self._load(step, bucket)

    def _load(self, step: PromptStep, bucket: Bucket) -> None:
        self._host.reverse()
        numbers, tables = self._host[0]
        numbers.wait()
        tables.wait()
        self._buffers.write(step, bucket, numbers.array)
        for row, table in zip(tables.array, step.tables, strict=False):
            row[: len(table)] = table
        numbers.copy_to(self._buffers.numbers)
        tables.copy_to(self._buffers.tables[: len(step.tables)])

    def run(self, bucket: Bucket) -> None:
        """Compute the step that was loaded. Queues only, and allocates no inputs."""
        model, ops = self.model, self.model.operations
        part, (attention, conv, rule) = self._parts[bucket]
        factor = model.config.rope.attention_factor
        cos, sin = ops.rotary_cos_sin(part.positions, model.frequencies, factor, model.dtype)
        plan = StepPlan(
            products=ops.products,
            num_decodes=0,
            cos=cos,
            sin=sin,
            kv_slots=part.kv_slots,
            attention=attention,
            decode=None,
            prefill=DeltaPlan(conv, rule),
        )
        hidden = model.planned_states(part.token_ids, plan, self.pool)
        logits = self.logits[: bucket.num_seqs]
        logits.copy_(model.logits(hidden.index_select(0, part.logits_rows)))
        ops.greedy(logits, out=(self.sampled[: len(logits)], self.alive[: len(logits)]))
