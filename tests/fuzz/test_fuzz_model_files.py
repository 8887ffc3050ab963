"""config.json, generation_config.json and tokenizer_config.json of any content: a result or a named error."""

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm_engine.core.errors import CheckpointError, EngineError, RequestError
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.model_config.generation_config import load_generation_config
from minivllm_engine.models.layers.step_plan import inverse_frequencies
from minivllm_engine.text.tokenizer import Tokenizer
from support.byte_tokenizer import byte_backend
from support.fuzzing import attempt, examples
from support.tiny_checkpoint import nested, tiny_config

extremes = st.sampled_from(
    [
        0,
        1,
        2,
        -1,
        10**400,
        2**31,
        2**63,
        1e308,
        1e-320,
        0.5,
        1e-9,
        math.inf,
        math.nan,
        "x",
        "",
        True,
        None,
        [],
        {},
    ]
)
anything: st.SearchStrategy[Any] = st.recursive(
    extremes | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)
ROPE = (
    *(
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
    ),
    *("attention_factor", "original_max_position_embeddings", "truncate", "partial_rotary_factor"),
)
rope = st.dictionaries(st.sampled_from(ROPE), anything, max_size=4).map(
    lambda found: {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0} | found
)
changes = st.dictionaries(
    st.sampled_from(
        [
            *tiny_config(),
            "rope_scaling",
            "torch_dtype",
            "eos_token_id",
            "num_experts",
            "text_config",
        ]
    ),
    anything | rope,
    max_size=3,
)


@settings(max_examples=examples(300), deadline=None)
@given(changes, rope | st.none(), st.booleans())
def test_any_config_is_read_or_refused_with_its_key(
    changes: dict[str, Any], rope: dict[str, Any] | None, deep: bool
) -> None:
    content = tiny_config() | ({} if rope is None else {"rope_parameters": rope}) | changes
    whole = nested(content) if deep else content
    config = attempt(lambda: ModelConfig.from_dict(whole, source="config.json"))
    if isinstance(config, EngineError):
        assert isinstance(config, CheckpointError) and config.what
        return
    assert config.max_position_embeddings >= 2
    if config.num_attention_layers and config.head_dim <= 4096:
        frequencies = inverse_frequencies(config.rope, config.rotary_dim)
        assert frequencies.isfinite().all() and math.isfinite(config.rope.attention_factor)


generation = st.dictionaries(
    st.sampled_from(
        (
            *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"),
            *("do_sample", "eos_token_id", "suppress_tokens", "bad_words_ids", "num_beams"),
            *("stop_strings", "presence_penalty"),
        )
    ),
    anything,
    max_size=4,
)


@settings(max_examples=examples(150), deadline=None)
@given(generation | anything)
def test_any_generation_config_is_read_or_refused(content: Any) -> None:
    with TemporaryDirectory() as folder:
        (Path(folder) / "generation_config.json").write_text(json.dumps(content))
        found = attempt(lambda: load_generation_config(Path(folder)))
    if isinstance(found, EngineError):
        assert isinstance(found, CheckpointError) and found.what
        return
    assert SamplingParams().resolved(found.sampling, seed=0).max_tokens >= 1


template = st.sampled_from(
    (
        *("{{ messages[0].content }}", "{% if %}", "{{ x | y }}", "{{ 1 / 0 }}", "{% for"),
        *("{{ raise_exception('no') }}", "{% for m in messages %}{{ m }}{% endfor %}"),
        *("{{ messages | tojson }}", "{{ messages.x.y }}"),
    )
) | st.text(alphabet="{}%#'\"|.()[]~*+ formessagsintendif0123456789\n", max_size=40).map(
    "{{{{{}".format
)
tokenizer_configs = st.dictionaries(
    st.sampled_from(
        ["chat_template", "eos_token", "bos_token", "added_tokens_decoder", "model_max_length"]
    ),
    anything
    | template
    | st.lists(
        st.dictionaries(
            st.sampled_from(["name", "template"]), template | st.just("default") | anything
        ),
        max_size=2,
    ),
    max_size=3,
)


