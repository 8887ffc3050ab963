"""What `generate` reads: texts, pipes, files that are no JSON lines, files that change meanwhile."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.in_process import InProcess
from cli.program import REAL, Program, read_records
from minivllm_engine.text.tokenizer import Tokenizer
from support.fake_llm import FakeLLM


def _lines(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{n}", "prompt": f"say {n}"} for n in range(count)]


class _Panic(BaseException):
    """What a binding of a native library raises."""


@pytest.mark.parametrize(
    "failure", [ValueError("odd"), _Panic("index out of bounds"), MemoryError()]
)
def test_b1_whatever_a_library_raises_over_a_prompt_costs_one_record(
    program: Program, fake_model: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    encode = Tokenizer.encode

    def failing(self: Tokenizer, text: str) -> list[int]:
        if text == "say 1":
            raise failure
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", failing)
    source = program.write_lines("in", _lines(3))
    done = program.run("generate", fake_model, "-i", source)
    assert done.code == 3
    assert [r["status"] for r in done.records] == ["ok", "error", "ok"]
    assert done.records[1]["error"]["code"] == "unreadable_prompt"
    assert "in:2: " in done.err and "bug" not in done.err
    dry = program.run("generate", fake_model, "-i", source, "--dry-run", "--json")
    assert (dry.code, json.loads(dry.out)["refused"]) == (3, 1)
    one = program.run("generate", fake_model, "-p", "say 1", "--raw")
    assert (one.code, one.out) == (3, "") and "bug" not in one.err


def test_b1_twelve_million_spaces(program: Program, tiny_model: Path) -> None:
    lines = [{"prompt": "a"}, {"prompt": " " * 12_000_000 + "x"}, {"prompt": "b"}]
    source = program.write_lines("in", lines)
    program.command = REAL
    done = program.run("generate", "demo", "-i", source, "--max-tokens", "1", "--dry-run", "--json")
    assert done.code == 3
    document = json.loads(done.out)
    assert document["refused"] + document["too_long"]["count"] == 1


@pytest.fixture
def meddle(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Have something happen in a step of the engine, as if another process did it."""
    step = FakeLLM.before_step

    def arrange(number: int, what: Callable[[], None]) -> None:
        def before_step(self: FakeLLM) -> None:
            if self._num_steps == number:
                what()
            step(self)

        monkeypatch.setattr(FakeLLM, "before_step", before_step)

    return arrange


def _args(model: Path, source: Path, *more: str) -> list[Any]:
    return ["generate", model, "-i", source, "--max-num-seqs", "1", *more]


@pytest.mark.parametrize("output", [["-o", "out"], []], ids=["file", "stdout"])
def test_b3_an_input_that_is_cut_meanwhile(
    program: Program, fake_model: Path, meddle: Any, output: list[str]
) -> None:
    source = program.write_lines("in", _lines(200))
    whole = source.read_bytes()
    # Python reads ahead, 128 KiB at a time: what follows has to lie beyond that.
    source.write_bytes(
        whole + b"".join(b'{"prompt": "say x", "note": "%s"}\n' % (b"y" * 9000) for _ in range(40))
    )
    size = source.stat().st_size
    meddle(10, lambda: source.write_bytes(source.read_bytes()[: len(whole) + 30_000]))
    done = program.run(*_args(fake_model, source, *output))
    assert done.code == 1
    assert f"{source} was changed by another process during the run" in done.err
    assert "bug" not in done.err
    if output:
        saved = (program.home / "out.partial").read_bytes().count(b"\n") - 1
        assert 200 < saved < 240
        assert not (program.home / "out").exists()
        again = program.run(*_args(fake_model, source, *output))
        assert again.code == 3  # the line that was cut is no JSON
    else:
        assert len(done.records) > 200 and size


