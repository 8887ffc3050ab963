"""`inspect-cache FILE`: what is refused, what is shown of it, and that nothing in it is trusted."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.in_process import InProcess
from cli.program import REAL, Finished, Program
from minivllm_cli.errors import CliError
from minivllm_cli.inspect_cache import dump_view
from minivllm_cli.inspect_cache.dump_schema import Document
from minivllm_cli.inspect_cache.dump_view import read_dump

_PROBE = (
    "import sys\n"
    "from minivllm_cli.app import run\n"
    "code = run(sys.argv[1:])\n"
    "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)), code, file=sys.stderr)\n"
)
HASHES = ["9f3a0001" + "0" * 24, "9f3b0002" + "0" * 24, "aaaa0003" + "0" * 24]


def node(number: int, parent: int, start: int, end: int, **more: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"hits": 0, "refs": 0, "snapshot": None, "recomputed": 0, "age": 0}
    found = {"id": number, "parent": parent, "start": start, "end": end, **defaults, **more}
    found.setdefault("hash", f"{number:032x}")
    found["blocks"] = (end - start) // 64
    found["recomputed_tokens"] = found["recomputed"] * (end - start)
    return found


# The example of the issue: two branches, one of which has KV alone below it.
NODES = [
    node(1, 0, 0, 576, hits=212, refs=3, snapshot=576, age=1, hash=HASHES[0]),
    node(2, 1, 576, 1152, hits=180, refs=2, snapshot=1152, age=3, hash=HASHES[1]),
    node(3, 2, 1152, 1728, hits=64, recomputed=64, age=5, hash=HASHES[2]),
    node(4, 1, 576, 960, hits=2, age=1),
]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document of a plan; a GPU of a size that does not depend on this machine."""
    home = tmp_path_factory.mktemp("plan")
    done = InProcess(home, REAL).run("inspect-cache", "demo", "--memory", "24GiB", "--json", "-q")
    (record,) = done.records
    return record


@pytest.fixture
def dump(plan: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(plan))
    found |= {
        "source": "generate",
        "nodes": NODES,
        "hit": {
            "requests": 400,
            "prompt_tokens": 100_000,
            "kv_tokens": 52_000,
            "usable_tokens": 38_000,
            "restored_tokens": 0,
            "kv": 0.52,
            "usable": 0.38,
        },
        "misses": {"no_snapshot": 0.75, "new_prefix": 0.25},
        "miss_counts": {"no_snapshot": 30, "new_prefix": 10},
        "evicted": {"snapshots": 12, "kv_blocks": 0},
    }
    return found


@pytest.fixture
def real(tmp_path: Path) -> Program:
    return InProcess(tmp_path, list(REAL))


def show(program: Program, content: Any, *args: str, **extra: str) -> Finished:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (program.home / "cache.json").write_bytes(data)
    return program.run("inspect-cache", "cache.json", *args, **extra)


def tree_of(done: Finished) -> list[str]:
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(("└─", "├─")))
    end = next(i for i, line in enumerate(lines) if line.startswith("evicted:"))
    return lines[start:end]


def test_the_tree(real: Program, dump: dict[str, Any]) -> None:
    assert tree_of(show(real, dump)) == [
        "└─ [0..576)            9 blk  hits 212  ref 3  ◆576   9f3a0001",
        "   ├─ [576..1152)      9 blk  hits 180  ref 2  ◆1152  9f3b0002",
        "   │  └─ [1152..1728)  9 blk  hits  64  ref 0  –      aaaa0003",
        "   │        ↑ KV cached, no snapshot: 576 tokens computed again 64×",
        "   └─ [576..960)       6 blk  hits   2  ref 0  –      00000000",
    ]


@pytest.mark.parametrize(
    ("args", "first_words", "last"),
    [
        (["--limit", "2"], ["[0..576)", "[576..1152)"], "… 2 segments more; --limit 4 shows all"),
        (["--sort", "tokens", "--limit", "2"], ["[0..576)", "[576..1152)"], "… 2 segments more"),
        (["--sort", "age"], ["[0..576)", "[576..960)", "[576..1152)", "[1152..1728)"], ""),
        (["--filter", "aaaa"], ["[0..576)", "[576..1152)", "[1152..1728)"], "1 of 4 segments pass"),
        (["--filter", "held"], ["[0..576)", "[576..1152)"], "2 of 4 segments pass: held"),
        (
            ["--filter", "no-snapshot", "--filter", "recomputed"],
            ["[0..576)"],
            "1 of 4 segments pass",
        ),
    ],
)
def test_what_is_selected(
    real: Program, dump: dict[str, Any], args: list[str], first_words: list[str], last: str
) -> None:
    tree = tree_of(show(real, dump, *args))
    ranges = [line.split("[")[1].split()[0] for line in tree if "─ [" in line]
    assert ["[" + text for text in ranges][: len(first_words)] == first_words
    assert tree[-1].startswith(last)


