"""State of sequences in the model: where it begins, whose it is, and that nothing else touches it."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from support.packed_runner import PackedRunner, Row, load_model
from support.tiny_checkpoint import (
    official_dtypes,
    random_tensors,
    tiny_config,
    write_checkpoint,
    write_tiny_checkpoint,
)
from support.transformers_oracle import TransformersOracle

TOLERANCE = 2e-4
NAN = float("nan")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("state"), seed=7)


@pytest.fixture(scope="module")
def model(path: Path) -> MiniQwenForCausalLM:
    return load_model(path)


def random_ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(count)]


def snapshot(runner: PackedRunner) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in runner.pool.tensors()]


def state_of(runner: PackedRunner, row: Row) -> list[torch.Tensor]:
    return [tensor[row.slot] for tensor in (*runner.pool.conv, *runner.pool.recurrent)]


def test_e3_prefill_equals_prefill_and_decode(model: MiniQwenForCausalLM) -> None:
    """n tokens at once against n - 1 and one more, for n = 1 to 130, all sequences packed."""
    ids = random_ids(130)
    whole = PackedRunner(model, num_slots=131, num_blocks=800)
    rows = [whole.add(ids[:n]) for n in range(1, 131)]
    whole.step(*((row, len(row.token_ids)) for row in rows), decode_singles=False)
    split = PackedRunner(model, num_slots=131, num_blocks=800, seed=1)
    others = [split.add(ids[:n]) for n in range(1, 131)]
    split.step(*((row, len(row.token_ids) - 1) for row in others[1:]), decode_singles=False)
    split.step(*((row, 1) for row in others))
    for row, other in zip(rows, others, strict=True):
        torch.testing.assert_close(other.all_logits, row.all_logits, rtol=0, atol=TOLERANCE)
        for a, b in zip(state_of(whole, row), state_of(split, other), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("decode_singles", [True, False])
def test_a2_position_0_means_state_zero(
    model: MiniQwenForCausalLM, count: int, decode_singles: bool
) -> None:
    """A slot that held another sequence, then NaN: also where the first chunk is a single token."""
    ids = random_ids(count)
    runner = PackedRunner(model)
    clean = runner.run(ids).all_logits
    used = runner.run(random_ids(70, seed=1))
    runner.release(used)
    again = runner.add(ids)
    assert again.slot == used.slot
    runner.step((again, count), decode_singles=decode_singles)
    torch.testing.assert_close(again.all_logits, clean, rtol=0, atol=2e-5)
    runner.release(again)
    runner.pool.fill_(NAN)
    poisoned = runner.add(ids)
    runner.step((poisoned, count), decode_singles=decode_singles)
    torch.testing.assert_close(poisoned.all_logits, clean, rtol=0, atol=2e-5)


def test_a_step_writes_its_own_slots_and_rows_only(model: MiniQwenForCausalLM) -> None:
    """Everything that no sequence owns is NaN before and after every step, the sinks included."""
    runner = PackedRunner(model)
    rows = [runner.add(random_ids(n, seed=n)) for n in (5, 20, 33, 64)]
    for count in (1, 4, 1, 30):
        runner.step(
            *((row, min(count, left)) for row in rows if (left := len(row.token_ids) - row.done))
        )
        slots = torch.ones(runner.pool.num_slots + 1, dtype=torch.bool)
        slots[[row.slot for row in rows]] = False
        for tensor in (*runner.pool.conv, *runner.pool.recurrent):
            assert tensor[slots].isnan().all()
            assert tensor[~slots].isfinite().all()
        positions = torch.ones(runner.pool.num_blocks + 1, 16, dtype=torch.bool)
        for row in rows:
            for p in range(row.done):
                positions[row.blocks[p // 16], p % 16] = False
        for tensor in (*runner.pool.keys, *runner.pool.values):
            assert tensor[positions].isnan().all()
            assert tensor[~positions].isfinite().all()


@pytest.mark.parametrize("num_seqs", [2, 5, 8, 9, 16, 33])
def test_rows_hardly_depend_on_their_neighbours(model: MiniQwenForCausalLM, num_seqs: int) -> None:
    """The same sequence alone and in a batch, decoding: but for the last bits."""
    ids = random_ids(12)
    alone = PackedRunner(model).run(ids, 5, 1).all_logits
    runner = PackedRunner(model, num_slots=40, num_blocks=80)
    row = runner.add(ids)
    others = [runner.add(random_ids(12, seed=i)) for i in range(1, num_seqs)]
    runner.step((row, 5))
    for other in others:
        runner.step((other, 5))
    for _ in range(7):
        runner.step(*((other, 1) for other in others), (row, 1))
    torch.testing.assert_close(row.all_logits, alone, rtol=0, atol=1e-5)


def test_the_order_of_the_batch_does_not_matter(model: MiniQwenForCausalLM) -> None:
    results = []
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
        runner = PackedRunner(model, seed=4)
        rows = [runner.add(random_ids(30 + i, seed=i)) for i in range(5)]
        runner.step(*((rows[i], 20 + i) for i in order))
        for _ in range(5):
            runner.step(*((rows[i], 1) for i in order))
        results.append([row.all_logits for row in rows] + snapshot(runner))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("what", ["recurrent", "conv", "keys", "values"])
def test_a13_a_broken_sequence_stays_alone(model: MiniQwenForCausalLM, what: str) -> None:
    """NaN in one sequence's state or KV: the others in its steps are the same to the last bit."""
    results = []
    for broken in (False, True):
        runner = PackedRunner(model, seed=5)
        rows = [runner.add(random_ids(40, seed=i)) for i in range(4)]
        runner.step(*((row, 10) for row in rows))
        if broken:
            for tensor in getattr(runner.pool, what):
                where = rows[1].slot if what in ("recurrent", "conv") else rows[1].blocks[0]
                tensor[where] = NAN
        for count in (1, 7, 1):
            runner.step(*((row, count) for row in rows))
        assert rows[1].all_logits[10:].isnan().any() == broken
        results.append([rows[i].all_logits for i in (0, 2, 3)])
    for clean, beside in zip(*results, strict=True):
        assert torch.equal(clean, beside)


