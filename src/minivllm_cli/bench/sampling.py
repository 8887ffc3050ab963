"""One sample: the requests of a repetition run through the engine's public loop, and timed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from minivllm_cli.bench.requests import BenchRequest, Repetition
from minivllm_cli.bench.variant import Variant
from minivllm_cli.bench.workload import Workload
from minivllm_cli.errors import EngineDied
from minivllm_engine.core.outputs import RequestOutput

if TYPE_CHECKING:
    from minivllm_engine.llm import LLM

BetweenSteps = Callable[[], None]


@dataclass(slots=True)
class _Track:
    """What is seen of a request while it runs."""

    request: BenchRequest
    arrived: float
    count: int = 0
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    output: RequestOutput | None = None

    def see(self, output: RequestOutput, now: float) -> None:
        """Take an output of the engine, which came at `now`."""
        self.output = output
        count = output.usage.completion_tokens
        new = count - self.count
        if new <= 0:
            return
        if self.count:
            # Tokens that come together share the time since the last ones.
            self.gaps += [(now - self.last) / new] * new
        else:
            self.first = now
            # The others that came with the first had no time of their own.
            self.gaps += [0.0] * (new - 1)
        self.count, self.last = count, now

    @property
    def done(self) -> RequestOutput:
        """The output that came last; there was one."""
        assert self.output is not None
        return self.output


@dataclass(frozen=True, slots=True)
class Sample:
    """What came of a repetition of a variant. Times in seconds, one entry a request (of `itl`: a token).

    Attributes:
        wall: of the timed part alone.
        in_tokens, out_tokens: counted in the timed part; of decode, what was there when it began, and
            what was made in it.
        steps: of the engine in the timed part.
        context: tokens in the KV cache of a sequence in a timed decode step, on average; of decode alone.
        tokens: of each request, in the order of the requests.
        prompt_tokens, cached_tokens, kv_matched: of all requests, as the engine reports them.
    """

    wall: float
    out_tokens: int
    steps: int
    in_tokens: int
    tokens: tuple[tuple[int, ...], ...]
    prompt_tokens: int
    cached_tokens: int
    kv_matched: int
    context: float = 0.0
    itl: tuple[float, ...] = ()
    ttft: tuple[float, ...] = ()
    tpot: tuple[float, ...] = ()
    e2e: tuple[float, ...] = ()
    queue: tuple[float, ...] = ()

    def tok_s(self, workload: Workload) -> float:
        """Tell the throughput: of a prefill its prompt tokens, of everything else its output tokens."""
        tokens = self.in_tokens if workload.kind == "prefill" else self.out_tokens
        return tokens / self.wall


def take_sample(
    llm: "LLM", workload: Workload, repetition: Repetition, variant: Variant, between: BetweenSteps
) -> Sample:
    """Run `repetition` once, from an empty cache.

    Args:
        between: called between steps; what it raises ends the sample, and nothing of it is left behind.

    Raises:
        EngineDied: the engine failed, or did not do what was asked of it.
    """
    runner = _Runner(llm, between)
    llm.step()  # what an engine that works ahead still has in flight
    llm.clear_cache()
    try:
        if variant.naive:
            return _naive(runner, workload, repetition)
        if workload.times_decode:
            return _decode(runner, workload, repetition)
        if variant.cache and repetition.primers:
            runner.run(repetition.primers, len(repetition.primers))
        cold = {} if variant.cache else {"prefix_cache": False}
        requests = [request.with_params(**cold) for request in repetition.requests]
        return _whole(runner, requests, workload)
    finally:
        runner.drop()


def engine_step(llm: "LLM") -> list[RequestOutput]:
    """Run a step of the engine.

    Raises:
        EngineDied: it failed.
    """
    try:
        return llm.step()
    except Exception as error:
        what = " ".join(str(error).split()) or type(error).__name__
        raise EngineDied(f"engine failed: {what}") from error


class _Runner:
    """Feeds requests to an engine and watches them."""

    def __init__(self, llm: "LLM", between: BetweenSteps) -> None:
        self.llm = llm
        self._between = between
        self._num_made = 0
        self.began = 0.0
        self._running: dict[str, _Track] = {}

    def add(self, request: BenchRequest) -> _Track:
        track = _Track(request, time.perf_counter())
        self._num_made += 1
        request_id = self.llm.add_request(
            request.for_engine(), request.params, request_id=f"bench-{self._num_made}"
        )
        self._running[request_id] = track
        return track

    def step(self) -> None:
        """Run a step of the engine; its news go to the tracks."""
        outputs = engine_step(self.llm)
        now = time.perf_counter()
        for output in outputs:
            track = self._running.get(output.request_id)
            if track is None:
                continue
            if output.error is not None:
                raise EngineDied(f"a request failed: {output.error.what}", why=output.error.why)
            track.see(output, now)
            if output.finished:
                del self._running[output.request_id]
        if self._running and not self.llm.has_unfinished:
            raise EngineDied("engine failed: it lost requests")
        self._between()

    def run(self, requests: Sequence[BenchRequest], at_once: int) -> list[_Track]:
        """Run requests to their end, at most so many at once. `began` is when the first step did."""
        self.began = 0.0
        tracks: list[_Track] = []
        left = list(reversed(requests))
        while left or self._running:
            while left and len(self._running) < at_once:
                tracks.append(self.add(left.pop()))
            self.began = self.began or time.perf_counter()
            self.step()
        return tracks

    def drop(self) -> None:
        """Forget requests that have not ended."""
        for request_id in self._running:
            self.llm.abort(request_id)
        self._running.clear()


def _whole(runner: _Runner, requests: Sequence[BenchRequest], workload: Workload) -> Sample:
    """Everything is timed: from the first step to the last token."""
    before = runner.llm.stats().num_steps
    tracks = runner.run(requests, workload.batch)
    for track in tracks:
        _check_lengths(track)
    return Sample(
        wall=max(track.last for track in tracks) - runner.began,
        out_tokens=sum(track.count for track in tracks),
        steps=runner.llm.stats().num_steps - before,
        ttft=tuple(t.first - t.arrived for t in tracks),
        tpot=tuple((t.last - t.first) / (t.count - 1) for t in tracks if t.count > 1),
        e2e=tuple(track.last - track.arrived for track in tracks),
        queue=tuple(q for track in tracks if (q := track.done.timing.queue_s) is not None),
        **_counts(tracks),
    )


def _check_lengths(track: _Track) -> None:
    asked = track.request
    got = (track.done.usage.prompt_tokens, track.count)
    wanted = (len(asked.prompt_ids), track.count if asked.gen is None else asked.gen)
    if got != wanted:
        raise EngineDied(
            f"request {asked.name} ran {got[0]} + {got[1]} tokens and not {wanted[0]} + {wanted[1]}",
            why="prompt and answer; the figures would be those of another workload",
        )


def _decode(runner: _Runner, workload: Workload, repetition: Repetition) -> Sample:
    """Prompts first, untimed; then `gen` tokens of every request, all of them running all the time."""
    llm, gen = runner.llm, workload.gen.low
    spare = decode_spare(workload, llm.config.engine.max_num_batched_tokens or 1)
    tracks = [runner.add(r.with_params(max_tokens=gen + spare)) for r in repetition.requests]
    while any(not track.count for track in tracks):
        runner.step()
    began = max(track.last for track in tracks)
    counts = [track.count for track in tracks]
    for track in tracks:
        track.gaps.clear()
    before = llm.stats()
    _check_running(llm, workload, before.num_preemptions, before.num_preemptions)
    while any(track.count < count + gen for track, count in zip(tracks, counts, strict=True)):
        runner.step()
    after = llm.stats()
    _check_running(llm, workload, before.num_preemptions, after.num_preemptions)
    wall = max(track.last for track in tracks) - began
    made = sum(track.count for track in tracks) - sum(counts)
    if made != gen * len(tracks):
        raise EngineDied(f"{gen * len(tracks)} tokens were to be timed, and {made} were made")
    depths = [len(t.request.prompt_ids) + c - 1 for t, c in zip(tracks, counts, strict=True)]
    context = sum(depths) / len(depths) + (made / len(tracks) - 1) / 2
    steps = after.num_steps - before.num_steps
    # Of a request, only the timed part counts; when it came and how long it took in all says nothing.
    return Sample(wall, made, steps, context=context, **_counts(tracks, keep=gen + 1))


def decode_spare(workload: Workload, step_tokens: int) -> int:
    """Count the tokens beyond `gen` that a request of `decode` may need.

    The first prompts that are read go on decoding while the last ones are read, a token a step. A step
    has room for `step_tokens`, of which decodes leave a quarter to prompts.
    """
    prompt_steps = -(-4 * workload.batch * max(workload.depth, 1) // step_tokens)
    return prompt_steps + 2 * workload.batch + 8


def _check_running(llm: "LLM", workload: Workload, before: int, after: int) -> None:
    running = llm.stats().num_running
    if running != workload.batch or before != after:
        raise EngineDied(
            f"{running} of {workload.batch} requests were running side by side",
            why=f"{after - before} were preempted: KV blocks or state slots ran out",
        )


def _naive(runner: _Runner, workload: Workload, repetition: Repetition) -> Sample:
    """Every token is the first one of a request of its own, whose prompt is all that came before."""
    gen = workload.gen.low
    (request,) = repetition.requests
    made: list[int] = []
    track = _Track(request, time.perf_counter())
    steps = 0
    for _ in range(gen + 1):
        one = request.with_params(max_tokens=1, prefix_cache=False)
        before = runner.llm.stats().num_steps
        (last,) = runner.run([replace(one, prompt_ids=(*request.prompt_ids, *made))], 1)
        made += last.done.outputs[0].token_ids
        if track.output is None:
            track.first = last.last
        else:
            track.gaps.append(last.last - track.last)
            steps += runner.llm.stats().num_steps - before
        track.last, track.output = last.last, last.output
    track.done.outputs[0].token_ids = made
    context = len(request.prompt_ids) + (gen - 1) / 2
    wall = track.last - track.first
    return Sample(wall, gen, steps, context=context, **_counts([track], keep=gen + 1))


def _counts(tracks: Sequence[_Track], keep: int | None = None) -> dict[str, Any]:
    """What samples of every kind have; of each answer the first `keep` tokens."""
    outputs = [track.done for track in tracks]
    return {
        "in_tokens": sum(len(track.request.prompt_ids) for track in tracks),
        "itl": tuple(gap for track in tracks for gap in track.gaps),
        "tokens": tuple(tuple(chain(*(c.token_ids[:keep] for c in o.outputs))) for o in outputs),
        "prompt_tokens": sum(output.usage.prompt_tokens for output in outputs),
        "cached_tokens": sum(output.usage.cached_tokens for output in outputs),
        "kv_matched": sum(output.usage.kv_matched for output in outputs),
    }