@settings(max_examples=examples(300), deadline=None)
@given(tokenizer_configs | anything)
def test_any_tokenizer_config_is_read_or_refused(content: Any) -> None:
    with TemporaryDirectory() as folder:
        byte_backend().save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(content))
        tokenizer = attempt(lambda: Tokenizer.from_dir(Path(folder)))
    if isinstance(tokenizer, EngineError):
        assert isinstance(tokenizer, CheckpointError) and tokenizer.what
        return
    assert tokenizer.answer_start([1, 2]) in (None, 0, 1, 2)
    chat = [{"role": "user", "content": "Hi"}]
    found = attempt(lambda: tokenizer.encode_chat(chat, tools=[{"name": "f"}]))
    assert isinstance(found, list | RequestError)


WHOLE = json.loads(byte_backend().to_str())
tokenizer_parts = st.dictionaries(
    st.sampled_from([*WHOLE, "model"]),
    anything
    | st.sampled_from(
        [WHOLE["decoder"], WHOLE["pre_tokenizer"], {"type": "NFC"}, {"type": "Strip"}]
    )
    | st.dictionaries(st.sampled_from([*WHOLE["model"]]), anything, max_size=2).map(
        WHOLE["model"].__or__
    )
    | st.lists(
        st.dictionaries(st.sampled_from([*WHOLE["added_tokens"][0]]), anything, max_size=2).map(
            WHOLE["added_tokens"][0].__or__
        ),
        max_size=2,
    ),
    max_size=2,
)


@settings(max_examples=examples(150), deadline=None)
@given(tokenizer_parts, st.text(max_size=20))
def test_any_tokenizer_is_read_or_refused(parts: dict[str, Any], text: str) -> None:
    with TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(json.dumps(WHOLE | parts))
        tokenizer = attempt(lambda: Tokenizer.from_dir(Path(folder)))
    if isinstance(tokenizer, EngineError):
        assert isinstance(tokenizer, CheckpointError) and tokenizer.what
        return
    ids = attempt(lambda: tokenizer.encode(text))
    assert isinstance(ids, list | RequestError)
    for token_id in ids if isinstance(ids, list) else ():
        assert isinstance(tokenizer.token_bytes(token_id), bytes)


# Pieces of which a hostile template is made: each is small, and they are put into each other.
values = st.recursive(
    st.sampled_from(
        [
            "messages",
            "n.x",
            "9999",
            "range(99999)",
            "'ab'",
            "messages[0].content",
            "loop.index",
            "none",
        ]
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "*", "~", "**", "%", "in", "==", "//"]), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        st.tuples(
            inner,
            st.sampled_from(
                (
                    *("list", "length", "string", "tojson", "join('ab')", "center(99999)", "sum"),
                    *("first", "upper", "sort", "map('string')", "batch(3)", "unique", "trim"),
                    *("replace('a', 'bbbb')", "indent(9999)", "pprint"),
                )
            ),
        ).map(lambda t: f"({t[0]} | {t[1]})"),
        st.tuples(
            inner,
            st.sampled_from([".split('a')", ".format(9)", "[1:]", ".ljust(99999)", ".count('a')"]),
        ).map(lambda t: f"{t[0]}{t[1]}"),
        inner.map(lambda one: f"[{one}, {one}]"),
        inner.map(lambda one: f"f({one})"),
    ),
    max_leaves=5,
)
blocks = st.recursive(
    values.map(lambda one: "{{ " + one + " }}"),
    lambda inner: st.one_of(
        st.tuples(values, inner).map(
            lambda t: "{% for i in " + t[0] + " %}" + t[1] + "{% endfor %}"
        ),
        st.tuples(values, inner).map(lambda t: "{% set n.x = " + t[0] + " %}" + t[1]),
        st.tuples(inner, inner).map("".join),
        inner.map(lambda one: "{% set n.x %}" + one + "{% endset %}"),
    ),
    max_leaves=4,
)


@settings(max_examples=examples(150), deadline=None)
@given(blocks)
def test_any_template_ends(block: str) -> None:
    head = "{% set n = namespace(x='a') %}{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
    tokenizer = Tokenizer(byte_backend(), {}, head + block)
    text = attempt(lambda: tokenizer.render_chat([{"role": "user", "content": "Hi a"}]))
    assert isinstance(text, RequestError) or len(text) <= 2**21
