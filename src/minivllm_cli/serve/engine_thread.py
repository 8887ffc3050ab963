"""The thread that owns the engine, and what passes between it and the server's event loop.

Commands go in through a queue; after each step everything that is new comes back in one call to the loop. The
loop keeps the newest output of each request only: text only grows, so a slow reader gets larger pieces, and
what waits for it is bounded.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from minivllm_engine.core.outputs import RequestOutput
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.core.structured import Structured

if TYPE_CHECKING:
    from minivllm_engine.llm import LLM

Result = TypeVar("Result")


class EngineStopped(Exception):
    """The engine takes no more requests: it failed, or the server is going down."""


class Answer:
    """What is known of one request, on the event loop.

    Attributes:
        newest: its latest output, or None before there is one.
        failure: what ended it from outside, or None.
    """

    def __init__(self, request_id: str, num_outputs: int, news: asyncio.Event) -> None:
        self.request_id, self.num_outputs = request_id, num_outputs
        self.newest: RequestOutput | None = None
        self.failure: Exception | None = None
        self._news = news

    @property
    def ended(self) -> bool:
        """There will be no more news of it."""
        return self.failure is not None or (self.newest is not None and self.newest.finished)

    def take(self, output: RequestOutput) -> None:
        """Take its latest output, and wake whoever waits for it."""
        self.newest = output
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End it from outside, and wake whoever waits for it."""
        self.failure = error
        self._news.set()


class EngineThread:
    """Runs an LLM in a thread of its own. All methods are for the event loop's thread.

    Args:
        on_end: called on the loop for each request that ends, with its last output.
        on_death: called on the loop with the exception that ended the engine.

    Attributes:
        failure: why the engine is dead, or None.
    """

    def __init__(
        self,
        llm: "LLM",
        loop: asyncio.AbstractEventLoop,
        *,
        on_end: Callable[[RequestOutput], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._llm, self._loop = llm, loop
        self._on_end, self._on_death = on_end, on_death
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._answers: dict[str, Answer] = {}
        self._number = 0
        self._closing = False
        self._calls: set[asyncio.Future[Any]] = set()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._answers)

    @property
    def num_waiting(self) -> int:
        """Outputs of requests of which nothing has been computed yet."""
        waiting = (answer for answer in self._answers.values() if answer.newest is None)
        return sum(answer.num_outputs for answer in waiting)

    async def submit(
        self, prompt: dict[str, Any], params: SamplingParams, news: asyncio.Event
    ) -> Answer:
        """Queue a request, and return where its answer will be.

        Args:
            news: set whenever there is something new of it.

        Raises:
            RequestError: it can never be served.
            EngineStopped: nothing can be served any more.
        """
        self._number += 1
        answer = Answer(f"serve-{self._number}", params.n, news)
        # Known before it is added: its first output may be there before this comes back.
        self._answers[answer.request_id] = answer
        try:
            await self.call(
                lambda llm: llm.add_request(prompt, params, request_id=answer.request_id)
            )
        except BaseException:
            self.abort(answer)
            raise
        return answer

    def abort(self, answer: Answer) -> None:
        """End a request that nobody waits for any more, if it has not ended."""
        if self._answers.pop(answer.request_id, None) is not None:
            self._commands.put(lambda: self._abort(answer.request_id))

    def abort_all(self, error: Exception) -> None:
        """End all requests, and tell whoever waits for them why."""
        for answer in list(self._answers.values()):
            self.abort(answer)
            answer.fail(error)

    async def call(self, function: Callable[["LLM"], Result]) -> Result:
        """Run a function of the engine between two steps, and return what it returns.

        Raises:
            EngineStopped: there is no engine any more.
        """
        if self.failure is not None or self._closing:
            raise EngineStopped("the engine has stopped")
        future: asyncio.Future[Result] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def run() -> None:
            try:
                result = function(self._llm)
            except Exception as error:  # it costs this caller his answer, and nobody else
                self._tell(_settle, future, None, error)
            else:
                self._tell(_settle, future, result, None)

        self._commands.put(run)
        return await future

    def compile_form(self, ids: Sequence[int], form: Structured, *, chat: bool) -> None:
        """Compile the form of an answer, from any thread, so that the engine finds it compiled.

        Raises:
            RequestError: it cannot be held to.
        """
        self._llm.compile_form(ids, form, chat=chat)

    async def close(self) -> None:
        """Stop the thread after the step that it is in. Requests that have not ended are dropped."""
        self._closing = True
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self._fail_calls("the server is going down")

    # -- in the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._obey():
                outputs = self._llm.step()
                if outputs:
                    self._tell(self._deliver, outputs)
        except BaseException as error:
            self._tell(self._die, error)

    def _obey(self) -> bool:
        """Do what was asked for; wait for it if there is nothing else to do. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self._llm.has_unfinished)
            except Empty:
                return True
            if command is None:
                return False
            command()
            if self._llm.has_unfinished and self._commands.empty():
                return True

    def _abort(self, request_id: str) -> None:
        output = self._llm.abort(request_id)
        if output is not None:
            self._tell(self._on_end, output)

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    # -- back on the loop ------------------------------------------------------------------------

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            answer = self._answers.get(output.request_id)
            if output.finished:
                self._answers.pop(output.request_id, None)
                self._on_end(output)
            if answer is not None:
                answer.take(output)

    def _die(self, error: BaseException) -> None:
        self.failure = error
        for answer in list(self._answers.values()):
            answer.fail(EngineStopped("the engine failed"))
        self._answers.clear()
        self._fail_calls("the engine failed")
        self._on_death(error)

    def _fail_calls(self, why: str) -> None:
        for future in list(self._calls):
            _settle(future, None, EngineStopped(why))


def _settle(future: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
