"""`generate` with a form: by flags, in lines, and what is wrong with one."""

import json
from pathlib import Path

import pytest

from minivllm_cli.batch.flags import GenerateFlags
from minivllm_cli.batch.prompts import Overrides
from minivllm_cli.config.flags import ThinkFlags
from minivllm_cli.errors import CliError
from minivllm_cli.files.fingerprint import line_key
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.protocol.line_parser import LineParser
from minivllm_engine.protocol.lines import RequestLine


def form_of(**flags: object) -> dict[str, object] | None:
    form = Overrides.read(GenerateFlags(**flags), ThinkFlags()).defaults.get("structured")
    return form and form.as_json()


def test_flags_say_the_form(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "form.lark"
    schema.write_text('{"type": "null"}')
    grammar.write_text('start: "a"')
    assert form_of() is None
    assert form_of(json_schema=schema) == {"json_schema": {"type": "null"}}
    assert form_of(grammar=grammar) == {"grammar": 'start: "a"'}
    assert form_of(regex="a+") == {"regex": "a+"}
    assert form_of(choice=["a", "b"]) == {"choice": ["a", "b"]}


def test_what_is_wrong_is_told_with_its_flag(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    for flags, word in (
        ({"json_schema": bad}, "--json-schema: json_schema is not JSON"),
        ({"json_schema": tmp_path / "none"}, "cannot be read"),
        ({"regex": "a", "choice": ["b"]}, "--regex and --choice exclude each other"),
        ({"choice": ["a", ""]}, "--choice: "),
    ):
        with pytest.raises(CliError, match=word):
            form_of(**flags)


def test_a_line_says_more_than_a_flag_and_its_record_depends_on_it() -> None:
    parser = LineParser(defaults=Overrides.read(GenerateFlags(regex="a"), ThinkFlags()).defaults)
    keys = set()
    for number, own in enumerate(({}, {"structured": {"regex": "b"}})):
        text = json.dumps({"id": 0 if number else "0x", "prompt": "x", **own})
        line = parser.parse(number, 0, text.encode())
        assert isinstance(line, RequestLine)
        assert line.params.structured is not None
        assert line.params.structured.text == ("b" if own else "a")
    for form in (None, {"regex": "a"}, {"regex": "b"}):
        params = SamplingParams.create(structured=form).resolved(seed=0)
        keys.add(line_key(line, params))
    assert len(keys) == 3
