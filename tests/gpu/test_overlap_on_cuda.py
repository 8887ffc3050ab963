"""Requests that come, end and fail while steps are in flight. Tiny model in fp32, graph and eager, prefix
cache on, 8 slots, so few blocks that requests wait.
"""

from collections.abc import Iterator

import pytest

from minivllm_engine import LLM
from support.device_engine import Rig
from support.engine_checks import overlap
from support.on_card import needs_card

pytestmark = needs_card


@pytest.fixture(scope="module")
def llm(tiny_model, rig: Rig) -> Iterator[LLM]:
    with rig.engine(tiny_model, num_blocks=20) as llm:
        assert llm._loop.overlap
        yield llm


def test_random_arrivals_aborts_and_stops(llm: LLM) -> None:
    overlap.check_random_schedules(llm, schedules=24, requests=14)
    assert llm.stats().num_preemptions > 0


def test_stop_strings(llm: LLM) -> None:
    overlap.check_stop_strings(llm)


def test_a_step_that_fails_behind_another_one(llm: LLM, monkeypatch) -> None:
    overlap.check_failures_in_flight(llm, monkeypatch)
