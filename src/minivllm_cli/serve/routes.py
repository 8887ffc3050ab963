"""The routes of the server, and what becomes of errors in them."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from minivllm_cli.serve.completions import complete
from minivllm_cli.serve.guard import ApiError, Guard, as_api_error, read_json
from minivllm_cli.serve.metrics import CONTENT_TYPE, Metrics
from minivllm_cli.serve.service import Service
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.protocol.lines import LineProblem
from minivllm_engine.protocol.openai_body import read_request

_Handler = Callable[[Request], Awaitable[Response]]
_WORDS = {404: "no such route", 405: "not with this method"}


def make_app(
    service: Service, metrics: Metrics, *, keys: Sequence[str] = (), loopback: bool = True
) -> ASGIApp:
    """Make the application of a server.

    Args:
        keys: of which each request must bring one, if there are any.
        loopback: it listens on this machine alone.
    """
    routes = _Routes(service)

    async def on_error(request: Request, error: Exception) -> Response:
        found = _from_http(error) if isinstance(error, HTTPException) else as_api_error(error)
        metrics.reject(found.code)
        return found.response()

    async def show_metrics(_: Request) -> Response:
        stats = await service.engine.call(lambda llm: llm.stats())
        return Response(metrics.text(stats), media_type=CONTENT_TYPE)

    def post(path: str, handler: _Handler) -> Route:
        return Route(path, _caught(handler, on_error), methods=["POST"])

    def get(path: str, handler: _Handler) -> Route:
        return Route(path, _caught(handler, on_error), methods=["GET"])

    app = Starlette(
        routes=[
            post("/v1/chat/completions", routes.chat_completions),
            post("/v1/completions", routes.completions),
            get("/v1/models", routes.models),
            get("/v1/models/{name:path}", routes.model),
            post("/tokenize", routes.tokenize),
            post("/detokenize", routes.detokenize),
            get("/health", routes.health),
            get("/metrics", show_metrics),
        ],
        exception_handlers={HTTPException: on_error},
    )
    return Guard(app, keys=keys, loopback=loopback)


def _caught(
    handler: _Handler, on_error: Callable[[Request, Exception], Awaitable[Response]]
) -> _Handler:
    """Turn what a route raises into an answer here: Starlette would print a traceback of it."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            return await on_error(request, error)

    return run


def _from_http(error: HTTPException) -> ApiError:
    what = _WORDS.get(error.status_code, error.detail)
    return ApiError(error.status_code, what, code=what.replace(" ", "_"))


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = int(time.time())

    async def chat_completions(self, request: Request) -> Response:
        return await complete(self._service, request, is_chat=True)

    async def completions(self, request: Request) -> Response:
        return await complete(self._service, request, is_chat=False)

    async def models(self, _: Request) -> Response:
        found = [self._model(name) for name in self._service.names]
        # `models` is what Codex reads.
        return JSONResponse({"object": "list", "data": found, "models": found})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._service.check_model(name)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "minivllm",
            "max_model_len": self._service.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        body = await read_json(request, self._service.limits.body)
        is_chat = body.get("messages") is not None
        parsed = read_request(body, is_chat=is_chat)
        if len(parsed.prompts) > 1:
            raise LineProblem("invalid_field", "one prompt is tokenised at a time", key="prompt")
        self._service.check_model(parsed.model)
        found, _ = await self._service.read_prompt(parsed.prompts[0], parsed.params)
        ids = found["prompt_token_ids"]
        limit = self._service.max_model_len
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": limit})

    async def detokenize(self, request: Request) -> Response:
        body = await read_json(request, self._service.limits.body)
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            what = "tokens should be an array of token ids"
            raise LineProblem("invalid_field", what, key="tokens")
        found, _ = await self._service.read_prompt({"prompt_token_ids": tokens}, SamplingParams())
        text = self._service.tokenizer.decode(found["prompt_token_ids"], skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    async def health(self, _: Request) -> Response:
        if not self._service.healthy:
            raise ApiError(503, "no requests are taken", code="shutting_down", retry_after=5)
        return JSONResponse({"status": "ok"})
