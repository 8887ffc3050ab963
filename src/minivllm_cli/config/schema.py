"""The sections of a config file: which keys exist, and what a key's value may be."""

from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from minivllm_cli.config.bench_options import BenchOptions
from minivllm_engine.core.config import CacheOptions, EngineOptions, GraphOptions, SamplingOptions
from minivllm_engine.core.suggest import suggest


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ChatOptions(_Section):
    """Section `chat`: the REPL. None leaves the choice to the template."""

    system: str | None = None
    think: bool | None = None
    thinking: Literal["show", "fold", "hide"] = "fold"
    stats: bool = True
    history: bool = True


class OutputOptions(_Section):
    """Section `output`: what is shown of a run."""

    progress: Literal["auto", "bar", "plain", "json", "off"] = "auto"


class _Top(_Section):
    model: str = "demo"


SECTIONS: dict[str, type[BaseModel]] = {
    "engine": EngineOptions,
    "cache": CacheOptions,
    "graph": GraphOptions,
    "sampling": SamplingOptions,
    "chat": ChatOptions,
    "bench": BenchOptions,
    "output": OutputOptions,
}


@cache
def all_paths() -> tuple[str, ...]:
    """Return every key there is, in the order in which a config is printed."""
    nested = (f"{name}.{key}" for name, kind in SECTIONS.items() for key in kind.model_fields)
    return ("model", *nested)


def default_of(path: str) -> Any:
    """Return the value of a key that nobody set."""
    section, key = _split(path)
    return _kind(section).model_fields[key].get_default(call_default_factory=True)


def is_text(path: str) -> bool:
    """Say whether this key holds one string, which an environment variable gives as it stands."""
    section, key = _split(path)
    return _kind(section).model_fields[key].annotation in (str, str | None)


def accepts_auto(path: str) -> bool:
    """Say whether this key may be `auto` for "decide when the model is known"."""
    section, _ = _split(path)
    return section in ("engine", "cache", "graph") and default_of(path) is None


def metavar_of(path: str) -> str:
    """Tell what stands for a key's value in help: its choices, or the kind of it."""
    section, key = _split(path)
    kind: Any = _kind(section).model_fields[key].annotation
    while get_origin(kind) in (Annotated, Union, UnionType):  # `Annotated[int, ...] | None`
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return f"<{'|'.join(get_args(kind))}>"
    if get_origin(kind) is tuple:
        return "LIST"
    return {int: "N", float: "X"}.get(kind, "TEXT")


def check_value(path: str, value: Any) -> tuple[Any, str | None]:
    """Return the value as its section stores it, and None; or the value, and what is wrong with it."""
    section, key = _split(path)
    if value == "auto" and accepts_auto(path):
        return None, None
    try:
        checked = _kind(section).model_validate({key: value})
    except ValidationError as error:
        return value, _explain(error, value)
    return getattr(checked, key), None


def unknown_key(path: str) -> tuple[str, str | None]:
    """Say what is wrong with an unknown key, and the whole path of the one that was probably meant."""
    section, _, key = path.rpartition(".")
    owners = [p for p in all_paths() if p.rpartition(".")[2] == key]
    if owners:
        owner = owners[0].rpartition(".")[0]
        return f"unknown key {path}: {key} belongs to section {owner}", owners[0]
    if section in SECTIONS:
        name = suggest(key, SECTIONS[section].model_fields)
        near = name and f"{section}.{name}"
    else:
        near = suggest(path, all_paths())
    by_key = {p.rpartition(".")[2]: p for p in all_paths()}
    return f"unknown key {path}", near or by_key.get(suggest(key, by_key) or "")


def _split(path: str) -> tuple[str, str]:
    section, _, key = path.rpartition(".")
    return section, key


def _kind(section: str) -> type[BaseModel]:
    return SECTIONS[section] if section else _Top


def _explain(error: ValidationError, value: Any) -> str:
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    kind = first["type"]
    if kind == "bool_type":
        return "write true or false"
    if kind == "string_type":
        return (
            "should be a string; put it in quotes"
            if not isinstance(value, dict)
            else "should be a string"
        )
    return message.replace("should be a valid tuple", "should be a string or a list of strings")
