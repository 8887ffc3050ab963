"""Headers and indexes of safetensors with anything in them: a result, or an error with a code."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm_engine.checkpoint.safetensors_header import FLOAT_TYPES, TensorEntry, read_header
from minivllm_engine.checkpoint.shard_index import ShardIndex, indexed_tensors, read_shard_index
from minivllm_engine.core.errors import CheckpointError
from support.fuzzing import examples

NUMBERS = st.one_of(
    st.integers(-2, 40),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**400, 1e308, float("nan"), True, None]),
)
JSON = st.recursive(
    st.one_of(NUMBERS, st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
ENTRY = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.one_of(st.sampled_from([*FLOAT_TYPES, "I8", "F8_E4M3"]), JSON),
            "shape": st.one_of(st.lists(NUMBERS, max_size=3), JSON),
            "data_offsets": st.one_of(st.lists(NUMBERS, min_size=2, max_size=2), JSON),
        }
    ),
    JSON,
)
HEADER = st.one_of(
    st.dictionaries(st.one_of(st.text(max_size=6), st.just("__metadata__")), ENTRY, max_size=3),
    JSON,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


def _read(file: Path) -> list[TensorEntry] | CheckpointError:
    try:
        return read_header(file)
    except CheckpointError as error:
        return error


def _held(file: Path, raw: bytes) -> None:
    file.write_bytes(raw)
    entries = _read(file)
    if isinstance(entries, CheckpointError):
        assert entries.code and entries.what and entries.why and entries.hint
        return
    # What is taken covers the file, once and whole, and has the sizes that it says.
    ends = [8 + struct.unpack("<Q", raw[:8])[0]]
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        assert entry.begin == ends[-1] <= entry.end
        ends.append(entry.end)
    assert ends[-1] == len(raw)


@settings(max_examples=examples(60), deadline=None)
@given(
    header=HEADER,
    data=st.binary(max_size=40),
    length=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
)
def test_fuzz_headers(file: Path, header: Any, data: bytes, length: int | None) -> None:
    text = json.dumps(header).encode()
    _held(file, struct.pack("<Q", len(text) if length is None else length) + text + data)


@settings(max_examples=examples(60), deadline=None)
@given(raw=st.binary(max_size=120))
def test_fuzz_bytes(file: Path, raw: bytes) -> None:
    _held(file, raw)
    _held(file, struct.pack("<Q", len(raw)) + raw)


@settings(max_examples=examples(40), deadline=None)
@given(at=st.integers(0, 400), bit=st.integers(0, 7), cut=st.integers(0, 60))
def test_fuzz_mutations_of_a_good_file(file: Path, at: int, bit: int, cut: int) -> None:
    entries: dict[str, Any] = {
        f"t{i}": {"dtype": "F32", "shape": [2, 3], "data_offsets": [24 * i, 24 * i + 24]}
        for i in range(4)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    raw = bytearray(struct.pack("<Q", len(text)) + text + bytes(96))
    raw[at % len(raw)] ^= 1 << bit
    _held(file, bytes(raw[: len(raw) - cut]))


INDEX = st.one_of(
    st.fixed_dictionaries(
        {
            "metadata": st.one_of(st.fixed_dictionaries({"total_size": NUMBERS}), JSON),
            "weight_map": st.one_of(
                st.dictionaries(
                    st.text(max_size=4),
                    st.one_of(st.sampled_from(["a", "../a", "/a", "", ".", "\0", "\ud800"]), JSON),
                    max_size=4,
                ),
                JSON,
            ),
        }
    ),
    JSON,
)


@settings(max_examples=examples(80), deadline=None)
@given(content=INDEX)
def test_fuzz_indexes(file: Path, content: Any) -> None:
    index_file, shard = file.parent / "index.json", file.parent / "a"
    shard.write_bytes(b"")
    index_file.write_text(json.dumps(content))
    refused = _index_refused(index_file, shard)
    assert refused.code and refused.what and refused.why and refused.hint


def _index_refused(index_file: Path, shard: Path) -> CheckpointError:
    """Refuse it, or else that its tensors are not there."""
    try:
        index = read_shard_index(index_file)
        assert isinstance(index, ShardIndex) and index.shards == (shard,)
        assert index.total_size is None or isinstance(index.total_size, int)
        indexed_tensors(index, [])
    except CheckpointError as error:
        return error
    raise AssertionError("an index that names tensors was taken without them")
