"""Forms compiled: what is refused and by which name, what is allowed, and what is kept."""

import ctypes
import json
import random
import threading

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm_engine.core.errors import EngineError, RequestError
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.core.structured import Structured
from minivllm_engine.structured import compiler as compiler_module
from minivllm_engine.structured.compiler import MOST_KEPT, Compiler
from minivllm_engine.structured.matcher import Guide, Matcher
from support.byte_tokenizer import byte_tokenizer

END = 258
COMPILER = Compiler(320, byte_tokenizer(), [END])


def matcher(form: dict, *, after_thinking: bool = False) -> Matcher:
    read = Structured.read(form)
    assert read is not None
    return COMPILER.matcher(read, after_thinking=after_thinking)


def allowed(one: Matcher) -> list[int]:
    bits = int.from_bytes(one.mask(), "little")
    return [i for i in range(320) if bits >> i & 1]


def accepts(form: dict, text: str, *, after_thinking: bool = False) -> bool:
    one = matcher(form, after_thinking=after_thinking)
    for byte in text.encode():
        if byte not in allowed(one):
            return False
        one.consume(byte)
    return one.is_stopped or END in allowed(one)


UNSUPPORTED = {
    "not": {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "a"}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "http://x/y": {"$ref": "http://x/y"},
    "format": {"type": "string", "format": "zzz"},
    "look-ahead": {"type": "string", "pattern": "(?=a)b"},
    "backreferences": {"type": "string", "pattern": "(a)\\1"},
    "minimum": {"type": "integer", "minimum": 5, "maximum": 3},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 5}]},
    "no answer": False,
    "NoExtension": {"$ref": "#"},
}


@pytest.mark.parametrize("word", UNSUPPORTED)
@pytest.mark.parametrize("after_thinking", [False, True])
def test_what_cannot_be_held_to_is_refused_by_its_name(word: str, after_thinking: bool) -> None:
    with pytest.raises(RequestError) as caught:
        matcher({"json_schema": UNSUPPORTED[word]}, after_thinking=after_thinking)
    assert caught.value.code == "unsupported_schema"
    assert word in str(caught.value)


def test_options_in_a_schema_weaken_nothing() -> None:
    lenient = {"x-guidance": {"lenient": True, "coerce_one_of": True}}
    for schema in (UNSUPPORTED["not"], UNSUPPORTED["oneOf"]):
        with pytest.raises(RequestError):
            matcher({"json_schema": {**schema, **lenient}})
    spaces = {"x-guidance": {"whitespace_pattern": "x*"}, "type": "array", "maxItems": 0}
    assert not accepts({"json_schema": spaces}, "[xx]")


def test_white_space_is_bounded() -> None:
    form = {"json_schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 1}}
    assert accepts(form, f"[{' ' * 24}1]")
    assert not accepts(form, f"[{' ' * 25}1]")


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"enum": list(range(2001))}, "2,001"),
        ({"properties": {f"p{i}": {} for i in range(257)}}, "257"),
        ({"multipleOf": 10_001}, "10,001"),
        # Compiled, the second would need all memory.
        ({"allOf": [{"multipleOf": 9999}, {"multipleOf": 9998}]}, "99,970,002"),
        ({"multipleOf": 0.30007}, "30,007"),
        ({"multipleOf": 0}, "above 0"),
        ({"enum": ["x" * 70_000]}, "65,536"),
        ({"allOf": [{} for _ in range(2001)]}, "2,002"),
    ],
)
def test_what_would_take_long_is_refused_before_it_is_compiled(schema: dict, word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        matcher({"json_schema": schema})
    assert caught.value.code == "unsupported_schema"


def test_depth_is_limited() -> None:
    schema: dict = {}
    for _ in range(33):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="65, at most 64"):
        matcher({"json_schema": schema})


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"json_object": True}, '{"a": [1]}', "[1]"),
        ({"regex": "[ab]{3}/x"}, "aba/x", "abc/x"),
        ({"choice": ["yes", 'n"o\n']}, 'n"o\n', "no"),
        ({"grammar": 'start: "ab"+'}, "abab", "aa"),
        ({"grammar": 'root ::= "a" | "b"'}, "b", "c"),
        ({"json_schema": True}, "[true]", "x"),
    ],
)
def test_kinds(form: dict, good: str, bad: str) -> None:
    assert accepts(form, good)
    assert not accepts(form, bad)
    assert not accepts(form, "\n\n" + good) or form in (
        {"json_object": True},
        {"json_schema": True},
    )
    for gap in ("", "\n", "\n\n"):
        assert accepts(form, gap + good, after_thinking=True)
    assert not accepts(form, "\n\n" + bad, after_thinking=True)


@pytest.mark.parametrize("form", [{"regex": "(a"}, {"grammar": "foo"}, {"grammar": "start: b"}])
def test_what_cannot_be_read_is_refused(form: dict) -> None:
    with pytest.raises(RequestError) as caught:
        matcher(form)
    assert caught.value.code == "unsupported_schema" and caught.value.why


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        "x",
        {"json": {}},
        {"regex": "a", "choice": ["a"]},
        {"regex": ""},
        {"regex": 1},
        {"choice": []},
        {"choice": [""]},
        {"choice": "ab"},
        {"json_schema": "{"},
        {"json_schema": 1},
        {"json_schema": {"enum": [float("nan")]}},
        {"json_object": False},
    ],
)
def test_no_form_at_all_is_refused_when_it_is_read(value: object) -> None:
    with pytest.raises(RequestError, match="structured") as caught:
        SamplingParams.create(structured=value)
    assert caught.value.code == "invalid_field"


