"""`bench --compare` reads files of anybody: a comparison or one clear error, whatever is in them."""

import io
import json
import random
import re
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm_cli.app import run
from support.fuzzing import EDITS, VALUES, edited, examples
from support.loggers import loggers_as_they_were

SAMPLE = {"tok_s": 100.0, "wall_s": 0.1, "itl_ms": 10.0}
SAMPLE |= dict.fromkeys(("ttft_ms", "queue_ms", "tpot_ms", "e2e_ms"), 3.0)
WORKLOAD = {"kind": "decode", "batch": 1, "depth": 4, "gen_len": 8}
GOOD: dict[str, Any] = {
    "schema_version": 1,
    "kind": "bench",
    "complete": True,
    "env": {"torch": "2.11", "gpus": [{"name": "x"}]},
    "config": {"engine": {"max_num_seqs": 8}},
    "model": {"name": "demo", "hash": "sha256:1"},
    "device": {"kind": "cuda", "name": "H200"},
    "rows": [
        {"workload": WORKLOAD | {"batch": n}, "variant": "graph", "samples": [SAMPLE] * 5}
        for n in (1, 8)
    ],
}
SMALL = json.dumps(GOOD).encode()


def compare(base: bytes, new: bytes, *flags: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("base.json", "new.json")]
        for path, content in zip(paths, (base, new), strict=True):
            path.write_bytes(content)
        with loggers_as_they_were(), redirect_stdout(out), redirect_stderr(err):
            code = run(["bench", "--compare", *map(str, paths), *flags])
    return code, out.getvalue(), err.getvalue()


def check(code: int, out: str, err: str) -> None:
    assert code in (0, 2, 5), err
    assert "bug" not in err.replace("--debug", "")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", out + err)
    assert len(out) < 2_000_000 and len(err.splitlines()) < 20
    if code == 2:
        assert err.count("error: ") == 1


FLAGS = st.sampled_from(
    [(), ("--force",), ("--json", "--force"), ("--format", "md", "--force"), ("--metric", "itl_ms")]
)


@settings(max_examples=examples(60), deadline=None)
@given(EDITS, EDITS, FLAGS, st.booleans())
def test_edited_documents(base: Any, new: Any, flags: tuple[str, ...], both: bool) -> None:
    one = json.dumps(edited(GOOD, base)).encode() if both else SMALL
    check(*compare(one, json.dumps(edited(GOOD, new)).encode(), *flags, "--fail-if-slower", "3%"))


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, len(SMALL)), st.binary(max_size=6), st.randoms(use_true_random=False))
def test_broken_bytes(cut: int, more: bytes, rng: random.Random) -> None:
    content = bytearray(SMALL[:cut] + more + (SMALL[cut:] if rng.random() < 0.5 else b""))
    for _ in range(rng.randrange(4)):
        if content:
            content[rng.randrange(len(content))] = rng.randrange(256)
    check(*compare(SMALL, bytes(content)))


@settings(max_examples=examples(30), deadline=None)
@given(VALUES)
def test_other_json(value: Any) -> None:
    code, _, err = compare(json.dumps(value).encode(), SMALL)
    check(code, "", err)
    assert code == 2 and "is no saved run" in err
