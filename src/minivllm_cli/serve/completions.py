"""`/v1/chat/completions` and `/v1/completions`: a body in, an answer or a stream of pieces out."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from minivllm_cli.serve.engine_thread import Answer
from minivllm_cli.serve.guard import ApiError, as_api_error, event, read_json
from minivllm_cli.serve.service import Service
from minivllm_engine.core.outputs import CompletionOutput, FinishReason, RequestOutput
from minivllm_engine.protocol.openai_body import ParsedRequest, read_request
from minivllm_engine.protocol.openai_records import (
    chat_logprobs,
    completion,
    completion_logprobs,
    join_outputs,
    openai_finish,
    openai_usage,
)

_MOST = {"n": 16, "logit_bias": 1024, "stop": 16, "stop_token_ids": 128}
_MOST_LOGPROBS, _MOST_PROMPTS = 20, 128
_SERVER_ENDED = (FinishReason.ABORT, FinishReason.ERROR)


async def complete(service: Service, request: Request, *, is_chat: bool) -> Response:
    """Answer one request.

    Raises:
        ApiError, LineProblem, RequestError, EngineStopped: it cannot be answered.
    """
    parsed = read_request(await read_json(request, service.limits.body), is_chat=is_chat)
    service.check_model(parsed.model)
    _check_limits(parsed)
    num_outputs = parsed.params.n * len(parsed.prompts)
    service.check_room(num_outputs)
    news = asyncio.Event()
    answers: list[Answer] = []
    try:
        for prompt in parsed.prompts:
            ids, params = await service.read_prompt(prompt, parsed.params)
            answers.append(await service.engine.submit(ids, params, news))
    except BaseException:
        service.drop(answers)
        raise
    call = _Call(service, parsed, answers, news, request.scope["request_id"])
    headers = {"x-minivllm-ignored": ", ".join(parsed.ignored)[:1000]} if parsed.ignored else {}
    if parsed.stream:
        headers["cache-control"] = "no-store"
        return StreamingResponse(call.events(), media_type="text/event-stream", headers=headers)
    return await call.answered(request, headers)


def _check_limits(parsed: ParsedRequest) -> None:
    sizes = {name: getattr(parsed.params, name) for name in _MOST}
    for name, value in sizes.items():
        size = value if isinstance(value, int) else len(value or ())
        if size > _MOST[name]:
            what = f"{name}: {size:,} are more than {_MOST[name]:,}"
            raise ApiError(400, what, code="invalid_field", param=name)
    if max(parsed.params.logprobs or 0, parsed.params.prompt_logprobs or 0) > _MOST_LOGPROBS:
        what = f"logprobs: more than {_MOST_LOGPROBS}"
        raise ApiError(400, what, code="invalid_field", param="logprobs")
    if len(parsed.prompts) > _MOST_PROMPTS:
        what = f"prompt: {len(parsed.prompts):,} are more than {_MOST_PROMPTS}"
        raise ApiError(400, what, code="invalid_field", param="prompt")


@dataclass
class _Call:
    """One request that is being answered; with several prompts, one answer of the engine for each."""

    service: Service
    parsed: ParsedRequest
    answers: list[Answer]
    news: asyncio.Event
    request_id: str

    # -- the whole answer ------------------------------------------------------------------------

    async def answered(self, request: Request, headers: dict[str, str]) -> Response:
        """Wait for the whole answer, or for the client to hang up."""
        done = asyncio.ensure_future(self._wait_for_all())
        gone = asyncio.ensure_future(_hung_up(request))
        try:
            await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                return Response(status_code=499)  # nobody reads it
            outputs = done.result()
        finally:
            done.cancel()
            gone.cancel()
            self.service.drop(self.answers)
        return JSONResponse(self._document(outputs), headers=headers)

    async def _wait_for_all(self) -> list[RequestOutput]:
        while not all(answer.ended for answer in self.answers):
            self.news.clear()
            await self.news.wait()
        for answer in self.answers:
            _raise_failure(answer)
        return [answer.newest for answer in self.answers if answer.newest is not None]

    def _document(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        tokenizer, parsed = self.service.tokenizer, self.parsed
        joined = join_outputs(outputs)
        body = completion(joined, tokenizer, is_chat=parsed.is_chat)
        if parsed.echo:
            for place, choice in enumerate(body["choices"]):
                self._echo(choice, outputs[place // parsed.params.n])
            if parsed.prompt_only:
                body["usage"]["completion_tokens"] = 0
                body["usage"]["total_tokens"] = body["usage"]["prompt_tokens"]
        return {"id": self._id, **body, "model": self.service.name_of(parsed.model)}

    def _echo(self, choice: dict[str, Any], output: RequestOutput) -> None:
        """Put the prompt before the answer, and its logprobs before those of the answer."""
        tokenizer, only = self.service.tokenizer, self.parsed.prompt_only
        prompt = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
        choice["text"] = prompt if only else prompt + choice["text"]
        if only:
            choice["finish_reason"] = "length"
        if output.prompt_logprobs is None:
            return
        known = [one for one in output.prompt_logprobs if one is not None]
        first = tokenizer.token_text(output.prompt_token_ids[0])
        found = completion_logprobs(known, tokenizer, start=len(first))
        before = {
            "tokens": [first, *found["tokens"]],
            "token_logprobs": [None, *found["token_logprobs"]],
            "top_logprobs": [None, *found["top_logprobs"]],
            "text_offset": [0, *found["text_offset"]],
        }
        after = choice["logprobs"]
        if not only and after is not None:
            after["text_offset"] = [at + len(prompt) for at in after["text_offset"]]
            before = {key: values + after[key] for key, values in before.items()}
        choice["logprobs"] = before

    # -- a stream --------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[bytes]:
        """Give the answer piece by piece, as server-sent events."""
        parsed = self.parsed
        sent = [[_Sent() for _ in range(parsed.params.n)] for _ in self.answers]
        created = int(time.time())
        shell = {
            "id": self._id,
            "object": "chat.completion.chunk" if parsed.is_chat else "text_completion",
            "created": created,
            "model": self.service.name_of(parsed.model),
        }
        try:
            told: set[int] = set()
            while len(told) < len(self.answers):
                self.news.clear()
                for place, answer in enumerate(self.answers):
                    output = answer.newest
                    if place in told:
                        continue
                    if answer.ended:
                        told.add(place)
                        _raise_failure(answer)
                    if output is None:
                        continue
                    for choice in self._pieces(output, sent[place], place * parsed.params.n):
                        yield event({**shell, "choices": [choice], **self._usage_beside()})
                if len(told) < len(self.answers):
                    await self.news.wait()
            if parsed.include_usage:
                yield event({**shell, "choices": [], "usage": self._usage()})
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield event(as_api_error(error).body)
        finally:
            self.service.drop(self.answers)

    def _pieces(
        self, output: RequestOutput, sent: list["_Sent"], first_index: int
    ) -> Iterator[dict[str, Any]]:
        for one, before in zip(output.outputs, sent, strict=True):
            if before.finished:
                continue
            index = first_index + one.index
            if self.parsed.is_chat:
                yield from self._chat_pieces(one, before, index)
            else:
                yield from self._text_pieces(one, before, index)

    def _chat_pieces(
        self, one: CompletionOutput, before: "_Sent", index: int
    ) -> Iterator[dict[str, Any]]:
        def choice(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
            return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

        if not before.begun:
            before.begun = True
            yield choice({"role": "assistant", "content": ""})
        delta = {}
        if one.reasoning is not None and len(one.reasoning) > before.reasoning:
            delta["reasoning_content"] = one.reasoning[before.reasoning :]
            before.reasoning = len(one.reasoning)
        if len(one.text) > before.text:
            delta["content"] = one.text[before.text :]
            before.text = len(one.text)
        ended = one.finish_reason is not None
        logprobs = None
        # Tokens whose text is held back are told with what comes next.
        if one.logprobs is not None and (delta or ended) and len(one.logprobs) > before.logprobs:
            logprobs = chat_logprobs(one.logprobs[before.logprobs :], self.service.tokenizer)
            before.logprobs = len(one.logprobs)
        if delta or logprobs is not None:
            yield choice(delta, logprobs=logprobs)
        if ended:
            before.finished = True
            yield choice({}, finish_reason=openai_finish(one.finish_reason))

    def _text_pieces(
        self, one: CompletionOutput, before: "_Sent", index: int
    ) -> Iterator[dict[str, Any]]:
        text, ended = one.text[before.text :], one.finish_reason is not None
        if not text and not ended:
            return
        logprobs = None
        if one.logprobs is not None:
            new = one.logprobs[before.logprobs :]
            logprobs = completion_logprobs(new, self.service.tokenizer, start=before.text)
            before.logprobs = len(one.logprobs)
        before.text, before.finished = len(one.text), ended
        yield {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": openai_finish(one.finish_reason),
        }

    def _usage_beside(self) -> dict[str, Any]:
        return {"usage": self._usage()} if self.parsed.continuous_usage else {}

    def _usage(self) -> dict[str, Any]:
        known = [answer.newest for answer in self.answers if answer.newest is not None]
        return openai_usage(join_outputs(known).usage, self.service.tokenizer)

    @property
    def _id(self) -> str:
        return f"{'chatcmpl' if self.parsed.is_chat else 'cmpl'}-{self.request_id}"


@dataclass
class _Sent:
    """How much of an output the client has: characters, logprobs."""

    begun: bool = False
    text: int = 0
    reasoning: int = 0
    logprobs: int = 0
    finished: bool = False


def _raise_failure(answer: Answer) -> None:
    if answer.failure is not None:
        raise answer.failure
    output = answer.newest
    if output is not None and output.error is not None:
        raise output.error
    if output is not None and output.finish_reason in _SERVER_ENDED:
        raise ApiError(503, "the request was ended", code="aborted", retry_after=5)


async def _hung_up(request: Request) -> None:
    with suppress(asyncio.CancelledError):
        while (await request.receive())["type"] != "http.disconnect":
            pass
