"""Records: one JSON object for each request, in our shape; batch lines get OpenAI's (openai_records.py)."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from minivllm_engine.core.errors import EngineError
from minivllm_engine.core.outputs import CompletionOutput, ContinuationScore, RequestOutput
from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.core.structured import Structured
from minivllm_engine.protocol.lines import BadLine, Line, RequestLine
from minivllm_engine.protocol.openai_records import openai_answer, openai_error
from minivllm_engine.protocol.shapes import position_record, prompt_records, usage_record

if TYPE_CHECKING:
    from minivllm_engine.text.tokenizer import Tokenizer

SCHEMA_VERSION = 1
_ALWAYS_SHOWN = ("temperature", "top_p", "top_k", "max_tokens", "seed")
_NEUTRAL = ResolvedSampling(seed=0)


def ok_record(
    line: RequestLine,
    output: RequestOutput,
    *,
    params: ResolvedSampling,
    tokenizer: "Tokenizer",
    truncated: int = 0,
    strip_thinking: bool = False,
) -> dict[str, Any]:
    """Return the record of an answered request. `params` is the sampling in force."""
    if line.batch is not None:
        return openai_answer(line, line.batch, output, tokenizer, strip_thinking)
    if output.scores is not None:
        return _score_record(line, output, output.scores, tokenizer)
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "id": line.id,
        "index": line.index,
        "line": line.number,
        "status": "ok",
        "outputs": [_output(o, tokenizer, strip_thinking) for o in output.outputs],
        "usage": usage_record(output.usage, tokenizer),
        "timing": _timing(output),
        "sampling": _sampling(params),
        "error": None,
        "meta": line.meta,
    }
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = prompt_records(output.prompt_logprobs, tokenizer)
    if truncated:
        record["truncated"] = truncated
    return record


def _score_record(
    line: RequestLine,
    output: RequestOutput,
    scores: list[ContinuationScore],
    tokenizer: "Tokenizer",
) -> dict[str, Any]:
    usage = usage_record(output.usage, tokenizer)
    return {
        "schema_version": SCHEMA_VERSION,
        "id": line.id,
        "index": line.index,
        "line": line.number,
        "status": "ok",
        "scores": [
            {
                "index": score.index,
                "logprob": score.logprob,
                "is_greedy": score.is_greedy,
                "num_bytes": score.num_bytes,
                "token_ids": list(score.token_ids),
                "token_logprobs": list(score.logprobs),
            }
            for score in scores
        ],
        "usage": {**usage, "scored_tokens": output.usage.scored_tokens},
        "timing": _timing(output),
        "error": None,
        "meta": line.meta,
    }


def error_record(
    line: Line,
    code: str,
    message: str,
    hint: str | None = None,
    *,
    usage: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the record of a request that failed. `usage` is what is known of its tokens."""
    error: dict[str, Any] = {"code": code, "message": message}
    if hint:
        error["hint"] = hint
    if line.batch is not None:
        return openai_error(line, line.batch, error)
    return {
        "schema_version": SCHEMA_VERSION,
        "id": line.id,
        "index": line.index,
        "line": line.number,
        "status": "error",
        "outputs": [],
        "usage": usage or {},
        "error": error,
        "meta": line.meta,
    }


def bad_line_record(line: BadLine) -> dict[str, Any]:
    """Return the record of a line that could not be run."""
    return error_record(line, line.code, line.message, line.hint)


def engine_error_record(
    line: RequestLine,
    error: EngineError,
    hint: str | None,
    *,
    usage: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the record of a request that the engine refused or gave up."""
    message = f"{error.what}: {error.why}" if error.why else error.what
    return error_record(line, error.code, message, hint, usage=usage)


def record_failed(record: dict[str, Any]) -> bool:
    """Tell whether it is the record of a failure, in either shape."""
    if "response" in record:
        return bool(record["response"]["status_code"] >= 400)
    return bool(record["status"] == "error")


def error_code(record: dict[str, Any]) -> str:
    """Return the `error.code` of a failed record, in either shape."""
    error = record["response"]["body"]["error"] if "response" in record else record["error"]
    return str(error["code"])


def record_texts(record: dict[str, Any]) -> list[str]:
    """Return the answers in a record, one for each output; an empty one for a failure.

    Of scores it is one text: the sums of the continuations, with tabs between them.
    """
    if record_failed(record):
        return [""]
    if "scores" in record:
        return ["\t".join(f"{score['logprob']:.6f}" for score in record["scores"])]
    if "response" in record:
        choices = record["response"]["body"]["choices"]
        return [c["message"]["content"] if "message" in c else c["text"] for c in choices]
    return [output["text"] for output in record["outputs"]]


def finish_reasons(record: dict[str, Any]) -> list[str]:
    """Return how the outputs of a record ended. OpenAI's shape has one word for `length` and `context`."""
    if record_failed(record) or "scores" in record:
        return []
    if "response" in record:
        return [c["finish_reason"] for c in record["response"]["body"]["choices"]]
    return [output["finish_reason"] for output in record["outputs"]]


def _output(output: CompletionOutput, tokenizer: "Tokenizer", strip: bool) -> dict[str, Any]:
    reason = output.finish_reason
    logprobs = output.logprobs
    return {
        "index": output.index,
        "text": output.text,
        "reasoning": None if strip else output.reasoning,
        "finish_reason": str(reason) if reason is not None else None,
        "stop_reason": output.stop_reason,
        "token_ids": None if logprobs is None else list(output.token_ids),
        "logprobs": None if logprobs is None else [position_record(p, tokenizer) for p in logprobs],
    }


def _timing(output: RequestOutput) -> dict[str, Any]:
    timing = output.timing
    seconds = {
        "queue_s": timing.queue_s,
        "ttft_s": timing.ttft_s,
        "tpot_s": timing.tpot_s,
        "e2e_s": timing.e2e_s,
    }
    rounded = {k: None if v is None else round(v, 6) for k, v in seconds.items()}
    return {**rounded, "preemptions": timing.preemptions}


def _sampling(params: ResolvedSampling) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for field in fields(ResolvedSampling):
        name, value = field.name, getattr(params, field.name)
        if name in _ALWAYS_SHOWN or value != getattr(_NEUTRAL, name):
            shown[name] = value.as_json() if isinstance(value, Structured) else value
    return shown