@pytest.mark.parametrize("what", ["recurrent", "conv", "values"])
def test_a_lost_state_would_show(model: MiniQwenForCausalLM, what: str) -> None:
    """The negative control of all tests above: with these weights a zeroed state moves the logits."""
    runner = PackedRunner(model)
    row = runner.add(random_ids(41))
    runner.step((row, 40))
    kept = snapshot(runner)
    runner.step((row, 1))
    for tensor, before in zip(runner.pool.tensors(), kept, strict=True):
        tensor.copy_(before)
    row.done -= 1
    for tensor in getattr(runner.pool, what):
        tensor[row.slot if what != "values" else row.blocks] = 0
    runner.step((row, 1))
    assert (row.logits[-1] - row.logits[-2]).abs().max() > 0.1


def test_only_the_wanted_logits_are_returned(model: MiniQwenForCausalLM) -> None:
    runner = PackedRunner(model)
    rows = [runner.add(random_ids(30, seed=i)) for i in range(3)]
    batch = runner._input([(row, 30) for row in rows], 0)
    with torch.inference_mode():
        everything = model(batch, runner.pool)
        for wanted in ([29, 89], [], [5]):
            some = dataclasses.replace(batch, logits_rows=torch.tensor(wanted, dtype=torch.long))
            logits = model(some, runner.pool)
            assert logits.shape == (len(wanted), 320)
            torch.testing.assert_close(logits, everything[wanted], rtol=0, atol=2e-5)


def test_a_bf16_state_pool_is_close(model: MiniQwenForCausalLM) -> None:
    ids = random_ids(60)
    exact = PackedRunner(model).run(ids, 30, 1).all_logits
    runner = PackedRunner(model, state_dtype=torch.bfloat16)
    row = runner.run(ids, 30, 1)
    assert runner.pool.recurrent[0].dtype == torch.bfloat16
    assert row.all_logits.isfinite().all()
    torch.testing.assert_close(row.all_logits[:30], exact[:30], rtol=0, atol=2e-5)
    assert 0 < (row.all_logits - exact).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_fp32_as_transformers_is(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    config = tiny_config()
    path = write_checkpoint(tmp_path, config, official_dtypes(random_tensors(config, seed=9)))
    ids = random_ids(70)
    exact = TransformersOracle(path).logits(ids)
    theirs = (TransformersOracle(path, dtype).logits(ids).float() - exact).abs()
    for chunks in ((70,), (40, 1)):
        row = PackedRunner(load_model(path, dtype)).run(ids, *chunks)
        ours = (row.all_logits.float() - exact).abs()
        assert row.all_logits.dtype == dtype
        assert ours.mean() < 1.5 * theirs.mean()
        assert ours.max() < 1.5 * theirs.max()
