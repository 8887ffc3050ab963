"""The procedure: warm-ups first, then the repetitions with the variants in turn, in one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm_cli import engine as engine_factory
from minivllm_cli.bench.requests import BenchRequest, Repetition, make_repetition
from minivllm_cli.bench.row import Measured
from minivllm_cli.bench.sampling import BetweenSteps, Sample, take_sample
from minivllm_cli.bench.variant import Variant
from minivllm_cli.bench.workload import Workload

if TYPE_CHECKING:
    from minivllm_engine.llm import LLM


@dataclass(frozen=True, slots=True)
class Times:
    """How often each variant runs."""

    reps: int
    warmup: int


class Measurer:
    """Measures workloads on one engine after the other.

    Args:
        between: called between the steps of an engine.
        on_sample: called before each sample with the variant's name and what it is: "warm-up 1/2", "3/5".
    """

    def __init__(
        self, times: Times, between: BetweenSteps, on_sample: Callable[[str, str], None]
    ) -> None:
        self._times = times
        self._between = between
        self._on_sample = on_sample
        self._order = 0

    def measure(
        self,
        llm: "LLM",
        workload: Workload,
        variants: Sequence[Variant],
        lines: Sequence[BenchRequest] = (),
    ) -> list[Measured]:
        """All samples of a workload, an entry an variant.

        Raises:
            EngineDied: as `take_sample`.
        """
        samples: dict[Variant, list[Sample]] = {variant: [] for variant in variants}
        orders: dict[Variant, list[int]] = {variant: [] for variant in variants}
        peaks: dict[Variant, int | None] = dict.fromkeys(variants)
        repetition = Repetition(())
        total = self._times.warmup + self._times.reps
        for number in range(total):
            repetition = make_repetition(workload, number, llm.model_config.vocab_size, lines)
            for variant in variants:
                rep = number - self._times.warmup + 1
                what = f"warm-up {number + 1}" if rep < 1 else f"{rep}/{self._times.reps}"
                self._on_sample(variant.name, what)
                llm.use_graphs(variant.graph)
                engine_factory.reset_peak_memory(llm.device)
                sample = take_sample(llm, workload, repetition, variant, self._between)
                if rep < 1:
                    continue
                self._order += 1
                samples[variant].append(sample)
                orders[variant].append(self._order)
                peak = engine_factory.peak_memory(llm.device)
                if peak is not None:
                    peaks[variant] = max(peak, peaks[variant] or 0)
        requested = _requested(workload, repetition)
        return [
            Measured(
                workload,
                variant,
                tuple(samples[variant]),
                tuple(orders[variant]),
                requested,
                peaks[variant],
            )
            for variant in variants
        ]


def _requested(workload: Workload, repetition: Repetition) -> tuple[int, int]:
    """Prompt and output tokens of a request; of lengths that are drawn, all together."""
    if workload.times_decode:
        return max(workload.depth, 1), workload.gen.low
    asked = [
        (len(request.prompt_ids), request.gen or request.params.max_tokens or 0)
        for request in repetition.requests
    ]
    if len(set(asked)) == 1:
        return asked[0]
    return sum(prompt for prompt, _ in asked), sum(gen for _, gen in asked)
