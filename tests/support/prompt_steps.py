"""Steps of prompt chunks in fixed buffers, without an engine."""

from collections.abc import Sequence

import numpy as np

from minivllm_engine.ops.prompt_buffers import Bucket, PromptBuffers, PromptStep


def write_step(
    buffers: PromptBuffers,
    bucket: Bucket,
    slots: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
) -> None:
    """Fill buffers on a CPU with a step of so many tokens of each sequence."""
    rows = sum(lengths)
    step = PromptStep(
        token_ids=np.arange(rows),
        positions=np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
        ),
        kv_slots=np.arange(100, 100 + rows),
        slots=slots,
        starts=starts,
        lengths=lengths,
        logits_rows=[int(end) - 1 for end in np.cumsum(lengths)],
        tables=[],
    )
    buffers.write(step, bucket, buffers.numbers.numpy())
