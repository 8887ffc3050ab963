"""Files that are written by replacing them: links, FIFOs and devices survive, modes are kept."""

import json
import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.program import Program
from minivllm_engine.core.atomic_file import write_atomic


def test_a_symlink_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("target")
    write_atomic(link, b"new")
    assert link.is_symlink()
    assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (b"new", 0o640)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "target"]


def test_a_dangling_symlink_gets_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("new")
    write_atomic(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "new").read_bytes() == b"x"


def test_a_fifo_is_written_to(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    write_atomic(fifo, b"x" * 100_000)
    reader.join()
    assert got == [b"x" * 100_000]
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_what_stat_calls_a_device_is_never_renamed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "device"
    path.write_bytes(b"")
    before = path.stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(
            "minivllm_engine.core.atomic_file.os.stat", lambda _: SimpleNamespace(st_mode=0o20666)
        )
        patch.setattr("os.replace", lambda *_: pytest.fail("renamed over a device"))
        write_atomic(path, b"x")
    assert (path.stat().st_ino, path.read_bytes()) == (before, b"x")


def test_a_failure_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        with pytest.raises(OSError, match="No space"):
            write_atomic(path, b"new")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("kind", ["fifo", "symlink"])
def test_the_summary_goes_through_what_is_there(
    program: Program, fake_model: Path, kind: str
) -> None:
    source = program.write_lines("in.jsonl", [{"prompt": "say x"}])
    path = program.home / "summary"
    got: list[bytes] = []
    if kind == "fifo":
        os.mkfifo(path)
    else:
        (program.home / "target").write_text("old")
        path.symlink_to("target")
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
    if kind == "fifo":
        reader.start()
    done = program.run("generate", fake_model, "-i", source, "--summary", path)
    if kind == "symlink":
        reader.start()
    reader.join()
    assert done.code == 0
    assert json.loads(got[0])["requests"]["ok"] == 1
    assert path.is_fifo() if kind == "fifo" else path.is_symlink()


@pytest.mark.parametrize("how", [["-p", "say x"], ["-i", "in.jsonl"]], ids=["prompt", "input"])
@pytest.mark.parametrize("summary", ["no/dir.json", ".", "-", "/dev/stdout"])
def test_a_summary_that_cannot_be_written_is_refused_before_loading(
    program: Program, fake_model: Path, how: list[str], summary: str
) -> None:
    program.write_lines("in.jsonl", [{"prompt": "say x"}])
    done = program.run("generate", fake_model, *how, "--summary", summary)
    assert (done.code, done.out, program.engine_log) == (2, "", [])
    assert done.err_lines[-1].startswith("try: ")
