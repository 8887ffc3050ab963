"""`inspect-cache FILE` reads dumps of anybody: a view or one clear error, whatever is in them."""

import io
import json
import random
import re
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm_cli.app import run
from support.fuzzing import EDITS, VALUES, edited, examples
from support.loggers import loggers_as_they_were

FLAGS = st.sampled_from([(), ("-v",), ("-q",), ("--json",), ("--limit", "2"), ("--show-text",)])


def called(*args: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with loggers_as_they_were(), redirect_stdout(out), redirect_stderr(err):
        code = run(["inspect-cache", *args])
    return code, out.getvalue(), err.getvalue()


@cache
def good() -> dict[str, Any]:
    """A dump with a tree, a hit and misses."""
    code, out, err = called("demo", "--memory", "24GiB", "--json", "-q")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    node = {"hits": 2, "refs": 0, "recomputed": 1, "recomputed_tokens": 64, "age": 3, "blocks": 1}
    document["nodes"] = [
        {"id": 1, "parent": 0, "start": 0, "end": 64, "hash": "9f" * 16, "snapshot": 64, **node},
        {
            "id": 2,
            "parent": 1,
            "start": 64,
            "end": 128,
            "hash": "a0" * 16,
            "snapshot": None,
            **node,
        },
    ]
    document["hit"] = {"requests": 4, "prompt_tokens": 400, "kv_tokens": 128, "usable_tokens": 64}
    document["hit"] |= {"restored_tokens": 0, "kv": 0.32, "usable": 0.16}
    document["misses"], document["miss_counts"] = {"new_prefix": 1.0}, {"new_prefix": 3}
    return document


def shown(content: bytes, *flags: str) -> tuple[int, str, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cache.json")
        path.write_bytes(content)
        return called(str(path), *flags)


def check(code: int, out: str, err: str) -> None:
    # 4: the plan that was dumped does not fit.
    assert code in (0, 2, 4), err
    assert "bug" not in err.replace("--debug", "")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", out + err)
    assert len(out) < 2_000_000 and len(err.splitlines()) < 20
    if code == 2:
        assert err.count("error: ") == 1


def test_the_dump_that_is_edited_is_shown() -> None:
    code, out, err = shown(json.dumps(good()).encode())
    assert code == 0 and "[64..128)" in out, err


@settings(max_examples=examples(60), deadline=None)
@given(EDITS, FLAGS)
def test_edited_dumps(edits: Any, flags: tuple[str, ...]) -> None:
    check(*shown(json.dumps(edited(good(), edits)).encode(), *flags))


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 4000), st.binary(max_size=6), st.randoms(use_true_random=False))
def test_broken_bytes(cut: int, more: bytes, rng: random.Random) -> None:
    whole = json.dumps(good()).encode()
    content = bytearray(whole[:cut] + more + (whole[cut:] if rng.random() < 0.5 else b""))
    for _ in range(rng.randrange(4)):
        if content:
            content[rng.randrange(len(content))] = rng.randrange(256)
    check(*shown(bytes(content)))


@settings(max_examples=examples(20), deadline=None)
@given(VALUES)
def test_other_json(value: Any) -> None:
    code, out, err = shown(json.dumps(value).encode())
    check(code, out, err)
    assert code == 2 and "is no cache dump" in err
