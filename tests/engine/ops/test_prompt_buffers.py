"""Numbers of a step of prompts at fixed places: what every bucket sees of them, and what pads them."""

import numpy as np
import pytest
import torch

from minivllm_engine.memory.sizes import prompt_buckets
from minivllm_engine.ops.prompt_buffers import Bucket, PromptBuffers
from support.prompt_steps import write_step

CPU = torch.device("cpu")
LARGEST = Bucket(200, 6)


def rows_of_tiles(packed, size: int) -> list[int]:
    """The rows of all tiles that are somebody's, sorted."""
    rows = []
    for seq, first in packed.tiles.tolist():
        if seq >= 0:
            begin, end = packed.bounds[seq : seq + 2].tolist()
            rows += range(begin + first, min(begin + first + size, end))
    return sorted(rows)


@pytest.mark.parametrize(
    ("bucket", "lengths"),
    [
        (Bucket(64, 1), [1]),
        (Bucket(64, 1), [64]),
        (Bucket(128, 1), [65]),
        (Bucket(128, 4), [1, 63, 2, 62]),
        (Bucket(200, 6), [33, 33, 33, 33, 33, 35]),
        (Bucket(200, 6), [3, 190]),
    ],
    ids=str,
)
def test_every_row_is_in_one_tile_and_one_chunk(bucket: Bucket, lengths: list[int]) -> None:
    buffers = PromptBuffers(LARGEST, 4, CPU)
    seen, count, rows = buffers.bucket(bucket), len(lengths), sum(lengths)
    tiles = {size: seen.packed(size) for size in (32, 7)}
    # What another step left there, in all lanes and tiles, must not be seen.
    write_step(buffers, LARGEST, range(6), [5] * 6, [30] * 6)
    write_step(buffers, bucket, range(10, 10 + count), range(count), lengths)
    assert seen.token_ids.tolist() == [*range(rows), *[0] * (bucket.num_tokens - rows)]
    assert seen.kv_slots.tolist()[rows:] == [-1] * (bucket.num_tokens - rows)
    assert seen.slots.tolist() == [*range(10, 10 + count), *[-1] * (bucket.num_seqs + 1 - count)]
    assert seen.starts.tolist()[:count] == list(range(count))
    assert seen.bounds.tolist() == [0, *np.cumsum(lengths), *[rows] * (bucket.num_seqs + 1 - count)]
    assert seen.logits_rows.tolist()[:count] == [end - 1 for end in np.cumsum(lengths)]
    for size, packed in tiles.items():
        assert rows_of_tiles(packed, size) == list(range(rows))
        before = [seen.starts[s].item() + f for s, f in packed.tiles.tolist() if s >= 0]
        assert before == sorted(before, reverse=True), "the longest come first"
    wanted = [[seq, i] for seq, n in enumerate(lengths) for i in range(-(-n // 64))]
    chunks, offsets = seen.chunks.tolist(), seen.chunk_offsets.tolist()
    assert chunks[: len(wanted)] == wanted
    assert chunks[len(wanted) :] == [[bucket.num_seqs, 0]] * (len(chunks) - len(wanted))
    assert [wanted.index([seq, 0]) for seq in range(count)] == offsets[:count]
    assert set(offsets[count:]) == {len(wanted)}


def test_all_places_are_aligned_alike_in_all_buckets() -> None:
    """Else kernels are compiled anew, when a bucket is first seen."""
    buffers = PromptBuffers(Bucket(333, 5), 3, CPU)
    for bucket in (Bucket(333, 5), Bucket(65, 2)):
        seen = buffers.bucket(bucket)
        views = [seen.token_ids, seen.slots, seen.bounds, seen.chunks, seen.chunk_offsets]
        views += [seen.packed(size).tiles for size in (9, 32)]
        offsets = {(view.data_ptr() - buffers.numbers.data_ptr()) % 16 for view in views}
        assert offsets == {0}


@pytest.mark.parametrize("most_seqs", [1, 2, 8, 9, 128, 300])
@pytest.mark.parametrize("most_tokens", [1, 3, 64, 65, 100, 2048, 8192, 16384])
def test_buckets_rise_and_the_last_takes_every_step(most_tokens: int, most_seqs: int) -> None:
    buckets = prompt_buckets(most_tokens, most_seqs)
    assert list(buckets) == sorted(set(buckets)) and len(buckets) < 40
    assert buckets[-1] == (min(most_tokens, 8192), min(most_seqs, 128))
    # What padding costs at most: as much as the step itself from 64 tokens on.
    for tokens in range(65, min(most_tokens, 8192), 61):
        size = next(size for size, seqs in buckets if size >= tokens)
        assert size < 2 * tokens
