"""YAML as we read and write it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm_cli.config.yaml import dump_value, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("9e-1", 0.9),
        ("1.0e3", 1000.0),
        (".5", 0.5),
        ("017", 17),
        ("32_768", 32768),
        ("-1", -1),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("=", "="),
        ("no", "no"),
        ("off", "off"),
        ("[yes, 'no', on]", ["yes", "no", "on"]),
        ("32K", "32K"),
        ("0x10", "0x10"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(_SCALARS | st.lists(_SCALARS, max_size=4))
def test_what_is_written_is_read_back(value: Any) -> None:
    text = dump_value(value)
    assert "\n" not in text
    assert parse_value(text) == value


@pytest.mark.parametrize(
    "text",
    ["1e-3", "true", "017", "null", "~", "32_768", "", " x", "a\nb", "-.5e3", "\x85", "a\u2028"],
)
def test_strings_that_look_like_something_else_stay_strings(text: str) -> None:
    assert parse_value(dump_value(text)) == text
