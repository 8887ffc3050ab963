"""Every flag works or is refused: none is taken and ignored."""

import json
from pathlib import Path

import pytest

from cli.program import Program, parse_strictly


@pytest.mark.parametrize(
    ("args", "out"),
    [
        (["--format", "text", "--separator", "XX"], b"aXX"),
        (["--separator", "x"], b"ax"),
        (["--separator", r"\0"], b"a\0"),
        ([], b"a\n"),
    ],
)
def test_the_separator_ends_a_streamed_answer(
    program: Program, fake_model: Path, args: list[str], out: bytes
) -> None:
    assert program.run("generate", fake_model, "-p", "say a", *args).stdout == out


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["-i", "in", "--json"], "--json goes with --prompt or --dry-run"),
        (["-i", "in", "--raw"], "--raw goes with --prompt"),
        (["-i", "in", "--separator", "x"], "--separator goes with --format text"),
        (["-i", "in", "--format", "text", "--logprobs", "1"], "--logprobs needs records"),
        (["-i", "in", "--input-format", "text", "--raw", "--think"], "--think is for the chat"),
        (["-i", "in", "--dry-run", "--summary", "s"], "--summary has no figures of a --dry-run"),
        (["-p", "x", "--logprobs", "1"], "--logprobs needs records"),
        (["-p", "x", "--raw", "--no-think"], "--no-think is for the chat template"),
        (["-p", "x", "--order", "input"], "--order goes with --input"),
        (["-p", "x", "--input-format", "text"], "--input-format goes with --input"),
        (["-p", "x", "--on-error", "stop"], "--on-error goes with --input"),
        (["-p", "x", "--resume", "auto"], "--resume needs a regular file"),
        (["-p", "x", "-q", "-v"], "-q and -v exclude each other"),
        (["-i", "in", "-o", "o", "--summary", "o.partial"], "--summary is the journal"),
        (
            ["-i", "in", "--only-failed", "earlier", "--summary", "earlier"],
            "--summary and --only-failed are the same file",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_would_be_ignored_is_refused(
    program: Program, fake_model: Path, args: list[str], what: str
) -> None:
    program.write_lines("in", [{"id": "a", "prompt": "say x"}])
    earlier = program.write_lines("earlier", [{"id": "a", "status": "error", "outputs": []}])
    before = earlier.read_bytes()
    done = program.run("generate", fake_model, *args)
    assert (done.code, done.out, program.engine_log) == (2, "", [])
    assert done.err.startswith(f"error: {what}")
    assert earlier.read_bytes() == before


@pytest.mark.parametrize("how", [["-p", "x"], ["-i", "in"], ["-i", "in", "--dry-run"]])
def test_thinking_is_refused_where_the_template_has_no_switch(
    program: Program, fake_model: Path, how: list[str]
) -> None:
    program.write_lines("in", [{"prompt": "say x"}])
    model = program.home / "model"
    model.mkdir()
    for file in fake_model.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    done = program.run("generate", model, *how, "--think")
    assert done.code == 2
    assert "has no switch for thinking" in done.err_lines[0]


@pytest.mark.parametrize("command", [["generate", "-p", "x"], ["env"]])
def test_print_config_as_json(program: Program, command: list[str]) -> None:
    args = ["--print-config", "--json", "--sources", "--set", "output.progress=off"]
    done = program.run(*command, *args)
    document = parse_strictly(done.out)
    assert (done.code, document["schema_version"], document["kind"]) == (0, 1, "config")
    assert document["config"]["output"] == {"progress": "off"}
    assert document["sources"]["output"]["progress"].startswith("--set output.progress=off")
    fewer = program.run(*command, *args, "--diff-defaults")
    assert parse_strictly(fewer.out)["config"] == {"output": {"progress": "off"}}


@pytest.mark.parametrize("given", [[""], [" "], ["--set", "model="], ["--set", "model=''"]])
def test_a_model_without_a_name_is_refused(program: Program, given: list[str]) -> None:
    done = program.run("generate", "-p", "x", *given)
    if given == ["--set", "model="]:  # null: back to the default
        return
    assert done.code == 2
    assert "has no name" in done.err_lines[0]
    assert done.err_lines[1].startswith("try: MODEL = demo")


@pytest.mark.parametrize(
    "args",
    [
        ["-p", "say x"],
        ["-p", "say x", "-v"],
        ["-p", ""],
        ["-p", "x", "--bogus"],
        ["-i", "in", "--set", "no.such=1"],
        ["-i", "in", "-v"],
        ["-i", "in", "--device", "sideways"],
        ["-i", "crash", "--debug"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("by", ["flag", "variable"])
def test_in_json_mode_every_line_of_stderr_is_an_object(
    program: Program, fake_model: Path, args: list[str], by: str
) -> None:
    if by == "variable" and ({"--bogus", "--device", "--set"} & set(args)):
        pytest.skip("refused before the variable is read")
    program.write_lines("in", [{"prompt": "say x", "max_tokens": 1}, "bad", {"prompt": "nan"}])
    program.write_lines("crash", [{"prompt": "crash"}])
    flags = ["--progress", "json"] if by == "flag" else []
    env = {} if by == "flag" else {"MINIVLLM_OUTPUT__PROGRESS": "json"}
    done = program.run("generate", fake_model, *args, *flags, FAKE_TOKENS="1", **env)
    events = [json.loads(line) for line in done.err_lines]
    assert all(isinstance(event["event"], str) for event in events)
    kinds = {event["event"] for event in events}
    assert ("error" in kinds) == (done.code != 0)
    assert ("summary" in kinds) == (args[:2] == ["-i", "in"] and done.code == 3)
    for event in events:
        assert event["event"] != "log" or event["level"] in ("info", "warning")
