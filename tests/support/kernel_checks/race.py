"""Draws of all kinds over awkward rows: the kernels' tokens against those of plain PyTorch, bit for bit."""

import torch

from minivllm_engine.ops.sampling import race as plain
from minivllm_engine.ops.sampling import reference
from minivllm_engine.ops.sampling.largest_triton import largest
from minivllm_engine.ops.sampling.race import RaceRows, key_base, row_keys
from minivllm_engine.ops.sampling.race_triton import likelihoods, race
from support.kernel_checks import on_device
from support.kernel_checks.sampling import awkward_rows

# temperature, min_p, top_p, top_k
KINDS = (
    *((1.0, 0.0, 1.0, 0), (0.7, 0.0, 0.95, 0), (1.3, 0.05, 1.0, 0), (1.0, 0.0, 1.0, 20)),
    *((0.8, 0.02, 0.9, 20), (1.0, 0.0, 0.3, 0), (5e-324, 0.0, 1.0, 0), (1e30, 0.0, 0.5, 0)),
    *((1.0, 1.0, 1.0, 0), (1.0, 0.0, 0.0, 0), (1.0, 0.0, 0.9, 1), (1.5, 0.0, 0.8, 200)),
    *((2.0, 0.0, 1.0, 129), (1.0, 0.0, 1.0, 10**9), (3.0, 0.0, 0.7, 128)),
)


def kinds(
    num: int, vocab: int, num_rows: int, device: torch.device, only: int | None = None
) -> RaceRows:
    chosen = [KINDS[i % len(KINDS) if only is None else only] for i in range(num)]
    temperature, min_p, top_p, top_k = zip(*chosen, strict=True)
    keys = row_keys([key_base(i, 0) for i in range(num)], range(num))
    at = [i * 7 % num_rows for i in range(num)]
    return RaceRows.build(at, keys, temperature, min_p, top_p, top_k, vocab=vocab, device=device)


def check_race(device: torch.device, dtype: torch.dtype, num_rows: int, vocab: int) -> None:
    logits = awkward_rows(num_rows, vocab, dtype)
    best = reference.greedy(logits)[0]
    there = on_device(logits, device)
    num = len(KINDS) * (1 if device.type == "cpu" else 3)
    expected = plain.race(logits, best, kinds(num, vocab, num_rows, torch.device("cpu")))
    found = race(there, best.to(device), kinds(num, vocab, num_rows, device))
    assert found.tolist() == expected.tolist()
    assert int(found.min()) >= 0 and int(found.max()) < vocab
    if vocab > 2:
        assert (expected != best[[i * 7 % num_rows for i in range(num)]]).any()


def check_likelihoods(device: torch.device, dtype: torch.dtype, num_rows: int, vocab: int) -> None:
    logits = awkward_rows(num_rows, vocab, dtype)
    best = reference.greedy(logits)[0]
    tokens = (best + torch.arange(num_rows)) % vocab
    count = min(5, vocab)
    expected = plain.likelihoods(logits, best, tokens, count)
    found = likelihoods(on_device(logits, device), best.to(device), tokens.to(device), count)
    for own, wanted in zip(found, expected, strict=True):
        assert own.tolist() == wanted.tolist()


def check_largest(
    device: torch.device, dtype: torch.dtype, num_rows: int, vocab: int, most: int
) -> None:
    logits = awkward_rows(num_rows, vocab, dtype)
    logits[0, : vocab // 2] = 1.0
    counts = [(i * 5) % (most + 2) for i in range(num_rows)]
    numbers = torch.tensor([[i, n] for i, n in enumerate(counts)], dtype=torch.int32, device=device)
    values, ids = largest(on_device(logits, device), numbers[:, 0], numbers[:, 1], most)
    clean = logits.float()
    clean = torch.where(clean.isnan(), 0.0, clean).clamp(max=plain.LARGEST)
    wanted, wanted_ids = clean.sort(dim=-1, descending=True, stable=True)
    for i, count in enumerate(counts):
        if count <= most:
            assert ids[i, :count].tolist() == wanted_ids[i, :count].tolist()
            assert values[i, :count].tolist() == wanted[i, :count].tolist()
