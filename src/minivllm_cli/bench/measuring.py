"""The procedure: warm-ups first, then the repetitions with the variants in turn, in one process."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from minivllm_cli import engine
from minivllm_cli.batch.verify import Verifier
from minivllm_cli.bench.requests import BenchRequest, Repetition, make_repetition
from minivllm_cli.bench.rows import Measured
from minivllm_cli.bench.sampling import BetweenSteps, Sample, engine_step, take_sample
from minivllm_cli.bench.variant import Variant
from minivllm_cli.bench.workload import Workload
from minivllm_cli.errors import EngineDied
from minivllm_engine.core.request import ReadyRequest
from minivllm_engine.protocol.lines import Job, RequestLine

if TYPE_CHECKING:
    from minivllm_engine.llm import LLM


class Measurer:
    """Measures workloads on one engine after the other.

    Args:
        reps, warmup: how often each variant runs, timed and before that.
        between: called between the steps of an engine.
        on_sample: called before each sample with the variant's name and what it is: "warm-up 1/2", "3/5".
    """

    def __init__(
        self,
        reps: int,
        warmup: int,
        between: BetweenSteps,
        on_sample: Callable[[str, str], None],
    ) -> None:
        self._reps, self._warmup = reps, warmup
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
        """Take all samples of a workload; an entry a variant.

        Raises:
            EngineDied: as `take_sample`.
        """
        samples: dict[Variant, list[tuple[int, Sample]]] = {variant: [] for variant in variants}
        peaks: dict[Variant, int | None] = dict.fromkeys(variants)
        repetition = Repetition(())
        for number in range(self._warmup + self._reps):
            repetition = make_repetition(workload, number, llm.model_config.vocab_size, lines)
            for variant in variants:
                rep = number - self._warmup + 1
                what = f"warm-up {number + 1}" if rep < 1 else f"{rep}/{self._reps}"
                self._on_sample(variant.name, what)
                llm.use_graphs(variant.graph)
                engine.reset_peak_memory(llm.device)
                sample = take_sample(llm, workload, repetition, variant, self._between)
                if rep < 1:
                    continue
                self._order += 1
                samples[variant].append((self._order, sample))
                peak = engine.peak_memory(llm.device)
                if peak is not None:
                    peaks[variant] = max(peak, peaks[variant] or 0)
        requested = _requested(workload, repetition)
        found = []
        for variant, taken in samples.items():
            orders, each = zip(*taken, strict=True)
            found.append(Measured(workload, variant, each, orders, requested, peaks[variant]))
        return found


def _requested(workload: Workload, repetition: Repetition) -> tuple[int, int]:
    if workload.times_decode:
        return max(workload.depth, 1), workload.gen.low
    asked = [(len(r.prompt_ids), r.gen or r.params.max_tokens or 0) for r in repetition.requests]
    if len(set(asked)) == 1:
        return asked[0]
    return sum(prompt for prompt, _ in asked), sum(gen for _, gen in asked)


def verify_workload(
    llm: "LLM",
    verifier: Verifier,
    workload: Workload,
    repetition: Repetition,
    between: BetweenSteps,
) -> None:
    """Run a repetition once more with the logprobs that `verifier` needs, which counts and reports.

    It is not timed, because logprobs cost.

    Raises:
        EngineDied: the engine failed, or lost a request.
    """
    llm.clear_cache()
    for primer in repetition.primers:
        llm.add_request(primer.for_engine(), primer.params)
    while llm.has_unfinished:
        engine_step(llm)
        between()
    left = list(reversed(list(enumerate(repetition.requests))))
    running: dict[str, tuple[int, BenchRequest, ReadyRequest]] = {}
    while left or running or verifier.num_sequences:
        while left and len(running) < workload.batch:
            place, request = left.pop()
            ready = llm.read_request(request.for_engine(), request.params)
            request_id = llm.add_request(verifier.asking(ready), request_id=f"bench-{place}")
            running[request_id] = (place, request, ready)
        for output in engine_step(llm):
            if verifier.take(output) or not output.finished:
                continue
            place, request, ready = running.pop(output.request_id)
            verifier.consider(_job(place, request), ready, output)
        if (running or verifier.num_sequences) and not llm.has_unfinished:
            raise EngineDied("engine failed: it lost requests")
        between()


def _job(place: int, request: BenchRequest) -> Job:
    line = RequestLine(None, place, request.name, "tokens", [], request.params)
    return Job(place, line, key="")
