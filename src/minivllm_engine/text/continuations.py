"""From a prompt and its continuations to what is scored: where each continuation begins is decided here."""

from collections.abc import Mapping, Sequence
from typing import Any

from minivllm_engine.core.errors import RequestError
from minivllm_engine.core.request import Continuation, ReadyScore
from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.text.prompt import PromptTooLong, check_ids, encode_text, read_prompt
from minivllm_engine.text.tokenizer import Tokenizer

MAX_CONTINUATIONS = 1024
SCORE_KEYS = ("continuations", "continuation_token_ids", "prefix_token_id")


def read_score(
    item: Mapping[str, Any], tokenizer: Tokenizer, max_model_len: int | None = None
) -> ReadyScore:
    """Read one item of `LLM.score`.

    A continuation of a text prompt begins where the ids of both together leave those of the prompt alone,
    and has a token at least: its ids are always the end of those of the whole text. Behind messages, and
    where ids are given, both are encoded apart and joined.

    Args:
        item: a prompt mapping with `continuations` (texts) or `continuation_token_ids`, and maybe
            `prefix_token_id`, a token before the prompt. Only here may a prompt be empty.
        max_model_len: text that cannot fit is refused before it is encoded, which would take long.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        return _read(item, tokenizer, max_model_len)
    except PromptTooLong as error:
        limit = max_model_len or 0
        raise PromptTooLong(error.num_tokens, limit, answered=False) from None


def _read(item: Mapping[str, Any], tokenizer: Tokenizer, max_model_len: int | None) -> ReadyScore:
    if not isinstance(item, Mapping):
        raise RequestError("score: not an object", why=f"got {item!r}"[:200])
    key, given = _continuations_of(item)
    body = {name: value for name, value in item.items() if name not in SCORE_KEYS}
    # A prompt is one token shorter than the longest sequence that an answer needs; a score needs no more.
    room = None if max_model_len is None else max_model_len + 1
    prompt_ids, _ = read_prompt(body, tokenizer, room)
    prefix = _prefix_of(item, tokenizer)
    joins = "prompt" in body and key == "continuations"
    found = []
    for place, one in enumerate(given):
        try:
            if not joins:
                ids, num_bytes = _read_alone(one, key, tokenizer, room)
                cut = len(prompt_ids)
            else:
                whole = encode_text(body["prompt"] + one, tokenizer, room)
                cut = _common_prefix(whole, prompt_ids)
                ids, num_bytes = whole[cut:], _num_bytes(one)
        except PromptTooLong:
            raise
        except RequestError as error:
            raise RequestError(
                f"{key}[{place}]: {error.what}", why=error.why, code=error.code
            ) from None
        found.append(Continuation((*prefix, *prompt_ids[:cut]), tuple(ids), num_bytes))
    params = ResolvedSampling(seed=0, max_tokens=0)
    return ReadyScore((*prefix, *prompt_ids), tuple(found), params)


def _continuations_of(item: Mapping[str, Any]) -> tuple[str, Sequence[Any]]:
    keys = [key for key in SCORE_KEYS[:2] if key in item]
    if len(keys) != 1:
        what = "both" if keys else "neither"
        raise RequestError(
            "a score needs one of continuations, continuation_token_ids", why=f"got {what}"
        )
    key = keys[0]
    given = item[key]
    if not isinstance(given, list | tuple) or not given:
        raise RequestError(f"{key}: not a list with something in it", why=f"got {given!r}"[:200])
    if len(given) > MAX_CONTINUATIONS:
        raise RequestError(f"{key}: {len(given):,} are more than {MAX_CONTINUATIONS:,}")
    kind = str if key == "continuations" else list | tuple
    wrong = next((i for i, one in enumerate(given) if not isinstance(one, kind) or not one), None)
    if wrong is not None:
        what = "text" if kind is str else "list of token ids"
        raise RequestError(
            f"{key}[{wrong}]: not a {what}, or empty", why=f"got {given[wrong]!r}"[:200]
        )
    return key, given


def _prefix_of(item: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    prefix = item.get("prefix_token_id")
    if prefix is None:
        return ()
    if not isinstance(prefix, int) or isinstance(prefix, bool):
        raise RequestError("prefix_token_id: not an integer", why=f"got {prefix!r}"[:200])
    return tuple(check_ids([prefix], tokenizer))


def _read_alone(
    one: Any, key: str, tokenizer: Tokenizer, room: int | None
) -> tuple[list[int], int]:
    if key == "continuations":
        return encode_text(one, tokenizer, room), _num_bytes(one)
    ids = check_ids(one, tokenizer)
    return ids, sum(len(tokenizer.token_bytes(token_id)) for token_id in ids)


def _common_prefix(whole: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens with which both begin, leaving one of the whole at least."""
    most = min(len(whole) - 1, len(prompt))
    return next((i for i in range(most) if whole[i] != prompt[i]), most)


def _num_bytes(text: str) -> int:
    # A lone surrogate is read as U+FFFD, which has as many.
    return len(text.encode("utf-8", "surrogatepass"))
