"""Archives and pickles that are not as torch.save writes them: refused, in bounded time and memory."""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minivllm_engine.conversion import check, open_source, torch_archive
from minivllm_engine.core.errors import CheckpointError
from support.converted import convert_to
from support.tiny_checkpoint import random_tensors, tiny_config, write_checkpoint

CONFIG = tiny_config()
REFERENCE = random_tensors(CONFIG)


def rezipped(
    file: Path,
    change: Callable[[str], int] = lambda _: zipfile.ZIP_STORED,
    replaced: dict[str, bytes] | None = None,
) -> Path:
    """The archive written again. change: compression by the end of a record's name."""
    with zipfile.ZipFile(file) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in records.items():
            end = name.partition("/")[2]
            data = (replaced or {}).get(end, data)
            archive.writestr(name, data, compress_type=change(end))
    return file


@pytest.fixture
def src(tmp_path: Path) -> Path:
    path = write_checkpoint(tmp_path / "src", CONFIG, {})
    (path / "model.safetensors").unlink()
    torch.save(REFERENCE, path / "model.pt")
    return path


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_source(path)
    return caught.value


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("record", ["data/5", "data.pkl", "version"])
def test_compressed_records_are_refused(record: str, method: int, src: Path) -> None:
    """They are mapped as they lie: what was deflated would be read as numbers."""
    rezipped(src / "model.pt", lambda end: method if end == record else zipfile.ZIP_STORED)
    error = refused(src)
    assert "compressed" in error.what and record in error.what


def test_what_is_zipped_again_without_compression_is_read(src: Path, tmp_path: Path) -> None:
    rezipped(src / "model.pt")
    convert_to(src, tmp_path / "dst")
    assert check(open_source(src), tmp_path / "dst").ok


def test_a_check_reads_by_another_way_than_the_conversion(src: Path) -> None:
    """What lies there in another form than it is mapped in is found by reading the archive as one."""
    read: list[int] = []
    assert list(torch_archive.damaged_records(src / "model.pt", read.append)) == []
    assert sum(read) > sum(tensor.numel() * 4 for tensor in REFERENCE.values())
    rezipped(src / "model.pt", lambda end: zipfile.ZIP_DEFLATED if end == "data/5" else 0)
    (found,) = torch_archive.damaged_records(src / "model.pt", read.append)
    assert "/data/5: " in found


def test_a_damaged_record_is_found_by_a_check(src: Path, tmp_path: Path) -> None:
    convert_to(src, tmp_path / "dst")
    file = src / "model.pt"
    raw = bytearray(file.read_bytes())
    raw[raw.index(REFERENCE["model.norm.weight"].numpy().tobytes()) + 3] ^= 64
    file.write_bytes(raw)
    kinds = {
        difference.kind for difference in check(open_source(src), tmp_path / "dst").differences
    }
    assert "source" in kinds and "value" in kinds


def test_a_dictionary_that_holds_itself(src: Path) -> None:
    itself: dict = {}
    itself["model"] = itself
    torch.save(itself, src / "model.pt")
    assert "holds itself" in refused(src).what
    nested: dict = {"x": torch.zeros(1)}
    for _ in range(100):
        nested = {"model": nested}
    torch.save(nested, src / "model.pt")
    assert "very many" in refused(src).what
    shared: dict = {"x": torch.zeros(1)}
    for _ in range(40):  # 2**40 ways lead to the tensor
        shared = {"a": shared, "b": shared}
    torch.save(shared, src / "model.pt")
    assert "no tensor at the level" in refused(src).what


# Keys of a dictionary: (1, 2), then each a pair of the one before, to the 2**40 parts of the last.
PAIRS = b"K\x01K\x02\x86q\x01K\x01" + b"".join(
    b"h%ch%c\x86q%cK\x01" % (level, level, level + 1) for level in range(1, 40)
)
MARKED = b"K\x01\x85q\x01K\x01" + b"".join(
    b"(h%ch%ch%ctq%cK\x01" % (level, level, level, level + 1) for level in range(1, 40)
)
PICKLES = {
    "a tuple that takes years to hash": b"\x80\x02}q\x00(" + PAIRS + b"u.",
    "the same between marks": b"\x80\x02}q\x00(" + MARKED + b"u.",
    "nothing but None": b"\x80\x02" + b"N" * (17 << 20) + b".",
    "deeply nested": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "a huge bytearray": pickle.dumps(bytearray, 2)[:-1] + b"\x8a\x06\0\0\0\0\0\x10\x85R.",
    "not a pickle": b"\xff" * 100,
    "empty": b"",
    "cut off": pickle.dumps({"a": 1}, 2)[:-3],
    "a list": pickle.dumps([1], 2),
    "an unknown memo": b"\x80\x02h\x05.",
}


@pytest.mark.parametrize("case", PICKLES)
def test_pickles_that_are_none(case: str, src: Path) -> None:
    rezipped(src / "model.pt", replaced={"data.pkl": PICKLES[case]})
    error = refused(src)
    assert str(src / "model.pt") in error.what and error.why and error.hint
