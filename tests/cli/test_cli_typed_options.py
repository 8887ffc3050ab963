"""A remedy replaces what was typed: a key that came by its flag is told as the flag."""

import pytest

from cli.program import REAL, Program
from minivllm_cli.config.settings import Settings, resolve_settings
from minivllm_cli.config.typed_options import as_typed, option, remedies_as_typed
from minivllm_engine.core.errors import CapacityError

SEQS, LENGTH = "engine.max_num_seqs", "engine.max_model_len"
HINT = f"--set {SEQS}=16 --set {LENGTH}=640, or --set cache.snapshot_memory=2MiB; (--set {SEQS}=8)"


def settings(*assignments: str, **flags: tuple[str, str]) -> Settings:
    typed = {f"engine.{name}": value for name, value in flags.items()}
    return resolve_settings(assignments=assignments, flags=typed, environ={})


def test_every_assignment_of_a_typed_key_becomes_its_flag() -> None:
    typed = settings(max_num_seqs=("--max-num-seqs", "500"))
    assert as_typed(HINT, typed) == (
        f"--max-num-seqs 16 --set {LENGTH}=640, or --set cache.snapshot_memory=2MiB; "
        "(--max-num-seqs 8)"
    )


@pytest.mark.parametrize("assignment", [f"{SEQS}=500", "engine={max_num_seqs: 500}"])
def test_set_stays_where_set_was_typed(assignment: str) -> None:
    typed = settings(assignment)
    assert typed.source(SEQS).startswith("--set ")
    assert as_typed(HINT, typed) == HINT
    assert option(typed, SEQS, 16, flag="--max-num-seqs") == f"--set {SEQS}=16"


def test_set_is_told_where_nothing_was_typed(tmp_path) -> None:
    (tmp_path / "c.yaml").write_text("engine:\n  max_num_seqs: 500\n")
    from_file = resolve_settings(files=[tmp_path / "c.yaml"], environ={})
    from_environment = resolve_settings(environ={"MINIVLLM_ENGINE__MAX_NUM_SEQS": "500"})
    for given in (settings(), from_file, from_environment):
        assert as_typed(HINT, given) == HINT
        assert option(given, SEQS, 16, flag="--max-num-seqs") == "--max-num-seqs 16"


def test_the_hint_of_an_error_is_told_as_typed_on_its_way() -> None:
    typed = settings(max_model_len=("--max-model-len", "32K"))
    with pytest.raises(CapacityError) as caught, remedies_as_typed(typed):
        raise CapacityError("too long", hint=f"--set {LENGTH}=640")
    assert caught.value.hint == "--max-model-len 640"
    with pytest.raises(CapacityError) as caught, remedies_as_typed(typed):
        raise CapacityError("too long")
    assert caught.value.hint is None


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "demo", "-p", "x"],
        ["chat", "demo"],
        ["inspect-cache", "demo", "plan"],
        ["inspect-cache", "demo", "run", "-i", "in.jsonl"],
        ["bench", "demo", "--workload", "decode", "--batch", "1"],
    ],
    ids=" ".join,
)
def test_every_command_tells_the_flag_that_was_typed(program: Program, command: list[str]) -> None:
    program.command = REAL
    program.write_lines("in.jsonl", [{"prompt": "x"}])
    args = [*command, "--device", "cpu", "--set", "engine.cpu_memory=16MiB", "-q"]
    for typed, told in (
        (["--max-num-seqs", "100000"], "try: --max-num-seqs "),
        (["--set", f"{SEQS}=100000"], f"try: --set {SEQS}="),
        (["--max-model-len", "100000"], "try: --max-model-len "),
    ):
        done = program.run(*args, *typed, stdin=b"x")
        assert done.code in (2, 4)
        assert done.err_lines[-1].startswith(told), done.err
