"""Files of torch.save with changed bytes: read, or refused with a code; nothing that they name is run."""

import io
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm_engine.conversion.torch_file import load_torch_file, torch_entries
from minivllm_engine.core.errors import CheckpointError
from support.fuzzing import examples

OPCODES = [op.code.encode("latin-1") for op in pickletools.opcodes]


def _saved(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


GOOD = _saved({"model": {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.zeros(4)}, "step": 3})
PICKLE = zipfile.ZipFile(io.BytesIO(GOOD)).read("archive/data.pkl")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.pt"


def _refused(file: Path) -> CheckpointError | None:
    try:
        weights = load_torch_file(file)
    except CheckpointError as error:
        return error
    for entry in torch_entries(file, weights):
        assert entry.num_bytes >= 0 and isinstance(entry.name, str)
    return None


def _held(file: Path, raw: bytes) -> None:
    # A new file each time: one that is mapped must not be cut.
    file.unlink(missing_ok=True)
    file.write_bytes(raw)
    refused = _refused(file)
    assert refused is None or (refused.code and refused.what and refused.why and refused.hint)


def _with_pickle(raw: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(GOOD)) as good, zipfile.ZipFile(stream, "w") as archive:
        for name in good.namelist():
            archive.writestr(name, raw if name.endswith("data.pkl") else good.read(name))
    return stream.getvalue()


@settings(max_examples=examples(60), deadline=None)
@given(at=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255), cut=st.integers(0, 300))
def test_fuzz_archives(file: Path, at: int, byte: int, cut: int) -> None:
    raw = bytearray(GOOD)
    raw[at] = byte
    _held(file, bytes(raw[: len(raw) - max(0, cut - 200)]))


@settings(max_examples=examples(80), deadline=None)
@given(at=st.integers(0, len(PICKLE) - 1), byte=st.integers(0, 255), much=st.integers(0, 3))
def test_fuzz_pickles(file: Path, at: int, byte: int, much: int) -> None:
    _held(file, _with_pickle(PICKLE[:at] + bytes([byte]) + PICKLE[at + much :]))


@settings(max_examples=examples(80), deadline=None)
@given(codes=st.lists(st.one_of(st.sampled_from(OPCODES), st.binary(max_size=4)), max_size=40))
def test_fuzz_opcodes(file: Path, codes: list[bytes]) -> None:
    _held(file, _with_pickle(b"\x80\x02" + b"".join(codes) + b"."))


@settings(max_examples=examples(40), deadline=None)
@given(
    content=st.recursive(
        st.one_of(st.none(), st.integers(), st.text(max_size=4), st.just(torch.zeros(2))),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.one_of(
                    st.sampled_from(["model", "ema", "a", "state_dict", ""]),
                    st.integers(),
                    st.binary(),
                ),
                inner,
                max_size=4,
            ),
        ),
        max_leaves=10,
    )
)
def test_fuzz_contents(file: Path, content: Any) -> None:
    _held(file, _saved(content))


def test_the_good_file_is_read(file: Path) -> None:
    for raw in (GOOD, _with_pickle(PICKLE), _saved({"a": torch.ones(2)})):
        file.unlink(missing_ok=True)
        file.write_bytes(raw)
        assert load_torch_file(file).tensors
