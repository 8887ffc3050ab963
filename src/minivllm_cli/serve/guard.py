"""What every request passes before a route sees it: keys, hosts, sizes; and errors as OpenAI has them."""

import hashlib
import hmac
import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm_cli.serve.engine_thread import EngineStopped
from minivllm_engine.core.errors import EngineError
from minivllm_engine.protocol.lines import LineProblem
from minivllm_engine.protocol.strict_json import BadJson, encode_text, parse_object

_REQUEST_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        code: for programs; as of records.
        param: the key that it is about.
        retry_after: seconds after which the client may try again; None tells it not to.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """What OpenAI's clients read."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """Return the whole answer. Clients try again after 429 and 503, and never after 500."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        elif self.status >= 500:
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def as_api_error(error: Exception) -> ApiError:
    """Return what a client is told of an error of a request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LineProblem):
        message = f"{error.message}; {error.hint}" if error.hint else error.message
        return ApiError(400, message, code=error.code, param=error.key)
    if isinstance(error, EngineError):
        ours = ("engine_error", "non_finite_logits", "grammar_failed")
        status = 500 if error.code in ours else 503 if error.code == "grammars_busy" else 400
        message = ": ".join(part for part in (error.what, error.why) if part)
        return ApiError(status, message, code=error.code)
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), code="shutting_down", retry_after=5)
    return ApiError(500, f"unexpected {type(error).__name__}", code="engine_error")


async def read_json(request: Request, most_bytes: int) -> dict[str, Any]:
    """Read the body of a request as a JSON object.

    Raises:
        ApiError: it is too large, or no JSON object.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError(415, "Content-Type should be application/json", code="not_json")
    too_large = ApiError(413, f"the body has more than {most_bytes:,} bytes", code="body_too_large")
    if int(request.headers.get("content-length") or 0) > most_bytes:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            raise too_large
        parts.append(part)
    try:
        return parse_object(b"".join(parts).decode())
    except UnicodeDecodeError as error:
        what = f"the body is not UTF-8 (byte {error.start:,})"
        raise ApiError(400, what, code="invalid_json") from None
    except BadJson as error:
        what = f"{error.message}, at character {error.column:,}"
        raise ApiError(400, what, code="invalid_json") from None


class Guard:
    """Lets requests through to `app` that have a key, come to the right host, and gives each an id.

    Args:
        keys: of which one must be given; none are asked for where there are none.
        loopback: only names of this machine are accepted as Host: a page in a browser elsewhere can send
            requests here under a name of its own.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], loopback: bool) -> None:
        self._app, self._loopback = app, loopback
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        path = re.sub("/{2,}", "/", scope["path"])
        scope = {**scope, "path": path, "raw_path": path.encode(), "request_id": request_id}

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(b"x-request-id", request_id.encode())]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        refused = self._refusal(scope, headers)
        await (self._app if refused is None else refused.response())(scope, receive, sending)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> ApiError | None:
        if self._loopback and _host_name(headers.get("host", "")) not in _LOOPBACK:
            return ApiError(
                403, "Host should be a name of this machine: localhost", code="wrong_host"
            )
        open_to_all = scope["path"] == "/health" and scope["method"] in ("GET", "HEAD")
        if self._keys and not open_to_all and not self._is_known(headers):
            return ApiError(401, "no API key, or not one of this server", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit():
            return ApiError(400, "Content-Length is no number", code="invalid_header")
        return None

    def _is_known(self, headers: dict[str, str]) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode()).digest()
        # Every key is compared, each in constant time: how long it takes tells nothing.
        return sum(hmac.compare_digest(digest, known) for known in self._keys) > 0


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def event(document: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return b"data: " + encode_text(text) + b"\n\n"
