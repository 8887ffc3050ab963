"""Handlers that raise wait while signals are held; and an engine interrupted anywhere stays whole."""

import random
import signal
import threading
from collections.abc import Iterator

import pytest

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.engine.deferred_signals import DeferredSignals

PROMPTS = [[7] * 10, [*range(100)], [*range(128), 5], [*range(128), 6], [9] * 70]


class Stopped(BaseException):
    """What the handler of these tests raises."""


@pytest.fixture
def raising() -> Iterator[None]:
    """SIGALRM raises, as Ctrl-C does in a terminal."""

    def stop(number: int, frame: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("raising")
class TestHeldSignals:
    def test_a_handler_runs_when_the_block_has_ended(self) -> None:
        mine, held, done = signal.getsignal(signal.SIGALRM), DeferredSignals(), []

        def work() -> None:
            with held:
                with held:
                    signal.raise_signal(signal.SIGALRM)
                done.append("inner")
                signal.raise_signal(signal.SIGALRM)
                done.append("outer")

        with pytest.raises(Stopped):
            work()
        assert done == ["inner", "outer"]
        assert signal.getsignal(signal.SIGALRM) is mine
        with held:
            pass  # what came at the same time is not told later

    def test_released_it_runs_at_once(self) -> None:
        held = DeferredSignals()
        with held:
            signal.raise_signal(signal.SIGALRM)
            with pytest.raises(Stopped):
                held.release()
            with pytest.raises(Stopped):
                signal.raise_signal(signal.SIGALRM)
            held.hold()
            held.release()
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGALRM)

    def test_a_handler_that_was_set_within_stays(self) -> None:
        with DeferredSignals():
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_IGN

    def test_signals_without_a_handler_in_python_are_left_alone(self) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        with DeferredSignals():
            assert signal.getsignal(signal.SIGALRM) == signal.SIG_IGN

    def test_other_threads_hold_nothing(self) -> None:
        mine, found = signal.getsignal(signal.SIGALRM), []

        def look() -> None:
            with DeferredSignals():
                found.append(signal.getsignal(signal.SIGALRM))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert found == [mine]


@pytest.mark.usefixtures("raising")
def test_an_engine_interrupted_anywhere_stays_whole(tiny_model) -> None:
    """Real signals at random times; the same engine goes on. Without holding, 1 in 70 leaves it broken."""
    rng = random.Random(0)
    engine = {"cpu_memory": "64MiB", "max_num_seqs": 3, "max_model_len": 320}
    cache = {"block_size": 16, "num_blocks": 60}
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 2, 6, 3, 2)]
    with LLM(tiny_model, engine=engine, cache=cache) as llm:
        expected = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)]
        interrupted = 0
        for _ in range(160):
            if rng.random() < 0.3:
                llm.clear_cache()
            chosen = [rng.randrange(len(PROMPTS)) for _ in range(3)]
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.random() * 0.03 + 1e-6)
                llm.generate([PROMPTS[i] for i in chosen], [params[i] for i in chosen])
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Stopped:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert not llm.has_unfinished
            llm.check_integrity()
            stats = llm.stats()
            assert (stats.kv_blocks_used, stats.state_slots_used) == (0, 0)
            i = rng.randrange(len(PROMPTS))
            assert llm.generate(PROMPTS[i], params[i])[0].outputs[0].token_ids == expected[i]
    assert interrupted


@pytest.mark.usefixtures("raising")
def test_what_a_step_found_outlives_an_interrupt_at_its_end(
    tiny_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(tiny_model, engine={"cpu_memory": "64MiB", "max_model_len": 320}) as llm:
        expected = llm.generate([7] * 10, params)[0]
        collect = llm._loop.collect

        def interrupted(flight):
            outputs = collect(flight)
            signal.raise_signal(signal.SIGALRM)
            return outputs

        monkeypatch.setattr(llm._loop, "collect", interrupted)
        llm.add_request([7] * 10, params)
        for _ in range(4):
            with pytest.raises(Stopped):
                llm.step()
        monkeypatch.undo()
        found = llm.step()
        assert not llm.has_unfinished
    assert len(found) == 4 and found[-1].finished
    assert "".join(out.text_delta for out in found) == expected.text
