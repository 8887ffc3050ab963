"""The history file: private, locked, in prompt_toolkit's format."""

import os
import stat
import subprocess
import sys

from prompt_toolkit.history import FileHistory

from minivllm_cli.chat.history_file import HistoryFile


def _open(path, warn=print):
    return HistoryFile(path, warn)


def _texts(file):
    return [*file.load_history_strings()][::-1]


def test_it_is_made_private_and_read_back(tmp_path):
    file = _open(tmp_path / "state" / "minivllm" / "history")
    assert _texts(file) == []
    file.append_string("one")
    file.append_string("two\n\nlines")
    assert _texts(file) == ["one", "two\n\nlines"]
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert list(FileHistory(file.path).load_history_strings()) == ["two\n\nlines", "one"]


def test_an_old_file_that_others_can_read_becomes_private(tmp_path):
    path = tmp_path / "history"
    path.write_text("\n# 2024\n+old\n")
    path.chmod(0o644)
    _open(path).append_string("new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert _texts(_open(path)) == ["old", "new"]


def test_a_leading_space_is_not_stored(tmp_path):
    file = _open(tmp_path / "history")
    file.append_string(" secret")
    assert not file.path.exists()


def test_clearing(tmp_path):
    file = _open(tmp_path / "history")
    file.append_string("one")
    file.clear()
    assert _texts(file) == []
    assert file.path.stat().st_size == 0


def test_broken_text_is_stored_somehow(tmp_path):
    file = _open(tmp_path / "history")
    file.append_string("lone \ud800")
    assert _texts(file) == ["lone ?"]


def test_two_processes_append_whole_entries(tmp_path):
    path = tmp_path / "history"
    code = (
        "import sys; from pathlib import Path\n"
        "from minivllm_cli.chat.history_file import HistoryFile\n"
        "file = HistoryFile(Path(sys.argv[1]), print)\n"
        "for i in range(200): file.append_string(sys.argv[2] * 300 + '\\nend')\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, path, letter], env=os.environ)
        for letter in "ab"
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    texts = _texts(_open(path))
    assert sorted(set(texts)) == ["a" * 300 + "\nend", "b" * 300 + "\nend"]
    assert len(texts) == 400


def test_a_file_that_cannot_be_used_costs_one_warning(tmp_path):
    (tmp_path / "state").write_text("a file where a directory should be")
    warnings = []
    file = _open(tmp_path / "state" / "history", warnings.append)
    file.append_string("one")
    file.append_string("two")
    assert len(warnings) == 1 and warnings[0].startswith("history is not kept: ")
    assert file.get_strings() == ["one", "two"], "as long as this chat lasts"


def test_of_a_huge_file_the_end_is_read(tmp_path):
    path = tmp_path / "history"
    with path.open("wb") as file:
        file.truncate(1 << 36)  # sparse: all of it would fill the memory
        file.seek(0, os.SEEK_END)
        file.write(b"\n# 2024\n+one\n\n# 2024\n+\xff\x1b[2J\n")
    assert _texts(_open(path))[-2:] == ["one", "\ufffd\x1b[2J"]
