"""Whatever stands in a saved chat: it is one, which can be saved again, or it is refused with a reason."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm_cli.chat.restore import check_saved_settings
from minivllm_cli.chat.saved_chat import (
    SavedChat,
    TranscriptFile,
    load_bytes,
    load_chat,
    save_chat,
)
from minivllm_cli.chat.transcript import Message, Transcript
from minivllm_cli.errors import CliError, Problem
from support.fuzzing import examples

HEADER = {"schema_version": 1, "kind": "chat", "model": {"name": "m"}, "settings": {"seed": 1}}
ANSWER = {"role": "assistant", "content": "a", "finish_reason": "stop", "stats": {"tok_s": 1.5}}
ROWS = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, ANSWER]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
numbers = st.integers(-3, 5) | values
rows = st.one_of(
    st.sampled_from(ROWS),
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]) | values, "content": values},
        optional=dict.fromkeys(("reasoning", "interrupted", "finish_reason", "stats"), values),
    ),
    st.fixed_dictionaries(
        {"event": st.sampled_from(["truncate", "system", "settings"]) | values},
        optional={"messages": numbers, "content": values, "settings": values},
    ),
    values,
)
keys = st.sampled_from(["temperature", "seed", "stop", "think", "think_keep", "top_k", "x"])
headers = st.fixed_dictionaries(
    {"schema_version": st.just(1) | values, "kind": st.just("chat") | values},
    optional={"model": values, "settings": st.dictionaries(keys, values) | values},
)


def check_problem(problem: Problem, name: str) -> None:
    assert problem.what.startswith(name)
    assert len("".join(problem.lines())) < 20_000


def _check(data: bytes, name: str, folder: Path) -> None:
    try:
        chat, whole = load_bytes(data, name)
    except CliError as error:
        (problem,) = error.problems
        check_problem(problem, name)
        return
    assert 0 < whole <= len(data)
    roles = [message.role for message in chat.transcript.messages]
    assert roles == (["user", "assistant"] * len(roles))[: len(roles)]
    again = folder / "again.json"
    save_chat(chat, again)
    assert load_chat(again).transcript == _readable(chat.transcript)
    try:
        check_saved_settings(chat, name)
    except CliError as error:
        check_problem(error.problems[0], name)


def _readable(transcript: Transcript) -> Transcript:
    """As it can be written: lone surrogates are no text, and no floats but finite ones are read."""
    data = json.dumps([transcript.system, *(m.content for m in transcript.messages)])
    system, *contents = json.loads(data.encode().decode("utf-8"))
    clean = [_clean(content) for content in contents]
    messages = zip(transcript.messages, clean, strict=True)
    return Transcript(
        None if system is None else _clean(system),
        tuple(
            Message(
                m.role,
                content,
                None if m.reasoning is None else _clean(m.reasoning),
                m.interrupted,
                None if m.finish_reason is None else _clean(m.finish_reason),
                {_clean(k): _clean(v) if isinstance(v, str) else v for k, v in m.stats.items()},
            )
            for m, content in messages
        ),
    )


def _clean(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@settings(max_examples=examples(60), deadline=None)
@given(header=headers | st.just(HEADER), rest=st.lists(rows, max_size=6), lines=st.booleans())
def test_rows_of_any_kind(folder: Path, header: dict, rest: list, lines: bool) -> None:
    if lines:
        data = "".join(json.dumps(row) + "\n" for row in [header, *rest])
        _check(data.encode(), "a.jsonl", folder)
    else:
        _check(json.dumps({**header, "messages": rest}).encode(), "a.json", folder)


@settings(max_examples=examples(60), deadline=None)
@given(
    cut=st.integers(0, 400),
    place=st.integers(0, 400),
    junk=st.binary(max_size=4) | st.sampled_from([b'{"role":', b"[" * 3000, b"\n\n", b"\\ud800"]),
    name=st.sampled_from(["a.json", "a.jsonl"]),
)
def test_a_file_that_was_cut_or_written_over(
    folder: Path, cut: int, place: int, junk: bytes, name: str
) -> None:
    document = json.dumps({**HEADER, "messages": ROWS}, indent=1)
    lines = "".join(json.dumps(row) + "\n" for row in [HEADER, *ROWS])
    data = (document if name == "a.json" else lines).encode()
    data = data[:place] + junk + data[place:]
    _check(data[: len(data) - cut], name, folder)


@settings(max_examples=examples(40), deadline=None)
@given(rest=st.lists(rows, max_size=5), torn=st.sampled_from([b"", b'{"role":"us', b"\xff"]))
def test_a_transcript_goes_on_where_it_ends(folder: Path, rest: list, torn: bytes) -> None:
    path = folder / "t.jsonl"
    path.write_bytes("".join(json.dumps(row) + "\n" for row in [HEADER, *rest]).encode() + torn)
    try:
        log = TranscriptFile(path, resume=True)
    except CliError:
        return
    before = log.resumed
    assert before is not None
    kept = Transcript("other").asked("q").answered(Message("assistant", "a"))
    for chat in (SavedChat(before.model, {}, kept), before):
        log.update(chat)
        assert load_chat(path).transcript == _readable(chat.transcript)
    log.close()
