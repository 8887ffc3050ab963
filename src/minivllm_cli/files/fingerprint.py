"""What a journal belongs to: the model and the rules that made its records, and each line's own key."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from minivllm_engine import __version__
from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.protocol.lines import RequestLine

SEED_RULE = "seed+index"
_SAMPLE_BYTES = 1 << 16
_NAMES = {
    "model": "model",
    "tokenizer": "tokenizer",
    "chat_template": "chat template",
    "seed_rule": "seed rule",
    "engine": "engine version",
    "dtype": "dtype",
}


def fingerprint_parts(model_path: Path, *, dtype: str) -> dict[str, str]:
    """Collect what answers depend on beside the lines: not device and concurrency, which may change.

    `dtype` is the configured one: `auto` stays `auto` on another device.
    """
    settings = _json(model_path / "tokenizer_config.json")
    templates = [json.dumps(settings.pop("chat_template", None)).encode()]
    files = [model_path / "chat_template.jinja"]
    files += sorted(model_path.glob("additional_chat_templates/*.jinja"))
    templates += [_content(file) for file in files if file.is_file()]
    tokenizer = _content(model_path / "tokenizer.json")
    return {
        "model": model_hash(model_path),
        "tokenizer": _digest([tokenizer, json.dumps(settings, sort_keys=True).encode()]),
        "chat_template": _digest(templates),
        "seed_rule": SEED_RULE,
        "engine": __version__,
        "dtype": dtype,
    }


def model_hash(model_path: Path) -> str:
    """Hash a model's configs, and names, sizes and ends of its weight files."""
    return _digest(_model_bytes(model_path))


def fingerprint(parts: dict[str, str]) -> str:
    """Hash all parts."""
    return _digest([json.dumps(parts, sort_keys=True).encode()])


def changed_parts(ours: dict[str, str], theirs: dict[str, Any]) -> list[str]:
    """Name, for people, the parts that differ."""
    names = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    return [_NAMES.get(key, key) for key in names]


def line_key(line: RequestLine, params: ResolvedSampling, **how: Any) -> str:
    """Hash of what a record depends on: prompt, sampling in force, what is copied, how it is made."""
    document = [
        line.id,
        line.kind,
        line.prompt,
        line.tools,
        line.template_kwargs,
        line.meta,
        None if line.batch is None else [line.batch.custom_id, line.batch.url, line.batch.model],
        [getattr(params, f.name) for f in fields(params) if f.name != "structured"],
        how,
        *([line.score] if line.score else []),
        *([params.structured.as_json()] if params.structured is not None else []),
    ]
    text = json.dumps(document, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _model_bytes(path: Path) -> Iterable[bytes]:
    for file in sorted(path.glob("*.safetensors")):
        yield f"{file.name} {file.stat().st_size}\n".encode()
        yield _ends(file)
    for name in ("model.safetensors.index.json", "config.json", "generation_config.json"):
        yield _content(path / name)


def _ends(path: Path) -> bytes:
    # Retrained weights have the same names and sizes; reading all of them would take minutes.
    with open(path, "rb") as file:
        start = file.read(_SAMPLE_BYTES)
        file.seek(max(path.stat().st_size - _SAMPLE_BYTES, 0))
        return start + file.read(_SAMPLE_BYTES)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _json(path: Path) -> dict[str, Any]:
    value = json.loads(_content(path) or b"{}")
    return value if isinstance(value, dict) else {}


def _digest(chunks: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for chunk in chunks:
        total.update(len(chunk).to_bytes(8, "little"))
        total.update(chunk)
    return "sha256:" + total.hexdigest()
