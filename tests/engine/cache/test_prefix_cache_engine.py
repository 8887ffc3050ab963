"""The prefix cache under a real model: what is reused is right, what is not is explained."""

import random

import pytest
import torch

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.core.errors import RequestError
from support.oracle import Oracle, agrees
from support.poison import poison_free_memory

VOCAB = 320
NEW_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)


def ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def engine(model, *, slots: int = 4, budget: int = 2048, **cache) -> LLM:
    options = {
        "max_num_seqs": slots,
        "max_num_batched_tokens": budget,
        "cpu_memory": "32MiB",
    }
    return LLM(model, engine=options, cache={"block_size": 16, "num_blocks": 200, **cache})


@pytest.fixture(scope="module")
def oracle(tiny_model) -> Oracle:
    return Oracle(tiny_model, NEW_TOKENS)


def ask(llm: LLM, *prompts: list[int], params: SamplingParams = GREEDY) -> list:
    poison_free_memory(llm)
    outs = llm.generate(list(prompts), params)
    llm.check_integrity()
    return outs


def right(out, prompt: list[int], oracle: Oracle) -> bool:
    assert out.error is None
    return agrees(out.outputs[0], oracle(prompt))


def snapshots_of(llm: LLM, text: list[int]) -> dict[int, list[torch.Tensor]]:
    """Position -> a copy of the snapshot stored there, for beginnings of `text`."""
    tensors = llm._loop.runner.pool.conv_snapshots + llm._loop.runner.pool.recurrent_snapshots
    found = {}
    for node in llm._cache.walk():
        before, path = node, []
        while before.parent is not None:
            before, path = before.parent, [*before.token_ids, *path]
        if node.snapshot is not None and path == text[: node.end]:
            found[node.end] = [tensor[node.snapshot].clone() for tensor in tensors]
    return found


# -- B: wrong answers ----------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [16, 64])
def test_b1_b9_b12_every_remainder_sent_twice(tiny_model, oracle, block_size) -> None:
    text, left = ids(1, 130), 0
    with engine(tiny_model, block_size=block_size) as llm:
        for length in range(64, 130):
            llm.clear_cache()
            cold, warm = (ask(llm, text[:length])[0] for _ in range(2))
            left += not right(cold, text[:length], oracle)
            left += not right(warm, text[:length], oracle)
            assert warm.usage.cached_tokens == (length - 1) // 64 * 64
            # Alone, and from the boundary on, a repeat does the very arithmetic of the first time.
            pairs = zip(cold.outputs[0].logprobs, warm.outputs[0].logprobs, strict=True)
            assert all(a.sampled == b.sampled for a, b in pairs)
    assert left == 0


