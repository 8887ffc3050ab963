"""What all routes share: the engine, the model's names, limits, the thread that reads prompts."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm_cli.serve.engine_thread import Answer, EngineThread
from minivllm_cli.serve.guard import ApiError
from minivllm_engine.core.errors import EngineError, RequestError
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.core.structured import Structured
from minivllm_engine.text.prompt import read_prompt

if TYPE_CHECKING:
    from minivllm_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a client may ask for.

    Attributes:
        body: bytes of a request.
        waiting: outputs that may wait for the engine before requests are turned away.
    """

    body: int
    waiting: int


class Service:
    """One model that is served.

    Args:
        names: under which it is known, the first of them told where none was asked for.
        max_model_len: the longest sequence.
        max_tokens: of an answer whose request says nothing; None: the rest of the context.
    """

    def __init__(
        self,
        engine: EngineThread,
        tokenizer: "Tokenizer",
        *,
        names: Sequence[str],
        limits: Limits,
        max_model_len: int,
        max_tokens: int | None,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.names, self.limits = tuple(names), limits
        self.max_model_len, self._max_tokens = max_model_len, max_tokens
        self.draining = False
        self.num_rejected = 0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")

    @property
    def healthy(self) -> bool:
        """Requests are taken."""
        return not self.draining and self.engine.failure is None

    def name_of(self, asked: str | None) -> str:
        """Return the name that an answer tells."""
        return asked or self.names[0]

    def check_model(self, asked: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            ApiError: 404.
        """
        if asked is not None and asked not in self.names:
            known = ", ".join(self.names)
            what = f"the model {asked[:200]!r} is not served here; {known} is"
            raise ApiError(404, what, code="model_not_found", param="model")

    def check_room(self, num_outputs: int) -> None:
        """Refuse a request that would have to wait behind too many.

        Raises:
            ApiError: 429, or 503 where the server is going down.
        """
        if not self.healthy:
            what = "the engine failed" if self.engine.failure else "the server is going down"
            raise ApiError(503, what, code="shutting_down", retry_after=5)
        waiting = self.engine.num_waiting
        if waiting and waiting + num_outputs > self.limits.waiting:
            self.num_rejected += 1
            what = f"{waiting:,} outputs are waiting already, of {self.limits.waiting:,} that may"
            raise ApiError(429, what, code="overloaded", retry_after=1)

    async def read_prompt(
        self, prompt: dict[str, Any], params: SamplingParams
    ) -> tuple[dict[str, Any], SamplingParams]:
        """Render and encode a prompt beside the event loop; return it as token ids, and its parameters.

        Raises:
            RequestError: it cannot be read, or cannot fit.
        """
        loop = asyncio.get_running_loop()
        form = params.structured
        ids, is_chat = await loop.run_in_executor(self._reader, self._read, prompt, form)
        if params.max_tokens is None:
            rest = max(self.max_model_len - len(ids), 1)
            params = params.model_copy(update={"max_tokens": min(self._max_tokens or rest, rest)})
        return {"prompt_token_ids": ids, "chat": is_chat}, params

    def _read(self, prompt: dict[str, Any], form: Structured | None) -> tuple[list[int], bool]:
        try:
            ids, is_chat = read_prompt(prompt, self.tokenizer, self.max_model_len)
            if form is not None:
                self.engine.compile_form(ids, form, chat=is_chat)
            return ids, is_chat
        except (EngineError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic of a native library is no Exception
            raise RequestError(
                "the prompt cannot be read",
                why=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                code="unreadable_prompt",
            ) from None

    def drop(self, answers: Sequence[Answer]) -> None:
        """End requests that nobody waits for any more; those that have ended are left alone."""
        for answer in answers:
            if not answer.ended:
                self.engine.abort(answer)

    def close(self) -> None:
        """Stop the thread that reads prompts."""
        self._reader.shutdown(wait=False, cancel_futures=True)
