"""One request from question to last token, and how it is stopped on the way."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from minivllm_engine.core.errors import EngineError
from minivllm_engine.core.outputs import RequestOutput
from minivllm_engine.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm_engine.llm import LLM


class StopFlag:
    """Set by a signal, looked at between two steps of the engine."""

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        self.requested = True


class Listener(Protocol):
    """Is shown the answer as it grows: each output once, in order."""

    def show(self, output: RequestOutput) -> None: ...


def stream_answer(
    llm: "LLM",
    prompt: Any,
    params: SamplingParams,
    listener: Listener,
    stop: StopFlag,
    between_steps: Callable[[], None] = lambda: None,
) -> RequestOutput:
    """Run one request to its end, or until `stop` is requested: then it ends within one step.

    The request is gone from the engine when this returns or raises.

    Raises:
        EngineError: the request was refused, or it or the engine failed.
    """
    request_id = llm.add_request(prompt, params)
    try:
        while not stop.requested:
            for output in llm.step():
                if output.request_id != request_id:
                    continue
                listener.show(output)
                if output.error is not None:
                    raise output.error
                if output.finished:
                    return output
            if not llm.has_unfinished:
                raise EngineError("the engine lost the request")
            between_steps()
        aborted = llm.abort(request_id)
        if aborted is None:
            raise EngineError("the engine lost the request")
        listener.show(aborted)
        return aborted
    finally:
        llm.abort(request_id)
