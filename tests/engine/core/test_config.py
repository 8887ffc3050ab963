"""The config's types, units, and the errors of wrong values."""

from collections.abc import Callable

import pytest

from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.errors import ConfigError, RequestError
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.core.units import format_size, parse_count, parse_size


@pytest.mark.parametrize(
    ("text", "number"),
    [(5, 5), ("32_768", 32768), ("32k", 32000), ("32K", 32768), ("2M", 2**21), (" 7 ", 7)],
)
def test_counts(text: object, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (5, 5),
        ("2GiB", 2**31),
        ("5GB", 5 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("512", 512),
        ("1k", 1000),
    ],
)
def test_sizes(text: object, number: int) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "1e3", "5GB", True, None, 1.0, "５"])
def test_what_is_no_count(text: object) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_count(text)


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e3", "5XB", True, None, 1.0])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@pytest.mark.parametrize("read", [parse_count, parse_size])
def test_a_number_without_end_is_refused_as_one(read: Callable[[object], int]) -> None:
    with pytest.raises(ValueError, match=r"has 9,999 characters"):
        read("9" * 9_999)


def test_sizes_are_printed_in_the_largest_fitting_unit() -> None:
    assert format_size(1023) == "1023 B"
    assert format_size(10_100_736) == "9.63 MiB"
    assert format_size(2**41) == "2.00 TiB"


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"engine": {"max_num_sqs": 1}}, "engine.max_num_sqs"),
        ({"engine": {"max_num_seqs": True}}, "engine.max_num_seqs"),
        ({"engine": {"max_num_seqs": 0}}, "engine.max_num_seqs"),
        ({"engine": {"dtype": "int8"}}, "engine.dtype"),
        ({"cache": {"block_size": 20}}, "cache.block_size"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
        ({"motor": {}}, "motor"),
    ],
)
def test_wrong_values_are_named(sections: dict, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.create(**sections)
    assert path in caught.value.what


@pytest.mark.parametrize(
    ("sections", "what", "hint"),
    [
        (
            {"engine": {"max_num_seq": 3}},
            "unknown key engine.max_num_seq",
            'engine={"max_num_seqs": ...}',
        ),
        (
            {"engine": {"block_size": 64}},
            "unknown key engine.block_size: block_size belongs to section cache",
            'cache={"block_size": ...}',
        ),
        ({"engine": {"xyzzy": 1}}, "unknown key engine.xyzzy", None),
        ({"engin": {}}, "unknown section engin", "engine"),
    ],
)
def test_an_unknown_key_is_told_with_its_section_and_the_nearest_name(
    sections: dict, what: str, hint: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.create(**sections)
    assert (caught.value.what, caught.value.why, caught.value.hint) == (what, None, hint)


def test_the_constructor_of_sampling_params_raises_our_own_errors() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_token=3)
    assert caught.value.what == "max_token: no such sampling parameter"
    assert caught.value.hint == "max_tokens"
    for theirs, ours in (("max_new_tokens", "max_tokens"), ("bad_words", None)):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{theirs: 3})
        assert caught.value.hint == ours
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_tokens=0)
    assert caught.value.what.startswith("max_tokens: ") and caught.value.why == "got 0"


def test_the_config_is_frozen() -> None:
    config = EngineConfig.create(engine={"dtype": "bfloat16", "max_model_len": "4K"})
    assert (config.engine.dtype, config.engine.max_model_len) == ("bf16", 4096)
    with pytest.raises(Exception, match="frozen"):
        config.engine.dtype = "fp32"


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": "0"},
        {"top_p": 1.5},
        {"top_k": -2},
        {"max_tokens": 0},
        {"max_token": 1},
        {"n": 0},
        {"stop": [""]},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {1: float("inf")}},
        {"seed": 0.5},
        {"stop_token_ids": ["a"]},
        {"logprobs": 101},
        {"ignore_eos": 1},
        {"stop_token_ids": range(200_000)},
        {"stop_token_ids": list(range(200_000))},
        {"stop": ["x"] * 200_000},
    ],
)
def test_wrong_sampling_params_name_their_key(values: dict) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.create(**values)
    assert next(iter(values)) in caught.value.what
    assert caught.value.code == "invalid_field"
