"""Opening an engine, and what Python's garbage collector sees of it."""

import gc
from collections.abc import Iterator

import pytest

from minivllm_cli.engine import open_engine
from minivllm_engine import EngineConfig
from minivllm_engine import llm as llm_module
from minivllm_engine.core.errors import CapacityError
from minivllm_engine.engine.prepare import prepare


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_does_not_look_at_what_was_loaded(tiny_model) -> None:
    prepared = prepare(tiny_model, EngineConfig.create())
    with open_engine(prepared) as llm:
        assert gc.isenabled()
        assert gc.get_freeze_count() > 10_000
        assert not any(one is llm for one in gc.get_objects())


def test_what_a_closed_engine_leaves_is_collected_when_the_next_one_opens(tiny_model) -> None:
    class Garbage:
        gone = False

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            Garbage.gone = True

    prepared = prepare(tiny_model, EngineConfig.create())
    garbage = Garbage()
    open_engine(prepared).close()
    del garbage
    gc.collect()
    assert not Garbage.gone  # it was alive at the end of the start, and so is not looked at
    open_engine(prepared).close()
    assert Garbage.gone


def test_a_start_that_fails_leaves_the_collector_as_it_was(tiny_model, monkeypatch) -> None:
    def model_runner(*args, **options) -> None:
        raise CapacityError("no room")

    monkeypatch.setattr(llm_module, "ModelRunner", model_runner)
    with pytest.raises(CapacityError):
        open_engine(prepare(tiny_model, EngineConfig.create()))
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
