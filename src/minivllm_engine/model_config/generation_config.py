"""generation_config.json: the sampling that a model's makers recommend, and its end ids."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from minivllm_engine.core.config import SamplingOptions, message
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import escape, listed
from minivllm_engine.core.sampling_params import OTHER_NAMES

logger = logging.getLogger(__name__)

MOST_END_IDS = 1024
_KEYS = {
    **{key: key for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **{key: key for key in ("presence_penalty", "frequency_penalty")},
    "max_new_tokens": "max_tokens",
}
_COPY_AGAIN = "Copy the file again from where the model came from."


# Of the names in OTHER_NAMES: values that change nothing, and keys that have their own meaning here.
_UNSET: tuple[Any, ...] = (None, False, 0, 1, 1.0, [], {}, "")
_READ_OTHERWISE = frozenset({"do_sample", "eos_token_id", "max_length"})


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Defaults of requests, below what a user configures; and ids that end an output."""

    sampling: SamplingOptions = SamplingOptions()
    eos_token_ids: tuple[int, ...] = ()


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a checkpoint's file.

    Raises:
        CheckpointError: the file cannot be read, is not JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read",
            why=error.strerror or str(error),
            hint="See that it is there and that you may read it.",
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read", why=escape(error), hint=_COPY_AGAIN
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds no JSON object", why=f"but {type(value).__name__}", hint=_COPY_AGAIN
        )
    return value


def id_tuple(value: object, path: Path) -> tuple[int, ...]:
    """Return token ids that a config writes as one number, as a list, or as null.

    Raises:
        CheckpointError: it is something else.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if len(ids) > MOST_END_IDS:
        raise CheckpointError(
            f"{path}: eos_token_id has {len(ids):,} ids",
            why=f"more than {MOST_END_IDS:,} are not supported",
            hint=_COPY_AGAIN,
        )
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(
            f"{path}: eos_token_id is no token id",
            why=f"got {escape(repr(value))}",
            hint="It is a whole number, or a list of them.",
        )
    return tuple(ids)


def load_generation_config(model_path: Path) -> GenerationConfig:
    """Read `generation_config.json` in `model_path`; a model without one recommends nothing.

    `do_sample: false` means greedy, whatever temperature stands beside it.

    Raises:
        CheckpointError: the file is broken or holds a value out of range.
    """
    path = model_path / "generation_config.json"
    if not path.exists():
        return GenerationConfig()
    raw = read_json_object(path)
    values = {ours: raw[key] for key, ours in _KEYS.items() if raw.get(key) is not None}
    # What transformers writes where nothing was set asks for nothing.
    unread = [key for key, value in raw.items() if key in OTHER_NAMES and value not in _UNSET]
    unread = [key for key in unread if key not in _KEYS and key not in _READ_OTHERWISE]
    if unread:
        are = "is" if len(unread) == 1 else "are"
        logger.warning("%s: %s %s not supported and left out", path, listed(unread), are)
    if raw.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        sampling = SamplingOptions.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        ours = ".".join(str(part) for part in first["loc"])
        key = next((key for key, name in _KEYS.items() if name == ours), ours)
        raise CheckpointError(
            f"{path}: {key}: {message(first)}",
            why=f"got {escape(repr(first['input']))}",
            hint="Correct it there, or take it out: it only recommends how to sample.",
        ) from None
    return GenerationConfig(sampling, id_tuple(raw.get("eos_token_id"), path))
