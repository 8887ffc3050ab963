"""The argmax, also where rows are non-finite and where the largest logit is there several times."""

import torch

from minivllm_engine.ops.sampling import reference
from minivllm_engine.ops.sampling.triton import greedy
from support.kernel_checks import NAN, on_device, random_rows

INF = float("inf")


def awkward_rows(num_rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of all kinds in turn, as parts of wider rows, between which is NaN."""
    torch.manual_seed(vocab)
    (logits,) = random_rows(num_rows, vocab, dtype=dtype)
    last, middle = vocab - 1, vocab // 2
    largest = torch.finfo(torch.float32).max
    for i, row in enumerate(logits):
        match i % 11:
            case 1:
                row[last] = row[middle] = row.max() + 1
            case 2:
                row.fill_(0.25)
            case 3:
                row[middle] = NAN
            case 4:
                row[last] = INF
                row[middle] = largest if dtype == torch.float32 else INF
            case 5:
                row[0] = -INF
            case 6:
                row.neg_().sub_(row.max().abs() + 50)
            case 7:
                row.fill_(NAN)
            case 8:
                row.fill_(-INF)
            case 9:
                row.fill_(-0.0)
                row[middle] = 0.0
            case 10:
                # Only the last differs, and it is the smallest.
                row.fill_(0.5)
                row[last] = -3
    return logits


def check_greedy(device: torch.device, dtype: torch.dtype, num_rows: int, vocab: int) -> None:
    logits = awkward_rows(num_rows, vocab, dtype)
    expected = reference.greedy(logits)
    there = on_device(logits, device)
    found = greedy(there)
    buffers = (
        torch.full((num_rows + 1,), -7, device=device),
        torch.ones(num_rows + 1, dtype=torch.bool, device=device),
    )
    written = greedy(there, out=(buffers[0][:num_rows], buffers[1][:num_rows]))
    for ids, alive in (found, written):
        assert ids.tolist() == expected[0].tolist()
        assert alive.tolist() == expected[1].tolist()
        assert ids.dtype == torch.int64 and alive.dtype == torch.bool
    assert buffers[0][-1] == -7 and buffers[1][-1], "written beyond the rows"
    assert written[0].data_ptr() == buffers[0].data_ptr()
    assert written[1].data_ptr() == buffers[1].data_ptr()
