"""The whole model put together from kernels."""

import torch

from minivllm_engine.core.request import Request
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.ops.kernel_backend import kernel_operations
from minivllm_engine.runner.graph_decode import GraphDecode
from minivllm_engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledSequence
from minivllm_engine.tensors.model_input import AwaitedTokens
from support.packed_runner import CPU, PackedRunner, Row, load_model


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


@torch.inference_mode()
def check_static_steps(path, device: torch.device) -> None:
    """In fp32: static steps of two sequences, alone and beside padding, whose tokens lie in both places."""
    generator = torch.Generator().manual_seed(0)
    kernels = kernel_operations(chunks="reference")
    models = load_model(path), load_model(path, device=device, operations=kernels)
    vocab = models[0].config.vocab_size
    runners = [PackedRunner(model, num_slots=4, num_blocks=6) for model in models]
    prompts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in (18, 5)]
    expected, own = ([runner.add(prompt) for prompt in prompts] for runner in runners)
    for runner, rows in zip(runners, (expected, own), strict=True):
        runner.step((rows[0], 15), (rows[1], 2))
    static = GraphDecode(models[1], runners[1].pool, max_batch=4, max_model_len=32)
    params = SamplingParams.create().resolved(seed=0)
    requests = [Request(str(i), tuple(prompt), params, i) for i, prompt in enumerate(prompts)]
    for size, awaiting in [(4, (1,)), (2, (0, 1))]:
        runners[0].step((expected[0], 1), (expected[1], 1))
        awaited = _in_other_order(requests, own, awaiting, vocab, device)
        static.load(_decodes(requests, own, awaiting).sequences, awaited, size)
        static.run(size)
        for lane, (row, reference) in enumerate(zip(own, expected, strict=True)):
            row.done += 1
            wanted = reference.logits[-1]
            torch.testing.assert_close(
                static.logits[lane : lane + 1].cpu(), wanted, rtol=0, atol=1e-4
            )
            assert static.alive[lane] and static.sampled[lane] == wanted.argmax()


def _decodes(requests: list[Request], rows: list[Row], awaiting: tuple[int, ...]) -> ScheduledBatch:
    sequences = tuple(
        ScheduledSequence(
            request, row.done, 1, tuple(row.blocks), row.slot, True, awaits=i in awaiting
        )
        for i, (request, row) in enumerate(zip(requests, rows, strict=True))
    )
    return ScheduledBatch(sequences, len(sequences))


def _in_other_order(
    requests: list[Request],
    rows: list[Row],
    awaiting: tuple[int, ...],
    vocab: int,
    device: torch.device,
) -> AwaitedTokens:
    """What `awaiting` await, the last first. Whoever reads another place gets another token."""
    order = list(reversed(awaiting))
    tokens = [rows[i].token_ids[rows[i].done] for i in order]
    tokens.append((tokens[0] + 1) % vocab)
    places = {requests[i]: place for place, i in enumerate(order)}
    return AwaitedTokens(torch.tensor(tokens, device=device), places)
