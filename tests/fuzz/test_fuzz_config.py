"""Config files, `--set` and the environment: whatever stands there, settings or errors with their place."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minivllm_cli.config.schema import all_paths
from minivllm_cli.config.settings import resolve_settings
from minivllm_cli.config.show import render_config
from minivllm_cli.errors import CliError
from support.fuzzing import examples

_WORDS = (
    *("model", "engine", "sampling", "chat", "bench", "output", "cache", "graph"),
    *(
        "max_num_seqs",
        "temperature",
        "stop",
        "seed",
        "batch",
        "workload",
        "percentiles",
        "progress",
    ),
    *(
        "32K",
        "1e309",
        ".inf",
        "-1",
        "0x10",
        "9" * 5000,
        "1-64*2",
        "100~1024",
        "90%",
        "80GiB",
        "1" * 400,
    ),
    *(
        "null",
        "~",
        "true",
        "auto",
        "gpu",
        "&a",
        "*a",
        "<<",
        "!!python/object:os.system",
        "!!binary",
    ),
    *(
        "[",
        "]",
        "{",
        "}",
        ":",
        ": ",
        "- ",
        ", ",
        "? ",
        "|",
        ">",
        "'",
        '"',
        "#",
        "%",
        "---",
        "\n",
        "\n  ",
    ),
    *("\t", "\x85", "\u2028", "\ufeff", "\x00", "\ud800", "=", "2024-01-01", "!!set", "!!omap"),
)
_TEXTS = st.lists(st.sampled_from(_WORDS) | st.text(max_size=8), max_size=24).map("".join)
_BOMB = "a: &a [x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(12)
)
_KEYS = st.sampled_from(all_paths())


def _resolved(places: Sequence[str], **layers: Any) -> None:
    """Resolve layers; what is printed of them says the same when it is read, or errors name the place."""
    try:
        found = resolve_settings(**{"environ": {}, **layers})
    except CliError as error:
        for problem in error.problems:
            assert any(place in problem.what for place in places), problem
        return
    printed = render_config(found)
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "printed.yaml"
        path.write_text(printed, encoding="utf-8")
        again = render_config(resolve_settings(files=[path], environ={}))
        # A model's path belongs to the place where it is written.
        assert again.partition("\n")[2] == printed.partition("\n")[2]


@settings(max_examples=examples(60), deadline=None)
@given(_TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=64))
@example(b"[" * 100_000)
@example(b"engine: " + b"{a: " * 5000)
@example(b"- " * 20_000)
@example(_BOMB.encode())
@example(b"engine: {max_num_seqs: &a [*a]}")
@example(f"{_BOMB}engine: {{max_num_seqs: *m}}".encode())
@example(b"sampling: {temperature: .nan}")
@example(b"model: ~nobody")
@example(b"engine: {max_num_seqs: " + b"9" * 5000 + b"}")
@example(b"engine: {gpu_memory_utilization: 1e-400%}")
def test_any_file(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "c.yaml"
        path.write_bytes(data)
        _resolved([str(path)], files=[path])


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(_TEXTS | st.tuples(_KEYS, _TEXTS).map("=".join), min_size=1, max_size=3))
@example(["engine.max_num_seqs=&a [*a]"])
@example([f"sampling.stop={'[' * 50_000}"])
@example([f"engine={_BOMB}"])
def test_any_assignment(texts: list[str]) -> None:
    _resolved([f"--set {text}" for text in texts], assignments=texts)


@settings(max_examples=examples(60), deadline=None)
@given(st.dictionaries(_KEYS, _TEXTS, max_size=3))
@example({"engine.max_num_seqs": "&a [*a]"})
@example({"model": "~nobody"})
def test_any_variable_and_flag(values: dict[str, str]) -> None:
    names = {f"MINIVLLM_{key.upper().replace('.', '__')}": text for key, text in values.items()}
    _resolved([*names], environ=names)
    flags = {key: ("--" + key.rpartition(".")[2], text) for key, text in values.items()}
    _resolved([flag for flag, _ in flags.values()], flags=flags)


@pytest.mark.parametrize("text", ["x: " * 5, "", "\x00"])
def test_a_file_of_any_size_is_refused_or_read_in_part(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text + "#" * (2 << 20))
    with pytest.raises(CliError, match="larger than 1 MiB"):
        resolve_settings(files=[path], environ={})