def test_a_form_is_written_as_it_is_read() -> None:
    for form in ({"json_schema": {"type": "null"}}, {"json_object": True}, {"choice": ["a"]}):
        read = SamplingParams.create(structured=form).structured
        assert read is not None and read.as_json() == form and Structured.read(read) is read


def test_an_error_is_never_taken_for_an_end() -> None:
    one = matcher({"json_object": True})
    with pytest.raises(EngineError) as caught:
        one.consume(ord("x"))
    assert caught.value.code == "grammar_failed"
    # What the library would say now: ended, and end ids alone allowed.
    assert one.is_stopped
    with pytest.raises(EngineError):
        one.mask()


def test_a_guide_whose_mask_failed_fails_at_the_next_token() -> None:
    guide = Guide(matcher({"json_object": True}))
    with pytest.raises(EngineError):
        guide._matcher.consume(ord("x"))
    memory = bytearray(guide.num_bytes)
    address = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
    guide.fill(address)
    assert memory == b"\xff" * guide.num_bytes
    with pytest.raises(EngineError, match="grammar"):
        guide.consume(ord("{"))


def test_copies_share_nothing() -> None:
    first, second = (matcher({"choice": ["yes", "no"]}) for _ in range(2))
    first.consume(ord("y"))
    assert allowed(first) == [ord("e")]
    assert set(allowed(second)) == {ord("y"), ord("n")}


def test_the_latest_forms_are_kept_and_refusals_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    real = compiler_module._compile
    monkeypatch.setattr(compiler_module, "_compile", lambda *a: made.append(a) or real(*a))
    one = Compiler(320, byte_tokenizer(), [END])

    def ask(text: str) -> None:
        one.matcher(Structured("regex", text), after_thinking=False)

    for _ in range(2):
        with pytest.raises(RequestError):
            ask("(a")
        ask("a")
    assert len(made) == 2
    for i in range(MOST_KEPT):
        ask(f"b{i}")
    ask("a")
    assert len(made) == 2 + MOST_KEPT + 1


def test_what_is_too_slow_is_given_up_and_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, real = threading.Event(), compiler_module._compile

    def slow(vocabulary: object, form: Structured, after_thinking: bool) -> object:
        if form.text == "slow":
            go_on.wait(60)
        return real(vocabulary, form, after_thinking)

    one = Compiler(320, byte_tokenizer(), [END], time_limit_s=10)
    one.matcher(Structured("regex", "known"), after_thinking=False)
    monkeypatch.setattr(compiler_module, "_compile", slow)
    one._time_limit_s = 0.05

    def code_of(text: str) -> str | None:
        try:
            one.matcher(Structured("regex", text), after_thinking=False)
        except RequestError as error:
            return error.code
        return None

    assert code_of("slow") == "grammar_too_slow"
    assert code_of("other") == "grammars_busy"
    assert code_of("known") is None
    go_on.set()
    assert one._running is not None and one._running.done.wait(60)
    one._time_limit_s = 10
    assert code_of("other") is None
    assert code_of("slow") == "grammar_too_slow"


_LEAVES = st.one_of(
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-500, 500),
        st.integers(0, 300),
    ),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.builds(lambda n: {"type": "string", "pattern": f"^[a-c]{{{n}}}x?$"}, st.integers(0, 4)),
    st.lists(st.sampled_from(["a", "", 'q"', 3, None, True]), min_size=1, unique_by=repr).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from([{"type": "string", "format": "date"}, {"const": "k"}]),
)


def _objects(inner: st.SearchStrategy) -> st.SearchStrategy:
    def made(properties: dict, keep: int) -> dict:
        names = list(properties)
        required = names[: keep % (len(names) + 1)]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    names = st.sampled_from(["a", "b", "long name", "é", 'x"'])
    return st.builds(made, st.dictionaries(names, inner, max_size=3), st.integers(0, 9))


def _grown(inner: st.SearchStrategy) -> st.SearchStrategy:
    arrays = st.builds(
        lambda items, low, more: {
            "type": "array",
            "items": items,
            "minItems": low,
            "maxItems": low + more,
        },
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    either = st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
    return st.one_of(_objects(inner), arrays, either)


SCHEMAS = st.recursive(_LEAVES, _grown, max_leaves=6)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_whatever_is_drawn_from_the_masks_satisfies_the_schema(schema: dict, seed: int) -> None:
    draw, one, answer = random.Random(seed), matcher({"json_schema": schema}), bytearray()
    for _ in range(600):
        if one.is_stopped:
            break
        ids = allowed(one)
        # White space is allowed nearly everywhere; drawn as often as all else it would be all there is.
        solid = [i for i in ids if i not in b" \n\t"] or ids
        token = draw.choice(solid if draw.random() < 0.9 else ids)
        if token == END:
            break
        one.consume(token)
        answer.append(token)
    else:
        return
    found = json.loads(answer.decode())
    jsonschema.validate(found, schema)
