"""Checks that would check nothing, and keys that go with nothing: refused with advice that works as it is
written."""

from pathlib import Path

import pytest

from cli.bench.conftest import Bench
from cli.bench.fake_bench_engine import Behaviour, FakeMachine


def without(args: list[object], keys: set[str]) -> list[object]:
    """Arguments without the `--set` of those keys."""
    kept: list[object] = []
    for flag, value in zip(args[::2], args[1::2], strict=True):
        if flag != "--set" or str(value).partition("=")[0] not in keys:
            kept += [flag, value]
    return kept


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--workload", "prefill"], "prompts of prefill are random"),
        (["--workload", "decode", "--batch", 1], "prompts of decode are random"),
        (["--workload", "mixed"], "prompts of mixed are random"),
        (["--suite", "quick"], "prompts of decode are random"),
        ([], "prompts of prefill and decode are random"),
        (["--suite", "stages"], "prompts of stages are random"),
        (["--workload", "decode", "--depth", "0,100"], "prompts of decode are random"),
        (["--workload", "decode", "--depth", "10"], "prompts of decode are random"),
        (["--set", "bench.workload=prefill"], "prompts of prefill are random"),
        (
            ["--workload", "prefix", "--depth", "10,63", "--prompt-len", 200],
            "reuse comes in units of 64 tokens, and the prefixes that are shared have 63 tokens",
        ),
        (
            ["--workload", "prefix", "--set", "bench.depth=1"],
            "reuse comes in units of 64 tokens, and the prefixes that are shared have 1 token\n",
        ),
        (
            ["--workload", "prefix", "--depth", 100, "--set", "cache.block_size=128"],
            "reuse comes in units of 128 tokens, and the prefixes that are shared have 100 tokens",
        ),
        (["--workload", "prefix", "--set", "cache.prefix_cache=false"], "cache.prefix_cache is"),
    ],
)
def test_verify_is_refused_where_no_request_can_reuse_a_prefix(
    machine: FakeMachine, bench: Bench, args: list[object], why: str
) -> None:
    done = bench(*args, "--verify", 1)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(
        "error: --verify has nothing to do: no request reuses a prefix\nwhy: "
    )
    assert f"why: {why}" in done.err
    assert not machine.engines
    words = done.err.splitlines()[-1].removeprefix("try: ").split(", or ")[0].split()
    # A suite, or a key that is set, takes the place of what was typed.
    told = {word.partition("=")[0] for word in words if "=" in word}
    kept = [] if words[0] == "--suite" else without(args, told)
    few = ["--reps", 1, "--warmup", 0, "--json", "-q"]
    again = bench(*kept, *words, "--verify", 1, *few)
    assert again.code == 0 and again.document["verify"]["replayed"] > 0


def test_verify_of_prefixes_as_long_as_the_grid_has_something_to_do(
    machine: FakeMachine, bench: Bench
) -> None:
    few = ("--reps", 1, "--warmup", 0, "--json", "-q")
    row = ("--workload", "prefix", "--depth", "10,64", "--prompt-len", 1, "--batch", 2)
    done = bench(*row, "--gen-len", 2, "--verify", 1, *few)
    assert done.code == 0
    assert done.document["verify"]["replayed"] == 2


@pytest.mark.parametrize(
    "args",
    [
        # 64 tokens more than there is room for.
        ("--max-model-len", 70, "--prompt-len", 8, "--depth", 10),
        ("--set", "cache.snapshot_memory=0", "--depth", 512),
    ],
)
def test_verify_is_only_to_be_left_out_where_no_prefix_that_fits_can_be_reused(
    machine: FakeMachine, bench: Bench, args: tuple[object, ...]
) -> None:
    row = ("--workload", "prefix", "--gen-len", 2, "--batch", 1, *args)
    done = bench(*row, "--verify", 1)
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith("\ntry: leave out --verify\n")
    assert not machine.engines
    assert bench(*row, "--reps", 1, "--warmup", 0, "-q").code == 0


