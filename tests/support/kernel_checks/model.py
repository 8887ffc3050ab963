"""The whole model put together from kernels."""

import torch

from minivllm_engine.ops.kernel_backend import kernel_operations
from support.packed_runner import CPU, PackedRunner, load_model


def check_mixed_steps(path, device: torch.device, length: int) -> None:
    """In fp32: decodes and chunks side by side, a first token that is a decode, a slot used before.

    length: of the longest first chunk.
    """
    generator = torch.Generator().manual_seed(0)
    kernels = kernel_operations(chunks="reference")
    models = load_model(path), load_model(path, device=device, operations=kernels)
    prompts = [
        torch.randint(0, models[0].config.vocab_size, (n,), generator=generator).tolist()
        for n in (length + 2, 3 + length // 2, 3, 3)
    ]
    logits, pools = [], []
    for model, where in zip(models, (CPU, device), strict=True):
        runner = PackedRunner(model, num_slots=3, num_blocks=length)
        a, b, c = (runner.add(prompt) for prompt in prompts[:3])
        runner.step((a, length), (b, 2), (c, 1))
        runner.step((a, 1), (b, length // 2), (c, 2))
        runner.release(c)
        d = runner.add(prompts[3])
        runner.step((a, 1), (b, 1), (d, 1))
        runner.step((d, 2))
        assert runner.pool.device == where
        logits.append(torch.cat([row.all_logits for row in (a, b, c, d)]).cpu())
        pools.append(runner.pool.tensors())
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-4)
    for kernel, reference in zip(pools[1], pools[0], strict=True):
        torch.testing.assert_close(kernel.cpu(), reference, rtol=0, atol=2e-5, equal_nan=True)