def test_b3_b4_every_snapshot_is_the_state_after_its_position(tiny_model) -> None:
    rng = random.Random(5)
    for _ in range(6):
        text = ids(rng.randrange(1000), 300)
        budget = rng.choice([3, 7, 50, 63, 64, 65, 129, 2048])
        with engine(tiny_model, budget=budget) as llm:
            for length in (rng.randint(65, 300), 300, rng.randint(65, 300)):
                ask(llm, text[:length])
            found = snapshots_of(llm, text)
        assert len(found) >= 2
        with LLM(
            tiny_model, engine={"max_num_batched_tokens": 1}, cache={"prefix_cache": False}
        ) as one:
            one.add_request(text, GREEDY)
            for position in range(1, max(found) + 1):
                one.step()
                if position not in found:
                    continue
                (request,) = one._scheduler.running
                pool = one._loop.runner.pool
                expected = [t[request.slot] for t in pool.conv + pool.recurrent]
                for state, wanted in zip(found[position], expected, strict=True):
                    torch.testing.assert_close(state, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("length", [15, 16, 17, 63, 64, 65])
def test_b6_an_answer_that_crosses_boundaries_can_be_gone_on_from(tiny_model, length) -> None:
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    oracle, prompt = Oracle(tiny_model, 200), ids(2, length)
    with engine(tiny_model) as llm:
        out = ask(llm, prompt, params=long)[0]
        assert right(out, prompt, oracle)
        # The next turn begins with all of this one.
        answer = out.outputs[0].token_ids
        turn = prompt + answer + ids(3, 20)
        out = ask(llm, turn)[0]
        assert out.usage.cached_tokens == (length + 199) // 64 * 64
        assert right(out, turn, Oracle(tiny_model, NEW_TOKENS))
        decoded = [end for end in snapshots_of(llm, turn) if length < end < length + 199]
        assert len(decoded) <= 2, "an answer keeps its last snapshot only"


def test_b8_b9_a_fact_in_the_prompt_survives_three_requests() -> None:
    facts = " ".join(f"k{i} = {i * 37 % 100}" for i in range(16))
    chat = [
        {"role": "user", "content": facts},
        {"role": "assistant", "content": "OK."},
        {"role": "user", "content": "What is k7?"},
    ]
    with LLM("demo", engine={"max_num_seqs": 2}) as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        outs = [llm.generate([{"messages": chat}], params)[0] for _ in range(3)]
    assert [out.usage.cached_tokens > 0 for out in outs] == [False, True, True]
    assert len({tuple(out.outputs[0].token_ids) for out in outs}) == 1 and "59" in outs[0].text


def test_b11_prompts_below_a_block_leave_nothing_that_later_ones_could_find(
    tiny_model, oracle
) -> None:
    text = ids(17, 130)
    with engine(tiny_model) as llm:
        assert ask(llm, [])[0].error.code == "empty_prompt"
        for length in (1, 2, 15):
            assert right(ask(llm, text[:length])[0], text[:length], oracle)
        assert [(s.start, s.end) for s in llm.cache_report().segments] == [(0, 16)]
        (out,) = ask(llm, text)
        assert right(out, text, oracle) and out.usage.cached_tokens == 0
        assert all(s.start < s.end == s.start + 16 * s.blocks for s in llm.cache_report().segments)


def test_b15_b16_a_prompt_cut_short_and_ended_otherwise(tiny_model, oracle) -> None:
    text = ids(4, 200)
    with engine(tiny_model) as llm:
        ask(llm, text)
        for cut in (1, 5, 10, 17, 64, 72, 136):
            prompt = text[: 200 - cut] + ids(cut, 10)
            (out,) = ask(llm, prompt)
            assert right(out, prompt, oracle)
            assert out.usage.cached_tokens <= out.usage.kv_matched <= 200 - cut
            assert out.usage.cached_tokens == out.usage.state_at


def test_snapshots_are_never_written_again(tiny_model) -> None:
    text = ids(6, 260)
    with engine(tiny_model) as llm:
        ask(llm, text[:100])
        ask(llm, text[:200])
        before = snapshots_of(llm, text)
        for length in (200, 193, 199, 260, 230, 200):
            ask(llm, text[:length] + ids(length, 9))
        after = snapshots_of(llm, text)
        assert len(before) >= 2 and len(after) > len(before)
        for position, tensors in before.items():
            for old, new in zip(tensors, after[position], strict=True):
                assert torch.equal(old, new)


def test_a13_nan_reaches_no_later_user_of_the_cache(tiny_model, oracle) -> None:
    text = ids(7, 190)
    with engine(tiny_model) as llm:
        poison_free_memory(llm)
        llm.add_request(text, GREEDY)
        outs = llm.step()
        (request,) = llm._scheduler.running
        for tensor in llm._loop.runner.pool.recurrent:
            tensor[request.slot] = float("nan")
        while llm.has_unfinished:
            outs = llm.step()
        assert outs[0].error.code == "non_finite_logits"
        llm.check_integrity()
        assert llm.stats().blocks_cached == 0
        (out,) = ask(llm, text)
        assert right(out, text, oracle)


def test_a_failing_step_forgets_states_that_were_to_be_restored_in_it(
    tiny_model, oracle, monkeypatch
) -> None:
    prompts = [ids(8, 100), ids(9, 100), ids(10, 100)]
    with engine(tiny_model, budget=40, slots=3) as llm:
        for prompt in prompts:
            ask(llm, prompt)
        run, failed = llm._loop.runner.run, []

        def fail_once(batch, awaited):
            if batch.restores and not failed:
                failed.append(batch)
                poison_free_memory(llm)  # and nothing was copied
                raise RuntimeError("planted")
            return run(batch, awaited)

        monkeypatch.setattr(llm._loop.runner, "run", fail_once)
        outs = llm.generate(prompts, GREEDY)
        assert len(failed[0].restores) > len(failed[0].sequences)
        for out, prompt in zip(outs, prompts, strict=True):
            assert right(out, prompt, oracle)


def test_requests_that_fail_run_again_without_the_cache(tiny_model, oracle, monkeypatch) -> None:
    prompts = [ids(16, 100), ids(17, 100)]
    with engine(tiny_model) as llm:
        ask(llm, *prompts)
        run = llm._loop.runner.run

        def fail_on_reuse(batch, awaited):
            if batch.restores:
                raise RuntimeError("planted")
            return run(batch, awaited)

        monkeypatch.setattr(llm._loop.runner, "run", fail_on_reuse)
        for out, prompt in zip(ask(llm, *prompts), prompts, strict=True):
            assert right(out, prompt, oracle)


# -- C: uselessness ------------------------------------------------------------------------------


def test_c1_a_short_shared_beginning_is_reused(tiny_model, oracle) -> None:
    shared = ids(11, 200)
    prompts = [shared + ids(20 + i, 30) for i in range(3)]
    with engine(tiny_model) as llm:
        outs = [ask(llm, prompt)[0] for prompt in prompts]
        assert outs[2].usage.cached_tokens >= 192
        assert all(right(out, p, oracle) for out, p in zip(outs, prompts, strict=True))


def test_c2_c13_every_miss_has_a_reason(tiny_model) -> None:
    with engine(tiny_model) as llm:
        for prompt in (ids(1, 30), ids(1, 200), ids(1, 100) + ids(2, 100), ids(2, 65)):
            usage = ask(llm, prompt)[0].usage
            best = (len(prompt) - 1) // 64 * 64
            assert (usage.miss_reason is None) == (usage.cached_tokens == best > 0)
    with engine(tiny_model, prefix_cache=False) as llm:
        assert {ask(llm, ids(1, 100))[0].usage.miss_reason for _ in range(2)} == {"disabled"}


def test_c3_prompts_that_arrive_together_compute_their_beginning_once(tiny_model, oracle) -> None:
    system = ids(12, 200)
    prompts = [system + ids(30 + i, 25) for i in range(10)]
    with engine(tiny_model, slots=10) as llm:
        outs = ask(llm, *prompts)
        assert [out.usage.cached_tokens for out in outs] == [0] + [192] * 9
        assert llm.stats().prompt_tokens_computed == 225 + 9 * 33
        for place in (0, 1, 9):
            assert right(outs[place], prompts[place], oracle)


def test_the_outputs_of_one_request_compute_its_prompt_once(tiny_model) -> None:
    with engine(tiny_model, slots=8) as llm:
        params = SamplingParams(temperature=1, seed=5, max_tokens=6, ignore_eos=True, n=5)
        (out,) = ask(llm, ids(13, 150), params=params)
        stats = llm.stats()
        assert stats.prompt_tokens_computed == 150 + 4 * 22
        assert (stats.cached_tokens, stats.restored_tokens) == (0, 4 * 128)
        assert out.usage.cached_tokens == 0
        (again,) = ask(llm, ids(13, 150), params=params)
        assert again.usage.cached_tokens == 128
        assert [o.token_ids for o in again.outputs] == [o.token_ids for o in out.outputs]


def test_a_leader_that_is_aborted_holds_nobody_up(tiny_model, oracle) -> None:
    system = ids(14, 300)
    prompts = [system + ids(50 + i, 10) for i in range(3)]
    with engine(tiny_model, budget=32) as llm:
        first, *others = (llm.add_request(prompt, GREEDY) for prompt in prompts)
        for _ in range(3):
            llm.step()
        llm.abort(first)
        finished = {}
        while llm.has_unfinished:
            finished |= {out.request_id: out for out in llm.step() if out.finished}
            llm.check_integrity()
        for request_id, prompt in zip(others, prompts[1:], strict=True):
            assert right(finished[request_id], prompt, oracle)


def test_c9_without_reuse_the_cache_computes_nothing_more_and_copies_little(tiny_model) -> None:
    # What that costs in time is for benchmarks/prefix_cache.py: a few percent drown in a test run's noise.
    prompts, work = [ids(300 + i, 60 + 47 * i) for i in range(12)], []
    for on in (True, False):
        with engine(tiny_model, budget=128, prefix_cache=on) as llm:
            run, batches = llm._loop.runner.run, []

            def counted(batch, awaited, run=run, batches=batches):
                batches.append(batch)
                return run(batch, awaited)

            llm._loop.runner.run = counted
            ask(llm, *prompts)
            stats = llm.stats()
        saved = sum(s.snapshot is not None for batch in batches for s in batch.sequences)
        restored = sum(len(batch.restores) for batch in batches)
        work.append((stats.prompt_tokens_computed, stats.num_steps, saved, restored))
    (tokens, steps, saved, restored), (tokens_off, steps_off, *nothing) = work
    assert tokens == tokens_off == sum(map(len, prompts)) and nothing == [0, 0]
    assert restored == 0 and 0 < saved <= 2 * len(prompts)
    assert steps <= steps_off + saved, (
        "a prompt is cut where it leaves a snapshot, and nowhere else"
    )


def test_c7_chats_in_turns_go_on_from_their_answers_with_few_snapshots(tiny_model) -> None:
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    found = {}
    for memory in ("320KiB", "4MiB"):
        with engine(tiny_model, snapshot_memory=memory, num_blocks=400) as llm:
            chats = [ids(i, 100) for i in range(6)]
            for turn in range(4):
                for i, chat in enumerate(chats):
                    (out,) = ask(llm, chat, params=params)
                    chats[i] = chat + out.outputs[0].token_ids + ids(100 * turn + i, 100)
            total = llm.stats().snapshots_total
            found[total] = (llm.stats().cached_tokens, chats)
    (few, (saved, chats)), (_, (best, same)) = sorted(found.items())
    assert 7 <= few <= 10, "more than one a chat, fewer than two"
    assert saved >= 0.85 * best > 0 and chats == same


def test_c12_snapshots_stay_within_their_budget(tiny_model) -> None:
    with engine(tiny_model, snapshot_memory="40KiB") as llm:
        pool = llm._loop.runner.pool
        held = sum(
            t.numel() * t.element_size() for t in pool.conv_snapshots + pool.recurrent_snapshots
        )
        assert 0 < held <= 40 * 1024
        for i in range(30):
            ask(llm, ids(i, 140))
        assert llm.stats().snapshots_used == llm.stats().snapshots_total < 10
        llm.clear_cache()
        assert llm.stats().snapshots_used == llm.stats().blocks_cached == 0


def test_c14_totals_are_the_sums_of_what_requests_say(tiny_model) -> None:
    rng, usages = random.Random(3), []
    with engine(tiny_model, snapshot_memory="60KiB", num_blocks=60) as llm:
        for round_ in range(8):
            base = ids(rng.randrange(3), 200)
            prompts = [base[: rng.randint(1, 200)] + ids(100 * round_ + i, 20) for i in range(5)]
            usages += [out.usage for out in ask(llm, *prompts)]
        stats = llm.stats()
    assert stats.prompt_tokens == sum(u.prompt_tokens for u in usages)
    assert stats.cached_tokens == sum(u.cached_tokens for u in usages) > 0
    assert stats.kv_matched_tokens == sum(u.kv_matched for u in usages)
    assert sum(stats.misses.values()) == sum(u.miss_reason is not None for u in usages)
    computed = stats.prompt_tokens - stats.cached_tokens
    assert stats.num_preemptions > 0 or stats.prompt_tokens_computed == computed


def test_a_preempted_request_comes_back_through_the_cache(tiny_model) -> None:
    prompts = [ids(40 + i, 90) for i in range(4)]
    params = GREEDY.model_copy(update={"max_tokens": 60})
    oracle = Oracle(tiny_model, 60)
    with engine(tiny_model, num_blocks=26, slots=4) as llm:
        outs = ask(llm, *prompts, params=params)
        stats = llm.stats()
        assert stats.num_preemptions > 0
        assert (stats.cached_tokens, stats.restored_tokens > 0) == (0, True)
        assert all(right(out, p, oracle) for out, p in zip(outs, prompts, strict=True))


# -- F: memory -----------------------------------------------------------------------------------


def test_f4_a_cache_full_of_snapshots_in_use_holds_nobody_up(tiny_model, oracle) -> None:
    # What a step may cost at the most, and why that is not told in seconds: test_step_cost.py.
    with engine(tiny_model, num_blocks=60, budget=128, snapshot_memory="120KiB") as llm:
        for i in range(10):
            ask(llm, ids(i, 200))
        assert llm.stats().snapshots_used == llm.stats().snapshots_total
        before = llm.stats().prompt_tokens_computed
        warm = [ids(9 - i, 200) + ids(80 + i, 5) for i in range(2)]
        prompts = [*warm, *(ids(60 + i, 550) for i in range(3))]
        poison_free_memory(llm)
        requests = [llm.add_request(prompt, GREEDY) for prompt in prompts]
        with pytest.raises(RequestError, match="960"):
            llm.add_request(ids(70, 1000), GREEDY)
        finished = {}
        while llm.has_unfinished:
            so_far = llm.stats().prompt_tokens_computed
            finished |= {out.request_id: out for out in llm.step() if out.finished}
            assert llm.stats().prompt_tokens_computed - so_far <= 128
            llm.check_integrity()
        outs = [finished[request] for request in requests]
        assert [out.usage.cached_tokens for out in outs] == [192, 192, 0, 0, 0]
        # All of the large ones once, of the others what is new, and a chunk or two after preemptions.
        computed = llm.stats().prompt_tokens_computed - before
        assert 0 <= computed - (3 * 550 + 2 * 13) <= 200
        for out, prompt in zip(outs, prompts, strict=True):
            assert right(out, prompt, oracle)


def test_f10_512_prompts_with_one_beginning_in_a_small_pool(tiny_model, oracle) -> None:
    system = ids(15, 70)
    rng = random.Random(0)
    tails = [ids(200 + i, 1 + 2 * i) for i in range(10)]
    prompts = [system + rng.choice(tails) for _ in range(512)]
    params = GREEDY.model_copy(update={"max_tokens": 4})
    with engine(tiny_model, num_blocks=40, slots=40) as llm:
        outs = ask(llm, *prompts, params=params)
        assert sum(not right(o, p, oracle) for o, p in zip(outs, prompts, strict=True)) == 0
        assert llm.stats().prompt_tokens_computed < 512 * 30


def test_500_requests_with_random_aborts_leave_every_counter_where_it_was(tiny_model) -> None:
    rng = random.Random(9)
    with engine(tiny_model, num_blocks=50, snapshot_memory="60KiB") as llm:
        live: list[str] = []
        for i in range(500):
            base = ids(rng.randrange(4), 120)
            prompt = base[: rng.randint(1, 120)] + ids(i, rng.randint(0, 10))
            params = GREEDY.model_copy(update={"max_tokens": rng.randint(1, 5)})
            live.append(llm.add_request(prompt, params))
            if rng.random() < 0.3:
                llm.abort(live.pop(rng.randrange(len(live))))
            if rng.random() < 0.6:
                llm.step()
            if i % 10 == 0:
                llm.check_integrity()
        while llm.has_unfinished:
            llm.step()
        llm.check_integrity()
        stats = llm.stats()
        assert (stats.kv_blocks_used, stats.state_slots_used) == (0, 0)
        llm.clear_cache()
        llm.check_integrity()
        blocks, states = llm._cache.blocks, llm._cache.states
        assert blocks.num_free == blocks.num_blocks
        assert (states.num_free, states.num_stored) == (states.num_slots, 0)