@pytest.mark.parametrize(("length", "refused"), [(64, True), (65, False)])
def test_verify_of_a_file_is_refused_where_every_line_is_too_short(
    machine: FakeMachine, bench: Bench, tmp_path: Path, length: int, refused: bool
) -> None:
    path = tmp_path / "lines.jsonl"
    ids = list(range(1, length + 1))
    path.write_text(f'{{"prompt_token_ids": {ids}, "max_tokens": 2}}\n' * 2)
    args = ("--workload", f"jsonl:{path}", "--batch", 1, "--reps", 1, "--warmup", 0, "--json", "-q")
    done = bench(*args, "--verify", 1)
    if refused:
        assert (done.code, done.out) == (2, "")
        assert "units of 64 tokens, and the longest prompt has 64 tokens\n" in done.err
        assert not machine.engines
    else:
        assert done.code == 0 and done.document["verify"]["replayed"] == 1


@pytest.mark.parametrize(
    ("suite", "args", "kind"),
    [
        (["--suite", "stages"], ["--batch", 3], "decode"),
        (["--suite", "quick"], ["--prompt-len", 9], "prefill"),
        (["--suite", "long"], ["--prompt-len", 9, "--gen-len", "2~3"], "mixed"),
        (["--suite", "prefix"], ["--groups", 2, "--batch", 2], "prefix"),
        (["--set", "bench.suite=quick"], ["--set", "bench.depth=8"], "decode"),
        ([], ["--batch", 3], "decode"),
        (["--suite", "quick"], ["--depth", 0, "--prompt-len", 9], None),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else str(value),
)
def test_a_key_beside_a_suite_comes_with_advice_that_works_as_it_is_written(
    machine: FakeMachine, bench: Bench, suite: list[str], args: list[object], kind: str | None
) -> None:
    done = bench(*suite, *args)
    assert (done.code, done.out) == (2, "")
    *_, hint = done.err.splitlines()
    few = ("--reps", 1, "--warmup", 0, "-q")
    typed = [flag if flag != "--set" else f"--set {value}" for flag, value in pairs(args)]
    less = f"leave out {' and '.join(sorted(typed, key=hint.index))}"
    if kind is None:
        assert hint == f"try: {less}"
        return
    assert hint == f"try: --workload {kind} in place of the suite, or {less}"
    assert bench("--workload", kind, *args, *few).code == 0


def pairs(args: list[object]) -> list[tuple[str, object]]:
    return [(str(flag), value) for flag, value in zip(args[::2], args[1::2], strict=True)]


@pytest.mark.parametrize(
    "args",
    [
        ("--set", "cache.num_blocks=20"),
        ("--set", "engine.cpu_memory=8MiB"),
        ("--set", "cache.num_blocks=20", "--set", "engine.cpu_memory=4MiB"),
        (),
    ],
)
def test_a_length_beyond_the_positions_comes_with_advice_that_works_as_it_is_written(
    machine: FakeMachine, bench: Bench, args: tuple[str, ...]
) -> None:
    row = ("--workload", "prefix", "--depth", 64, "--prompt-len", 2, "--gen-len", 2, "--batch", 1)
    done = bench(*row, "--set", "engine.max_model_len=100000", *args)
    assert (done.code, done.out) == (2, "")
    *_, hint = done.err.splitlines()
    for words in hint.removeprefix("try: ").split(", or "):
        told = words.split()
        keys = {word.partition("=")[0] for word in told[1::2]}
        assert "engine.max_model_len" in keys
        kept = without(list(args), keys)
        again = bench(*row, *kept, *told, "--reps", 1, "--warmup", 0, "-q")
        assert again.code == 0, (words, again.err)


@pytest.mark.parametrize(
    ("device", "args"),
    [
        ("cpu", ["--workload", "prefill", "--prompt-len", 9]),
        ("cpu", ["--workload", "decode"]),
        ("cpu", ["--suite", "quick"]),
        ("cpu", []),
        ("cuda", ["--workload", "mixed", "--eager"]),
        ("cuda", ["--workload", "decode", "--graph"]),
    ],
)
def test_strict_equal_is_refused_where_there_is_one_variant_only(
    machine: FakeMachine, bench: Bench, device: str, args: list[object]
) -> None:
    machine.behaviour = Behaviour(device=device)
    done = bench(*args, "--strict-equal")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: --strict-equal has nothing to do: ")
    variant = "graph" if "--graph" in args else "eager"
    assert f"why: every workload runs in one variant alone, {variant}\n" in done.err
    assert not machine.engines
    words = done.err.splitlines()[-1].removeprefix("try: ").split(", or ")[0].split()
    kept = [] if words[0] == "--suite" else args
    again = bench(*kept, *words, "--strict-equal", "--reps", 1, "--warmup", 0, "--json", "-q")
    assert again.code == 0 and again.document["equal"]