def test_quiet_is_the_hashes_alone(real: Program, dump: dict[str, Any]) -> None:
    done = show(real, dump, "-q", "--limit", "2")
    assert (done.code, done.out, done.err) == (0, f"{HASHES[0]}\n{HASHES[1]}\n", "")
    done = show(real, dump, "-q", "--filter", "recomputed")
    assert done.out == HASHES[2] + "\n", "what passes, and not what is above it"


def test_json_is_the_document_and_the_table_moves(real: Program, dump: dict[str, Any]) -> None:
    done = show(real, dump, "--json")
    (record,) = done.records
    assert record["nodes"] == NODES
    assert record["hit"] == dump["hit"]
    table = show(real, dump)
    assert done.err == table.out
    again = show(real, done.stdout)
    assert again.out == table.out


def test_a_saved_plan_is_shown_as_the_plan_was(real: Program, plan: dict[str, Any]) -> None:
    shown = real.run("inspect-cache", "demo", "--memory", "24GiB")
    assert show(real, plan).out == shown.out


def test_a_dump_needs_no_model_and_no_torch(real: Program, dump: dict[str, Any]) -> None:
    (real.home / "cache.json").write_text(json.dumps(dump))
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE, "inspect-cache", "cache.json"],
        capture_output=True,
        text=True,
        env=real.environ(),
        cwd=real.home,
    )
    assert probe.stderr == "[] 0\n"


@pytest.mark.parametrize("columns", ["80", "120"])
def test_k40_large_figures_and_deep_trees_fit_80_columns(
    real: Program, dump: dict[str, Any], columns: str
) -> None:
    deep = [node(1, 0, 0, 64, hits=10**9, recomputed=10**6)]
    deep += [
        node(i, i - 1, 64 * (i - 1), 64 * i, hits=10**6, refs=1000, snapshot=64 * i)
        for i in range(2, 3000)
    ]
    done = show(real, dump | {"nodes": deep}, "--limit", "5000", COLUMNS=columns)
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("─ [" in line for line in lines) == 2999
    assert any("2997:" in line and "[191808..191872)" in line for line in lines)
    huge = [node(1, 0, 0, 2**59, hits=2**60, refs=2**60, snapshot=2**59)]
    tree = tree_of(show(real, dump | {"nodes": huge}))
    assert len(tree) == 2 and f"hits {2**60}" in tree[1]


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *above, last = [int(part) if part.isdigit() else part for part in path.split(".")]

    def change(found: dict[str, Any]) -> None:
        place: Any = found
        for part in above:
            place = place[part]
        place[last] = value

    return change


