"""What a user can set of the engine: frozen, typed and strict. Sections and keys are those of the YAML."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from minivllm_engine.core.errors import ConfigError
from minivllm_engine.core.suggest import suggest
from minivllm_engine.core.units import parse_count, parse_fraction, parse_size

# A remedy as the command line writes it, and as Python does.
USE_CPU = '--device cpu (in Python: engine={"device": "cpu"})'

_DTYPE_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def _not_a_bool(value: object) -> object:
    # To pydantic true is the number 1; to a user of YAML it is a mistake.
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a number")
    return value


def _strings(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise ValueError("not a string or a list of strings")
    return tuple(value)


def _device_name(value: object) -> object:
    return "cuda" if value == "gpu" else value


def _dtype_name(value: object) -> object:
    return _DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(parse_count)]
ByteSize = Annotated[int, BeforeValidator(parse_size)]
Fraction = Annotated[float, BeforeValidator(parse_fraction)]
Number = Annotated[float, BeforeValidator(_not_a_bool)]
Strings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_strings)]
Integer = Annotated[int, BeforeValidator(_not_a_bool)]


def message(error: Mapping[str, Any]) -> str:
    """Return the text of one of pydantic's errors."""
    text: str = error["msg"]
    return text.removeprefix("Value error, ")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class EngineOptions(_Section):
    """Section `engine`. None stands for `auto`: decided when the model is known."""

    device: Annotated[Literal["auto", "cpu", "cuda"], BeforeValidator(_device_name)] = "auto"
    max_num_seqs: Annotated[Count, Field(ge=1)] | None = None
    max_model_len: Annotated[Count, Field(ge=2)] | None = None
    max_num_batched_tokens: Annotated[Count, Field(ge=1)] | None = None
    gpu_memory_utilization: Annotated[Fraction, Field(gt=0, le=1)] = 0.9
    cpu_memory: Annotated[ByteSize, Field(ge=1)] | None = None
    dtype: Annotated[Literal["auto", "fp32", "bf16", "fp16"], BeforeValidator(_dtype_name)] = "auto"
    state_dtype: Annotated[Literal["auto", "fp32", "bf16"], BeforeValidator(_dtype_name)] = "auto"
    attention_backend: Literal["auto", "reference", "triton", "flash"] = "auto"
    gated_delta_prefill: Literal["auto", "reference", "fla"] = "auto"
    gated_delta_decode: Literal["auto", "reference", "fla", "triton"] = "auto"

    @property
    def can_capture(self) -> bool:
        """Can decode steps be CUDA graphs? The reference operations plan them on the host."""
        return "reference" not in (self.attention_backend, self.gated_delta_decode)

    @property
    def can_capture_prompts(self) -> bool:
        """Can steps with prompts be CUDA graphs? Other operations than the default ones plan them anew."""
        chosen = self.attention_backend in ("auto", "triton") and self.gated_delta_prefill == "auto"
        return self.can_capture and chosen


class CacheOptions(_Section):
    """Section `cache`. `block_size` is in tokens, a multiple of 16.

    `snapshot_memory` is for copies of recurrent states that later prompts can start from.
    """

    prefix_cache: bool = True
    block_size: Annotated[Count, Field(ge=16, multiple_of=16)] = 64
    num_blocks: Annotated[Count, Field(ge=1)] | None = None
    snapshot_memory: Annotated[ByteSize, Field(ge=0)] | None = None


class GraphOptions(_Section):
    """Section `graph`: CUDA graphs of steps. None stands for `auto`: on with CUDA.

    `reserve` is the memory that is kept for them, where it is known better than the planner's estimate.
    """

    enabled: bool | None = None
    max_batch: Annotated[Count, Field(ge=1)] = 256
    reserve: Annotated[ByteSize, Field(ge=0)] | None = None


class SamplingOptions(_Section):
    """Section `sampling`: defaults of requests. None leaves the model's generation config to decide."""

    temperature: Annotated[Number, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[Integer, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    min_tokens: Annotated[Count, Field(ge=0)] = 0
    seed: Annotated[Integer, Field(ge=0, lt=2**63)] = 0
    stop: Strings = ()
    ignore_eos: bool = False


class EngineConfig(_Section):
    """All sections that the engine owns."""

    engine: EngineOptions = EngineOptions()
    cache: CacheOptions = CacheOptions()
    graph: GraphOptions = GraphOptions()
    sampling: SamplingOptions = SamplingOptions()

    @classmethod
    def create(cls, **sections: Mapping[str, Any]) -> "EngineConfig":
        """Build a config from plain mappings, one a section.

        Raises:
            ConfigError: an unknown section or key, or a value of the wrong type or out of range.
        """
        for name, values in sections.items():
            if not isinstance(values, Mapping):
                raise ConfigError(f"{name}: not a mapping of keys to values", why=f"got {values!r}")
        try:
            return cls.model_validate({name: dict(values) for name, values in sections.items()})
        except ValidationError as error:
            first = error.errors()[0]
            path = [str(part) for part in first["loc"] if isinstance(part, str)]
            if first["type"] == "extra_forbidden":
                raise _unknown(path) from None
            what = f"{'.'.join(path)}: {message(first)}"
            raise ConfigError(what, why=f"got {first['input']!r}") from None


def _unknown(path: list[str]) -> ConfigError:
    """What to say about a section, or a section and a key, that does not exist. The hint is Python."""
    sections = {name: type(value) for name, value in EngineConfig()}
    if len(path) == 1:
        return ConfigError(f"unknown section {path[0]}", hint=suggest(path[0], sections))
    section, key = path
    owner = next((name for name, kind in sections.items() if key in kind.model_fields), None)
    if owner is not None:
        what = f"unknown key {section}.{key}: {key} belongs to section {owner}"
        return ConfigError(what, hint=f'{owner}={{"{key}": ...}}')
    near = suggest(key, sections[section].model_fields)
    hint = f'{section}={{"{near}": ...}}' if near else None
    return ConfigError(f"unknown key {section}.{key}", hint=hint)