def _cut_journal(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize("then", [_cut_journal, lambda path: path.write_bytes(b"")])
def test_b3_a_journal_that_is_cut_meanwhile(
    program: Program, fake_model: Path, meddle: Any, then: Any
) -> None:
    source = program.write_lines("in", _lines(20))
    args = _args(fake_model, source, "-o", "out")
    meddle(10, lambda: then(program.home / "out.partial"))
    done = program.run(*args)
    assert done.code == 1
    assert "out.partial was changed by another process" in done.err
    assert "bug" not in done.err
    meddle(0, lambda: None)
    assert program.run(*args).code == 0
    assert [r["id"] for r in read_records(program.home / "out")] == [f"r{n}" for n in range(20)]


def test_b3_a_journal_that_is_removed_meanwhile_is_no_loss(
    program: Program, fake_model: Path, meddle: Any
) -> None:
    source = program.write_lines("in", _lines(20))
    meddle(10, lambda: (program.home / "out.partial").unlink())
    done = program.run(*_args(fake_model, source, "-o", "out"))
    assert done.code == 0
    assert len(read_records(program.home / "out")) == 20
    assert not (program.home / "out.partial").exists()


def test_b3_a_journal_that_is_removed_before_the_engine_fails_is_written_again(
    program: Program, fake_model: Path, meddle: Any
) -> None:
    source = program.write_lines("in", _lines(20))
    args = _args(fake_model, source, "-o", "out")
    meddle(10, lambda: (program.home / "out.partial").unlink())
    assert program.run(*args, FAKE_FAILS_AT="15").code == 1
    saved = (program.home / "out.partial").read_bytes().count(b"\n") - 1
    assert saved >= 10
    meddle(0, lambda: None)
    done = program.run(*args)
    assert done.code == 0 and f"resuming: {saved}/20 done" in done.err


def test_b3_a_journal_that_was_replaced_is_not_removed(
    program: Program, fake_model: Path, meddle: Any
) -> None:
    def replace() -> None:
        (program.home / "out.partial").unlink()
        (program.home / "out.partial").write_text("of somebody else\n")

    source = program.write_lines("in", _lines(20))
    meddle(10, replace)
    done = program.run(*_args(fake_model, source, "-o", "out"))
    assert done.code == 0
    assert len(read_records(program.home / "out")) == 20
    assert (program.home / "out.partial").read_text() == "of somebody else\n"


@pytest.mark.parametrize("left", ["", '{"journal":'])
def test_a7_a_finished_output_beside_an_empty_journal_is_kept(
    program: Program, fake_model: Path, left: str
) -> None:
    source = program.write_lines("in", _lines(2))
    (program.home / "out").write_text("finished\n")
    (program.home / "out.partial").write_text(left)
    done = program.run(*_args(fake_model, source, "-o", "out"))
    assert done.code == 2
    assert done.err.startswith("error: out exists")
    assert (program.home / "out").read_text() == "finished\n"


_ARRAY = [{"prompt": "say a"}, {"prompt": "say b"}]


@pytest.mark.parametrize(
    ("text", "what", "way_out"),
    [
        (json.dumps(_ARRAY), "one JSON array", "jq -c '.[]' in > in-lines.jsonl"),
        (json.dumps(_ARRAY, indent=2), "one JSON array", "jq -c '.[]' in > in-lines.jsonl"),
        ("[\n" + ",\n".join(map(json.dumps, _ARRAY)) + "\n]", "one JSON array", "jq -c '.[]' in"),
        (json.dumps(_ARRAY[0], indent=2), "one JSON object", "jq -c . in > in-lines.jsonl"),
    ],
)
def test_c4_a_json_document_is_one_message_for_the_file(
    program: Program, fake_model: Path, text: str, what: str, way_out: str
) -> None:
    (program.home / "in").write_text(text)
    for more in ([], ["--dry-run"], ["--on-error", "stop"]):
        done = program.run("generate", fake_model, "-i", "in", *more)
        assert (done.code, done.out) == (2, "")
        assert done.err_lines[0] == f"error: in is {what}, not JSON lines"
        assert done.err_lines[-1].startswith(f"try: {way_out}")
        assert len(done.err_lines) == 2


def test_c4_a_bad_line_that_is_an_array_costs_itself_only(
    program: Program, fake_model: Path
) -> None:
    source = program.write_lines("in", ["[1, 2]", {"prompt": "say a"}, "{", {"prompt": "say b"}])
    done = program.run("generate", fake_model, "-i", source)
    assert [r["status"] for r in done.records] == ["error", "ok", "error", "ok"]


class TestPrompt:
    """A8: `-p @FILE`, `-p -`, and a pipe."""

    def test_a_file(self, program: Program, fake_model: Path) -> None:
        (program.home / "words.txt").write_text("say Hi\n")
        assert program.run("generate", fake_model, "-p", "@words.txt").out == "Hi\n"
        done = program.run("generate", fake_model, "-p", "@words.txt", "--json")
        assert done.records[0]["outputs"][0]["text"] == "Hi"

    def test_what_is_no_file_is_an_error_that_says_how_to_write_an_at(
        self, program: Program, fake_model: Path
    ) -> None:
        done = program.run("generate", fake_model, "-p", "@nobody hello")
        assert done.code == 2
        assert done.err_lines[0] == (
            "error: --prompt @nobody hello: cannot read nobody hello: No such file or directory"
        )
        assert done.err_lines[-1] == "try: @@nobody hello for a text that begins with @"
        assert program.run("generate", fake_model, "-p", "@@say x").out == "<@say x>\n"

    @pytest.mark.parametrize("args", [["-p", "-"], []])
    def test_a_pipe_is_one_prompt(
        self, program: Program, fake_model: Path, args: list[str]
    ) -> None:
        done = program.run("generate", fake_model, *args, stdin=b"say Hi\r\n")
        assert (done.code, done.out) == (0, "Hi\n")

    @pytest.mark.parametrize("args", [["-p", "-"], []])
    def test_an_empty_pipe_is_an_error(
        self, program: Program, fake_model: Path, args: list[str]
    ) -> None:
        done = program.run("generate", fake_model, *args)
        assert done.code == 2
        assert done.err_lines[-1] == "try: --prompt TEXT, or --input FILE (- for stdin)"

    def test_json_lines_in_a_pipe_are_no_prompt(self, program: Program, fake_model: Path) -> None:
        done = program.run("generate", fake_model, stdin=b'{"prompt": "say a"}\n{"prompt": "b"}\n')
        assert (done.code, done.out) == (2, "")
        assert done.err_lines[-1] == "try: --input -"


def test_a9_the_template_library_is_there_before_the_clock_starts(
    program: InProcess, fake_model: Path
) -> None:
    script = (
        "import sys, cli.fake_minivllm as f; f._install()\n"
        "from support.fake_llm import FakeLLM\n"
        "from minivllm_cli.batch import prompts\n"
        "build = prompts.PromptBuilder.build\n"
        "def before(*args):\n"
        "    loaded = set(sys.modules); made = build(*args)\n"
        "    print(sorted(set(sys.modules) - loaded), file=sys.stderr); return made\n"
        "prompts.PromptBuilder.build = before\n"
        "from minivllm_cli.app import run; sys.exit(run())"
    )
    import sys

    program.command = [sys.executable, "-c", script]
    message = {"messages": [{"role": "user", "content": "say x"}]}
    source = program.write_lines("in", [message])
    for args in (["-p", "say x"], ["-i", source]):
        done = program.run("generate", fake_model, *args)
        assert done.code == 0, done.err
        assert "[]" in done.err_lines, done.err


class TestStop:
    """C10: escapes of `--stop` are read as those of `--separator`."""

    @pytest.mark.parametrize(
        ("typed", "meant"), [(r"\n", "\n"), (r"\t|", "\t|"), (r"a\\n", r"a\n"), (r"\d", r"\d")]
    )
    def test_escapes(self, program: Program, fake_model: Path, typed: str, meant: str) -> None:
        args = ["generate", fake_model, "-p", "say x", "--json", "--stop", typed]
        assert program.run(*args).records[0]["sampling"]["stop"] == [meant]


def test_d_lines_of_text_are_user_messages_unless_raw(program: Program, fake_model: Path) -> None:
    (program.home / "in.txt").write_text("say a\nsay b\n")
    args = ["generate", fake_model, "-i", "in.txt", "--input-format", "text"]
    done = program.run(*args)
    assert [r["outputs"][0]["text"] for r in done.records] == ["a", "b"]
    assert [e["add"][0] for e in program.added] == [257, 257]
    assert "raw" not in done.err
    program.forget_engine()
    done = program.run(*args, "--raw")
    assert [e["add"][0] for e in program.added] == [ord("s")] * 2
    assert "raw" not in done.err


def test_d_a_text_in_the_place_of_the_model(program: Program, fake_model: Path) -> None:
    done = program.run("generate", "Define zebra.")
    assert done.code == 2
    assert done.err_lines == [
        "error: 'Define zebra.' is no model: MODEL stands there, and -p takes text",
        "try: minivllm generate demo -p 'Define zebra.'",
    ]


def test_d_a_line_that_the_template_refuses_is_named_with_its_line(
    program: Program, tmp_path: Path, fake_model: Path
) -> None:
    model = tmp_path / "strict"
    model.mkdir()
    for file in fake_model.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    template = model / "chat_template.jinja"
    refusing = "{% if messages[0].content == 'no' %}{{ raise_exception('never no') }}{% endif %}"
    template.write_text(refusing + template.read_text())
    lines = [{"messages": [{"role": "user", "content": text}]} for text in ("say a", "no")]
    source = program.write_lines("in", lines)
    done = program.run("generate", model, "-i", source, "-o", "out")
    assert done.code == 3
    (named,) = [line for line in done.err_lines if line.startswith(f"warning: {source}:2: ")]
    assert "never no" in named
    assert "--only-failed" not in done.err, "the same would happen again"


def test_d_two_prompts_have_a_short_summary(program: Program, fake_model: Path) -> None:
    source = program.write_lines("in", _lines(2))
    done = program.run("generate", fake_model, "-i", source, "-o", "out")
    rows = [line.split("  ")[0] for line in done.err_lines]
    assert rows[-4:] == ["requests", "tokens", "time", "output"]
    assert not {"TTFT", "E2E", "peak", "cache"} & set(rows)
    verbose = program.run("generate", fake_model, "-i", source, "-v")
    rows = [line.split("  ")[0] for line in verbose.err_lines]
    assert {"TTFT", "E2E", "peak", "cache"} <= set(rows)
    assert "+ other 0." in verbose.err