HOSTILE: dict[str, tuple[Any, str]] = {
    "another version": (changed("schema_version", 2), "has schema_version 2"),
    "another kind": (changed("kind", "bench"), "kind: "),
    "control characters": (changed("model.name", "x\x1b[2J"), "holds control characters"),
    "a line break": (changed("advice", ["a\nerror: b"]), "holds control characters"),
    "a long name": (changed("devices.0.name", "x" * 10_000), "at most 255"),
    "no device": (changed("devices", []), "devices: "),
    "a number as text": (changed("pools.kv.total", "7"), "pools.kv.total: "),
    "a boolean as a number": (changed("nodes.0.hits", True), "nodes.0.hits: "),
    "a negative count": (changed("nodes.0.hits", -1), "nodes.0.hits: "),
    "a huge count": (changed("nodes.0.hits", 10**30), "nodes.0.hits: "),
    "a share of 7": (changed("hit.kv", 7.0), "hit.kv: "),
    "a hash with escapes": (changed("nodes.0.hash", "\x1b[31mab"), "nodes.0.hash: "),
    "a node that is its own parent": (changed("nodes.0.parent", 1), "node 1 does not come after"),
    "a parent that is nowhere": (changed("nodes.2.parent", 77), "node 3 does not come after"),
    "two nodes of one number": (changed("nodes.1.id", 1), "node 1 does not come after"),
    "a gap in a prefix": (changed("nodes.1.start", 640), "node 2 does not begin where"),
    "an empty node": (changed("nodes.3.end", 576), "node 4 does not begin where"),
    "a snapshot elsewhere": (changed("nodes.0.snapshot", 64), "node 1 has a snapshot elsewhere"),
    "an unknown reason": (changed("misses.bad_luck", 0.1), "misses.bad_luck"),
    "uncounted reasons": (changed("miss_counts", {}), "name different reasons"),
    "a matrix with a hole": (changed("what_fits.0.max_model_len", 9), "what_fits has gaps"),
    "a part that is missing": (lambda found: found.pop("limits"), "limits: "),
    "nothing": (b"", "not JSON"),
    "broken JSON": (b'{"schema_version": 1, ', "not JSON"),
    "no object": (b"[1, 2]", "an array"),
    "no text": (b"\xff\xfe\x00", "not UTF-8"),
    "NaN": (b'{"schema_version": NaN}', "NaN is not JSON"),
    "a key twice": (b'{"kind": "cache", "kind": "cache"}', "duplicate key"),
    "nested deeply": (b'{"a":' * 100_000, "nested too deeply"),
    "digits without end": (b'{"schema_version": ' + b"9" * 10_000 + b"}", "10,000 digits"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_dumps_are_refused(tmp_path: Path, dump: dict[str, Any], name: str) -> None:
    change, said = HOSTILE[name]
    content = change
    if not isinstance(change, bytes):
        Document.model_validate(dump)
        dump = json.loads(json.dumps(dump))
        change(dump)
        content = json.dumps(dump).encode()
    path = tmp_path / "cache.json"
    path.write_bytes(content)
    with pytest.raises(CliError) as caught:
        read_dump(path)
    (problem,) = caught.value.problems
    text = "\n".join(problem.lines())
    assert said in text and str(path) in problem.what
    assert caught.value.exit_code == 2
    assert text.replace("\n", "").isprintable()
    assert len(text) < 1000


def test_a_dump_that_is_too_large_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump_view, "MOST_BYTES", 1000)
    path = tmp_path / "cache.json"
    path.write_text(" " * 1001)
    with pytest.raises(CliError, match="larger than 1000 B"):
        read_dump(path)


def test_hostile_text_is_shown_escaped(real: Program, dump: dict[str, Any]) -> None:
    nodes = [{**one, "text": "a\x1b]0;t\x07\u202eb\n漢\ud800"} for one in NODES]
    done = show(real, dump | {"nodes": nodes}, "--show-text")
    assert r"“a\x1b]0;t\x07\u202eb\n\u6f22" in done.out
    assert "\x1b" not in done.out and "\u202e" not in done.out


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["cache.json", "plan"], "cache.json is a dump, which names its model, and plan is not"),
        (["cache.json", "demo"], "cache.json is a dump, which names its model, and demo is not"),
        (["cache.json", "other.json"], "two dumps: cache.json and other.json"),
        (["cache.json", "--memory", "8GiB"], "--memory goes with the view plan"),
        (["cache.json", "--input", "x"], "--input goes with the view run"),
        (["cache.json", "--dtype", "bf16"], "--dtype is for an engine"),
        (["cache.json", "--set", "engine.dtype=bf16"], "--set is for an engine"),
        (["cache.json", "--limit", "0"], "--limit 0: should be at least 1"),
        (["cache.json", "--filter", "xyz"], "--filter xyz: neither a kind of segment nor"),
        (["cache.json", "--show-text"], "--show-text: cache.json holds no text"),
        (["other.json"], "other.json is no cache dump"),
    ],
)
def test_usage_errors(real: Program, dump: dict[str, Any], args: list[str], error: str) -> None:
    (real.home / "cache.json").write_text(json.dumps(dump))
    (real.home / "other.json").write_text("{}")
    done = real.run("inspect-cache", *args)
    assert (done.code, done.out) == (2, "")
    assert done.err_lines[0].startswith(f"error: {error}")
    assert len(done.err_lines) <= 6
