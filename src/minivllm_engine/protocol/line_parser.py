"""Lines of the input as requests: which kind a line is, what it asks for, what is wrong with it."""

from collections.abc import Mapping
from typing import Any

from minivllm_engine.core.errors import RequestError
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.protocol.fields import (
    OWN_KEYS,
    SAMPLING_KEYS,
    SCORE_KEYS,
    check_other_key,
    is_score,
    plain_reason,
    read_prompt,
    read_sampling,
    read_score_prompt,
    read_template_kwargs,
    read_tools,
)
from minivllm_engine.protocol.lines import (
    BadLine,
    BatchLine,
    Line,
    LineProblem,
    RequestLine,
)
from minivllm_engine.protocol.openai_batch import read_batch_line
from minivllm_engine.protocol.strict_json import BadJson, column_of_key, parse_object

_JSON_STARTS = ("{", "[", '"')


class LineParser:
    """Parses the lines of one pass over one input, in order: ids must be unique across them.

    Args:
        as_text: every line is a prompt, not JSON.
        defaults: sampling from flags that have no config key; a line's own value wins.
        forced: sampling that beats the line's.
        text_hint: what to say of a line that looks like plain text, where texts could be read as they are.
    """

    def __init__(
        self,
        *,
        as_text: bool = False,
        defaults: Mapping[str, Any] | None = None,
        forced: Mapping[str, Any] | None = None,
        text_hint: str | None = None,
    ) -> None:
        self._as_text = as_text
        self._defaults = dict(defaults or {})
        self._forced = dict(forced or {})
        self._text_hint = text_hint
        self._seen: set[int] = set()
        self._batch_url: str | None = None
        self._batch_model: str | None = None

    def parse(self, number: int, index: int, raw: bytes) -> Line:
        """Parse one line, which is not blank."""
        fallback = f"line-{number:06d}"
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            return self._not_utf8(number, index, fallback, error)
        if self._as_text:
            return RequestLine(number, index, fallback, "text", text, self._params({}))
        try:
            document = parse_object(text)
        except BadJson as error:
            line_id = self._free_id(fallback)
            is_plain = (
                error.message.startswith("not JSON") and text.lstrip()[:1] not in _JSON_STARTS
            )
            hint = self._text_hint if is_plain else None
            return BadLine(
                number, index, line_id, "invalid_json_line", error.message, error.column, hint
            )
        return self._document(number, index, fallback, document, text)

    def single(self, prompt: str, *, chat: bool) -> RequestLine:
        """Return the request of `--prompt`: a user message, or the text as it is."""
        params = self._params({})
        if chat:
            messages = [{"role": "user", "content": prompt}]
            return RequestLine(None, 0, "prompt", "messages", messages, params)
        return RequestLine(None, 0, "prompt", "prompt", prompt, params)

    def _document(
        self, number: int, index: int, fallback: str, document: dict[str, Any], text: str
    ) -> Line:
        is_batch = "custom_id" in document or {"method", "url", "body"} <= document.keys()
        id_key = "custom_id" if is_batch else "id"
        given = document.get(id_key)
        id_ok = isinstance(given, str | int) and not isinstance(given, bool) and given != ""
        line_id: str | int = given if id_ok and given is not None else fallback
        batch = _batch_shape(document) if is_batch else None
        try:
            if given is not None and not id_ok:
                raise LineProblem(
                    "invalid_field", f"{id_key} should be a string or a number", key=id_key
                )
            if not self._claim(line_id):
                code = "duplicate_custom_id"
                what = f"{id_key} {line_id!r} was used by an earlier line"
                line_id = self._free_id(fallback)
                raise LineProblem(code, what, key=id_key)
            if is_batch:
                return self._batch(number, index, line_id, document)
            return self._own(number, index, line_id, document)
        except LineProblem as error:
            column = column_of_key(text, error.key) if error.key else 1
            meta = {} if is_batch else _meta(document)
            return BadLine(
                number, index, line_id, error.code, error.message, column, error.hint, meta, batch
            )

    def _own(self, number: int, index: int, line_id: str | int, document: dict[str, Any]) -> Line:
        meta = _meta(document)
        for key in meta:
            check_other_key(key, document)
        if is_score(document):
            kind, prompt, score = read_score_prompt(document)
            params = SamplingParams()
        else:
            (kind, prompt), score = read_prompt(document), {}
            params = self._params(read_sampling(document))
        return RequestLine(
            number,
            index,
            line_id,
            kind,
            prompt,
            params,
            tools=read_tools(document),
            template_kwargs=read_template_kwargs(document),
            meta=meta,
            score=score,
        )

    def _batch(self, number: int, index: int, line_id: str | int, document: dict[str, Any]) -> Line:
        found = read_batch_line(document)
        self._same_as_first(found.shape)
        line = RequestLine(
            number,
            index,
            line_id,
            found.kind,
            found.prompt,
            self._params(found.sampling),
            tools=read_tools(found.body),
            template_kwargs=read_template_kwargs(found.body),
            batch=found.shape,
        )
        if line.params.prompt_logprobs is not None and len(line.parts) > 1:
            what = "prompt_logprobs is supported for one prompt a line"
            raise LineProblem("invalid_field", what, key="prompt")
        return line

    def _same_as_first(self, shape: BatchLine) -> None:
        self._batch_url = self._batch_url or shape.url
        if shape.url != self._batch_url:
            what = f"url {shape.url} differs from {self._batch_url} of the lines before"
            raise LineProblem("url_mismatch", what, key="url")
        self._batch_model = self._batch_model or shape.model
        if shape.model is not None and shape.model != self._batch_model:
            what = f"model {shape.model!r} differs from {self._batch_model!r} of the lines before"
            raise LineProblem("model_mismatch", what, key="model")

    def _params(self, own: dict[str, Any]) -> SamplingParams:
        try:
            return SamplingParams.create(**(self._defaults | own | self._forced))
        except RequestError as error:
            key = error.what.partition(":")[0]
            message = plain_reason(error.what)
            message = f"{message} ({error.why})" if error.why else message
            raise LineProblem(error.code, message, key=key, hint=error.hint) from None

    def _claim(self, line_id: str | int) -> bool:
        """Take an id; False if it is taken. Hashes keep the memory of a long file small."""
        mark = hash(str(line_id))
        if mark in self._seen:
            return False
        self._seen.add(mark)
        return True

    def _free_id(self, wanted: str) -> str:
        candidate, attempt = wanted, 1
        while not self._claim(candidate):
            attempt += 1
            candidate = f"{wanted}-{attempt}"
        return candidate

    def _not_utf8(
        self, number: int, index: int, fallback: str, error: UnicodeDecodeError
    ) -> BadLine:
        line_id = self._free_id(fallback)
        is_utf16 = error.object[:2] in (b"\xff\xfe", b"\xfe\xff")
        hint = "the file looks like UTF-16; save it as UTF-8" if is_utf16 else None
        message = f"not UTF-8 (byte 0x{error.object[error.start]:02x})"
        column = len(error.object[: error.start].decode("utf-8", "replace")) + 1
        return BadLine(number, index, line_id, "invalid_json_line", message, column, hint)


def _meta(document: dict[str, Any]) -> dict[str, Any]:
    own = OWN_KEYS | SAMPLING_KEYS | (SCORE_KEYS if is_score(document) else frozenset())
    return {k: v for k, v in document.items() if k not in own}


def _batch_shape(document: dict[str, Any]) -> BatchLine:
    custom_id, url = document.get("custom_id"), document.get("url")
    body = document.get("body")
    model = body.get("model") if isinstance(body, dict) else None
    return BatchLine(
        custom_id if isinstance(custom_id, str) else None,
        url if isinstance(url, str) else "/v1/chat/completions",
        model if isinstance(model, str) else None,
    )
