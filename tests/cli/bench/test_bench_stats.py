"""Percentiles, outliers, intervals; and what is known of a GPU."""

import os
from collections.abc import Iterator

import pytest

from minivllm_cli.bench.document import GpuWatch
from minivllm_cli.bench.stats import describe, interval_of_change, outliers, percentile
from minivllm_engine.memory.devices import GpuState


def test_percentiles_are_interpolated() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert percentile(values, 0) == 1.0
    assert percentile(values, 50) == 2.5
    assert percentile(values, 100) == 4.0
    assert percentile([7.0], 99) == 7.0
    found = describe(values, (50.0, 99.9), scale=1000)
    assert (found["p50"], found["mean"], found["n"]) == (2500.0, 2500.0, 4)
    assert found["p99.9"] == pytest.approx(3997)
    assert describe([], (50.0,), scale=1) == {}


def test_outliers() -> None:
    assert outliers([100.0, 101.0, 99.0, 100.0, 40.0]) == [4]
    assert outliers([30.0, 100.0, 101.0, 99.0, 100.0]) == [0]
    assert outliers([100.0, 101.0, 99.0, 102.0, 98.0]) == []
    assert outliers([100.0, 100.0, 100.0, 100.0, 100.4]) == []  # all but equal is no outlier
    assert outliers([10.0, 100.0, 101.0]) == [0]
    assert outliers([80.0, 100.0, 101.0]) == []
    assert outliers([]) == []


def test_the_interval_is_that_of_the_medians_and_always_the_same() -> None:
    base = [1.0, 2.0, 3.0, 4.0, 5.0]
    found = interval_of_change(base, [value * 10 for value in base])
    assert found == interval_of_change(base, [value * 10 for value in base])
    assert found is not None and found[0] < 9 < found[1]
    assert interval_of_change([2.0] * 5, [3.0] * 5) == (0.5, 0.5)
    assert interval_of_change(base[:4], base) is None
    assert interval_of_change(base, base[:4]) is None


def watch(*states: GpuState | None) -> GpuWatch:
    left: Iterator[GpuState | None] = iter(states)
    return GpuWatch(lambda: next(left))


def test_a_clock_that_drops_and_other_processes_are_warned_of() -> None:
    own = os.getpid()
    before = GpuState(300, 700.0, 40, frozenset({own}))
    gpu = watch(
        before,
        GpuState(1980, 700.0, 60, frozenset({own})),
        GpuState(1500, 700.0, 80, frozenset({own, 812})),
    )
    assert gpu.after_row() == []
    assert gpu.after_row() == [
        "the GPU's clock is down to 1,500 MHz; it was 1,980 before",
        "another process uses the GPU: pid 812",
    ]
    assert gpu.document() == {
        "clock_mhz": [1980, 1500],
        "power_cap_w": 700.0,
        "temperature_c": [60, 80],
        "other_pids": [812],
    }


def test_in_a_container_the_one_new_process_is_this_one() -> None:
    gpu = watch(
        GpuState(1980, 700.0, 40, frozenset({5})), GpuState(1980, 700.0, 40, frozenset({5, 90001}))
    )
    assert gpu.after_row() == ["another process uses the GPU: pid 5"]


def test_without_a_gpu_nothing_is_known() -> None:
    gpu = GpuWatch(None)
    assert gpu.after_row() == []
    empty = {"clock_mhz": [], "power_cap_w": 0, "temperature_c": [], "other_pids": []}
    assert gpu.document() == empty
