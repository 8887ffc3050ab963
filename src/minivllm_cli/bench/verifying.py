"""`--verify N`: a workload once more, untimed, with some of its requests answered again from nothing."""

from typing import TYPE_CHECKING

from minivllm_cli.batch.verify import Verifier
from minivllm_cli.bench.requests import BenchRequest, Repetition
from minivllm_cli.bench.sampling import BetweenSteps
from minivllm_cli.bench.workload import Workload
from minivllm_cli.errors import EngineDied
from minivllm_engine.core.request import ReadyRequest
from minivllm_engine.protocol.lines import Job, RequestLine

if TYPE_CHECKING:
    from minivllm_engine.llm import LLM


def verify_workload(
    llm: "LLM",
    verifier: Verifier,
    workload: Workload,
    repetition: Repetition,
    between: BetweenSteps,
) -> None:
    """Run a repetition with the logprobs that the comparison needs; `verifier` counts and reports.

    It is not timed, because logprobs cost.

    Raises:
        EngineDied: the engine lost a request.
    """
    llm.clear_cache()
    for primer in repetition.primers:
        llm.add_request(primer.for_engine(), primer.params)
    while llm.has_unfinished:
        llm.step()
        between()
    left = list(reversed(list(enumerate(repetition.requests))))
    running: dict[str, tuple[int, BenchRequest, ReadyRequest]] = {}
    while left or running or verifier.num_sequences:
        while left and len(running) < workload.batch:
            place, request = left.pop()
            ready = llm.read_request(request.for_engine(), request.params)
            request_id = llm.add_request(verifier.asking(ready), request_id=f"bench-{place}")
            running[request_id] = (place, request, ready)
        for output in llm.step():
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
