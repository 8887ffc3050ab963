"""How the tokens of a step are shared out between the requests that run."""

from collections.abc import Iterable, Sequence

from minivllm_engine.cache.prefix_cache import PrefixCache
from minivllm_engine.core.request import Request
from minivllm_engine.scheduling.admission import Admission, remaining


class TokenBudget:
    """Gives each request its part of one step, and the blocks for it.

    Requests with one token to go (decodes) come first, but leave a quarter of a scarce budget to prompts.
    What prompts get is shared between the oldest one and the shortest ones, so that neither starves.
    When blocks run out, the youngest running request is preempted.

    Args:
        num_tokens: of the whole step.
        may_preempt: False while a step is in flight.

    Attributes:
        lengths: tokens of each request, in the order of their planning.
        bound_by: why the step is not larger; None where everything runs that can.
        starved: somebody got nothing because there were no blocks, and none could be made free.
    """

    def __init__(
        self, cache: PrefixCache, admission: Admission, num_tokens: int, *, may_preempt: bool
    ) -> None:
        self._cache, self._admission = cache, admission
        self._num_tokens, self._may_preempt = num_tokens, may_preempt
        self._num_planned = 0
        self.lengths: dict[Request, int] = {}
        self.bound_by: str | None = None
        self.starved = False

    def give_alone(self, request: Request) -> None:
        """Give the whole step to one request, whoever must make room for it."""
        self._give(request, self._num_tokens, any_age=True)

    def share(self, step: int) -> None:
        """Share the step among all running requests. Of one token nothing can be left: there steps alternate.

        Args:
            step: its number.
        """
        budget = self._num_tokens
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in self._admission.running:
            left = remaining(request)
            if left:
                (decodes if left == 1 else prompts).append(request)
        for_prompts = step % 2 if budget == 1 else max(1, budget // 4)
        limit = budget - (for_prompts if prompts else 0)
        if len(decodes) > limit:
            decodes.sort(key=lambda r: r.last_turn)
        self._give_decodes(decodes, limit)
        if prompts:
            self._give_prompts(prompts, budget)
            self._give_decodes(decodes, budget)
        full = self._num_planned >= budget and self.bound_by is None
        running = self._admission.running
        if full and any(remaining(r) > self.lengths.get(r, 0) for r in running):
            self.bound_by = "token budget"

    def _give_decodes(self, decodes: Iterable[Request], limit: int) -> None:
        for request in decodes:
            if self._num_planned >= limit:
                return
            if request.status == "running" and request not in self.lengths:
                self._give(request, 1)

    def _give_prompts(self, prompts: Sequence[Request], limit: int) -> None:
        """Half of what is left of the step for the shortest prompts, the rest for the oldest one."""
        prompts = [r for r in prompts if r.status == "running"]
        if not prompts:
            return
        oldest, *others = prompts
        others.sort(key=lambda r: (remaining(r), r.arrival))
        half = self._num_planned + (limit - self._num_planned) // 2
        for requests, up_to in ((others, half), ((oldest,), limit), (others, limit)):
            for request in requests:
                if self._num_planned >= up_to:
                    break
                if request.status == "running":
                    self._give(request, up_to - self._num_planned)

    def _give(self, request: Request, available: int, *, any_age: bool = False) -> None:
        """Give the request up to `available` more tokens of this step, if blocks for them can be had."""
        blocks = self._cache.blocks
        planned = self.lengths.get(request, 0)
        length = self._chunk_length(request, planned + available)
        needed = blocks.blocks_for(request.num_launched_tokens + length)
        missing = needed - len(request.block_table)
        while missing > blocks.num_available:
            youngest = None
            if self._may_preempt:
                youngest = self._admission.preempt_for(request, any_age=any_age)
            if youngest is None:
                self.bound_by, self.starved = "KV blocks", True
                return
            self._num_planned -= self.lengths.pop(youngest, 0)
        if missing > 0:
            request.block_table += self._cache.allocate(missing)
        self.lengths[request] = length
        self._num_planned += length - planned

    def _chunk_length(self, request: Request, available: int) -> int:
        """Tokens from the request's position on: to the end or to where a snapshot is wanted, or as far
        as a boundary within reach.
        """
        interval, start = self._cache.interval, request.num_launched_tokens
        end = start + remaining(request)
        end = next((b for b in request.boundaries if b > start), end)
        reach = min(end, start + available)
        next_line = (start // interval + 1) * interval
        if start % interval:
            return min(reach, next_line) - start
        if reach < end and reach >= next_line:
            reach -= reach % interval
        return reach - start
