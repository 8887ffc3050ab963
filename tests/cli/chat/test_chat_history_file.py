"""The history file: private, locked, in prompt_toolkit's format."""

import os
import stat
import subprocess
import sys

from prompt_toolkit.history import FileHistory

from minivllm_cli.chat.history_file import HistoryFile


def test_it_is_made_private_and_read_back(tmp_path):
    file = HistoryFile(tmp_path / "state" / "minivllm" / "history")
    assert file.read() == []
    file.append("one")
    file.append("two\n\nlines")
    assert file.read() == ["one", "two\n\nlines"]
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert list(FileHistory(file.path).load_history_strings()) == ["two\n\nlines", "one"]


def test_an_old_file_that_others_can_read_becomes_private(tmp_path):
    path = tmp_path / "history"
    path.write_text("\n# 2024\n+old\n")
    path.chmod(0o644)
    HistoryFile(path).append("new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert HistoryFile(path).read() == ["old", "new"]


def test_a_leading_space_is_not_stored(tmp_path):
    file = HistoryFile(tmp_path / "history")
    file.append(" secret")
    assert not file.path.exists()


def test_clearing(tmp_path):
    file = HistoryFile(tmp_path / "history")
    file.append("one")
    file.clear()
    assert file.read() == []
    assert file.path.stat().st_size == 0


def test_broken_text_is_stored_somehow(tmp_path):
    file = HistoryFile(tmp_path / "history")
    file.append("lone \ud800")
    assert file.read() == ["lone ?"]


def test_two_processes_append_whole_entries(tmp_path):
    path = tmp_path / "history"
    code = (
        "import sys; from pathlib import Path\n"
        "from minivllm_cli.chat.history_file import HistoryFile\n"
        "for i in range(200): HistoryFile(Path(sys.argv[1])).append(sys.argv[2] * 300 + '\\nend')\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, path, letter], env=os.environ)
        for letter in "ab"
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    texts = HistoryFile(path).read()
    assert sorted(set(texts)) == ["a" * 300 + "\nend", "b" * 300 + "\nend"]
    assert len(texts) == 400
