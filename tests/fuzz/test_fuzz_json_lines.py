"""Any bytes as an input of `generate`, or as its journal: a record a line, or an error with a code."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.in_process import InProcess
from cli.program import Finished, parse_strictly
from minivllm_cli.errors import CliError
from minivllm_cli.files.journal import Journal
from minivllm_engine.core.sampling_params import SamplingParams
from support.byte_tokenizer import write_byte_tokenizer
from support.fuzzing import examples

_KEYS = [
    *SamplingParams.model_fields,
    *("id", "prompt", "messages", "prompt_token_ids", "tools", "sampling", "chat_template_kwargs"),
    *("custom_id", "method", "url", "body", "model", "stream", "content", "role", "name", "meta"),
    *("max_completion_tokens", "enable_thinking", "tool_calls", "type", "text", "echo", "suffix"),
]
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, -(2**63), 10**30, 1e308, -1e-320, 0.5]),
    st.text(max_size=12),
    st.sampled_from(
        ["user", "assistant", "POST", "/v1/chat/completions", "say x", "\ud800", "nan"]
    ),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": _SCALARS, "content": _VALUES, "tool_calls": _VALUES}
    ),
    max_size=3,
)
_BODIES = st.fixed_dictionaries(
    {}, optional={"prompt": _VALUES, "messages": _MESSAGES, "prompt_token_ids": _VALUES}
)
_EXTRAS = st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=3)


def _batch_line(body: Any, extras: Any) -> dict[str, Any]:
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return {"custom_id": "c", "method": "POST", "url": url, "body": body, **extras}


_DOCUMENTS = st.one_of(
    st.builds(lambda body, extras: {**extras, **body}, _BODIES, _EXTRAS),
    st.builds(_batch_line, st.builds(lambda a, b: {**b, **a}, _BODIES, _EXTRAS), _EXTRAS),
)
_WHOLE = st.builds(lambda value: json.dumps(value).encode(), _DOCUMENTS)


@st.composite
def _damaged(draw: st.DrawFn) -> bytes:
    """A line with a few of its bytes replaced, dropped or doubled."""
    line = bytearray(draw(_WHOLE))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(line) - 1, 0)))
        line[place : place + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(line)


_NESTED = st.builds(
    lambda depth: b'{"prompt": "say x", "y": %s}' % (b"[" * depth + b"]" * depth),
    st.one_of(st.integers(1, 1000), st.integers(940, 990)),
)
_LINES = st.one_of(
    _WHOLE, _damaged(), st.binary(max_size=40), st.just(b"[" * 5000), st.just(b"{"), _NESTED
)
_FILES = st.builds(b"\n".join, st.lists(_LINES, max_size=5))
_SETTINGS = settings(
    max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "model"
    path.mkdir()
    write_byte_tokenizer(path)
    (path / "config.json").write_text('{"model_type": "fake"}')
    return path


def _run(model: Path, content: bytes, *args: str) -> Finished:
    with tempfile.TemporaryDirectory() as home:
        source = Path(home) / "in"
        source.write_bytes(content)
        done = InProcess(Path(home)).run(
            "generate", model, "-i", source, "--max-tokens", "4", "--max-model-len", "200", *args
        )
        assert "bug" not in done.err, done.err
        assert not list(Path(home).rglob("crash-*")), done.err
    return done


@given(_FILES)
@_SETTINGS
def test_each_line_gets_its_record(model: Path, content: bytes) -> None:
    done = _run(model, content)
    lines = [line for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    if done.code == 2:  # nothing in it, or one JSON document
        assert not done.out
        assert not lines or lines[0].strip()[:1] in (b"[", b"{")
        return
    assert done.code in (0, 3)
    records = [parse_strictly(line) for line in done.out.split("\n")[:-1]]
    assert len(records) == len(lines)
    for record in records:
        if "response" in record:
            assert record["response"]["status_code"] in (200, 400, 500)
        else:
            assert record["outputs"] if record["status"] == "ok" else record["error"]["code"]
    again = _run(model, content, "--dry-run", "--json")
    assert again.code in (0, 3)
    assert parse_strictly(again.out)["lines"]["total"] == len(lines)


_HEADER = b'{"journal":1,"fingerprint":"sha256:0","parts":{}}\n'
_ENTRY = b'{"key":"%s","index":%d,"record":{"id":1,"status":"ok","outputs":[]}}\n'
_JOURNALS = st.one_of(
    st.binary(max_size=80),
    st.builds(
        lambda parts, tail: _HEADER + b"".join(parts) + tail,
        st.lists(
            st.one_of(
                st.builds(lambda n: _ENTRY % (b"0" * 32, n), st.integers(-2, 5)),
                st.builds(lambda value: json.dumps(value).encode() + b"\n", _VALUES),
                st.builds(
                    lambda key, record: (
                        json.dumps({"key": key, "index": 0, "record": record}).encode() + b"\n"
                    ),
                    _VALUES,
                    _VALUES,
                ),
                st.just(_ENTRY % (b"0" * 32, 10**18)),
            ),
            max_size=5,
        ),
        st.binary(max_size=20),
    ),
)


@given(_JOURNALS)
@_SETTINGS
def test_a_journal_is_read_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "out.partial"
        path.write_bytes(content)
        try:
            journal = Journal.open(path, {})
        except CliError:
            assert path.read_bytes() == content
            return
        for index in range(10):
            if journal.has_answer(index):
                assert isinstance(journal.record(index), dict)
        journal.append(3, "f" * 32, {"id": 1, "status": "ok"})
        assert journal.record(3) == {"id": 1, "status": "ok"}
        journal.close()
