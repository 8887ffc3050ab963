"""`generate` with the real engine and the model that is shipped."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cli.program import REAL, Program, read_records, wait_for

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "prompts.jsonl"
ANSWERS = {
    "aardvark": "Nocturnal burrowing mammal of the grasslands of Africa that feeds on termites.",
    "trumpet": "A brass musical instrument with a brilliant tone.",
    "kind": "A kind of bird of prey.",
    "synonym": "Another word is auto.",
    "recall": "93.",
    "unknown": "I don't know the word 'flibbertigon'.",
}


@pytest.fixture
def demo(program: Program) -> Program:
    program.command = REAL
    return program


def test_the_examples_are_answered(demo: Program) -> None:
    done = demo.run("generate", "demo", "-i", EXAMPLES)
    assert done.code == 0
    texts = {r["id"]: r["outputs"][0]["text"] for r in done.records}
    assert {name: texts[name] for name in ANSWERS} == ANSWERS
    assert all(r["outputs"][0]["stop_reason"] == "<|im_end|>" for r in done.records)
    assert all(r["sampling"]["temperature"] == 0 for r in done.records)
    assert "error" not in done.err


def test_one_prompt_is_its_text_and_a_newline(demo: Program) -> None:
    done = demo.run("generate", "-p", "Define aardvark.", "-q")
    assert (done.code, done.out, done.err) == (0, ANSWERS["aardvark"] + "\n", "")


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_each_config_runs_as_it_is(demo: Program, config: Path) -> None:
    done = demo.run("generate", "--config", config, "-p", "Define trumpet.", "-q")
    assert (done.code, done.out) == (0, ANSWERS["trumpet"] + "\n")


def _user(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def test_k1_odd_requests_cost_themselves_only(demo: Program) -> None:
    lines = [
        _user("Define trumpet."),
        {"prompt_token_ids": [5] * 63, "max_tokens": 1_000_000_000},
        {"prompt_token_ids": [5] * 64},
        {"prompt_token_ids": [10_000_000]},
        _user("Define trumpet.", top_k=1_000_000_000, temperature=1e-5),
        _user("Define trumpet.", temperature=-1),
        _user(""),
        {"prompt": ""},
        _user("Define trumpet.", logprobs=2, max_tokens=3),
        _user("Define trumpet.", n=2, temperature=0),
    ]
    source = demo.write_lines("in", lines)
    done = demo.run("generate", "demo", "-i", source, "--max-model-len", "64")
    assert done.code == 3
    shown = [
        r["error"]["code"] if r["error"] else r["outputs"][0]["finish_reason"] for r in done.records
    ]
    assert shown[:6] == [
        "stop",
        "context",
        "prompt_too_long",
        "invalid_field",
        "stop",
        "invalid_field",
    ]
    assert shown[7:] == ["empty_prompt", "length", "stop"]
    assert done.records[1]["usage"]["completion_tokens"] == 1
    assert done.records[4]["outputs"][0]["text"] == ANSWERS["trumpet"]
    logprobs = done.records[8]["outputs"][0]["logprobs"]
    assert [len(p["top"]) for p in logprobs] == [2, 2, 2]
    assert [o["text"] for o in done.records[9]["outputs"]] == [ANSWERS["trumpet"]] * 2


def test_a_dry_run_tells_one_as_one(demo: Program) -> None:
    args = ["--dry-run", "--max-num-seqs", "1", "--set", "cache.num_blocks=1"]
    done = demo.run("generate", "-p", "Define trumpet.", *args)
    assert "fits: 1 state slot, 1 block of 64 tokens, " in done.out


def test_a_dry_run_refuses_the_ids_that_the_run_does(demo: Program) -> None:
    messages = [{"role": "user", "content": "Define trumpet."}]
    wrong = ({"stop_token_ids": [99_999_999]}, {"logit_bias": {"99999999": 1}})
    lines = [{"messages": messages, "max_tokens": 2, **more} for more in ({}, *wrong)]
    source = demo.write_lines("ids.jsonl", lines)
    dry = demo.run("generate", "-i", source, "--dry-run", "--json")
    run = demo.run("generate", "-i", source)
    assert dry.code == run.code == 3
    assert (dry.records[0]["refused"], dry.records[0]["sequences"]) == (2, 1)
    assert [record["status"] for record in run.records] == ["ok", "error", "error"]
    assert "logit_bias id 99999999 is out of range" in dry.err


def test_k14_too_many_sequences_are_refused_with_what_fits(demo: Program) -> None:
    args = ["generate", "-p", "Define trumpet.", "--set", "engine.cpu_memory=16MiB", "-q"]
    done = demo.run(*args, "--max-num-seqs", "500")
    assert (done.code, done.out) == (4, "")
    fitting = done.err.partition("try: --max-num-seqs ")[2].partition(",")[0].strip()
    assert done.err_lines[0].startswith("error: max_num_seqs 500 needs 500 state slots")
    # What is told replaces what was typed: added to it, the key would be given twice.
    assert "engine.max_num_seqs" not in done.err
    dry = demo.run(*args, "--dry-run", "--max-num-seqs", "500")
    assert dry.code == 4 and f"try: --max-num-seqs {fitting}" in dry.err
    done = demo.run(*args, "--max-num-seqs", fitting)
    assert (done.code, done.out) == (0, ANSWERS["trumpet"] + "\n")


def test_k2_killed_and_continued(demo: Program) -> None:
    words = ["trumpet", "kettle", "lawyer"]
    source = demo.write_lines("in.jsonl", [_user(f"Define {word}.", id=word) for word in words])
    args = ["generate", "demo", "-i", source, "--max-num-seqs", "1", "-o", "out.jsonl"]
    partial = demo.home / "out.jsonl.partial"
    process = demo.start(*args)
    demo.interrupt_when(
        lambda: partial.exists() and partial.read_bytes().count(b"\n") > 1, process, signal.SIGKILL
    )
    process.wait()
    saved = partial.read_bytes().count(b"\n") - 1
    assert 1 <= saved < 3
    done = demo.run(*args)
    assert done.code == 0
    assert f"resuming: {saved}/3 done" in done.err_lines
    records = read_records(demo.home / "out.jsonl")
    assert [r["id"] for r in records] == words
    assert records[0]["outputs"][0]["text"] == ANSWERS["trumpet"]
    assert all(r["outputs"][0]["finish_reason"] == "stop" for r in records)


@pytest.mark.parametrize("delay", [0.0, 1.0])
def test_h17_an_interrupt_while_torch_and_weights_load(demo: Program, delay: float) -> None:
    process = demo.start("generate", "demo", "-i", EXAMPLES, "-o", "out.jsonl", "--ignore-eos")
    wait_for(lambda: demo.stderr_has("loading"))
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: demo.stderr_has("stopping"))
    if demo.stderr_has("stopping: no new requests"):
        process.send_signal(signal.SIGINT)
    done = demo.finish(process)
    assert done.code == 130
    assert done.out == ""
    assert "Traceback" not in done.err
    assert not _children_of(process.pid)


def _children_of(pid: int) -> list[str]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if f"\nPPid:\t{pid}\n" in status.read_text():
                found.append(status.parent.name)
        except OSError:
            continue
    return found


def test_env_prints_versions(demo: Program) -> None:
    snapshot = demo.home / "hub/models--org--tiny/snapshots/0a"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    done = demo.run("env", "--json", HF_HUB_CACHE="hub")
    assert (done.code, done.err) == (0, "")
    facts = json.loads(done.out)
    assert facts["schema_version"] == 1
    assert {"minivllm", "commit", "python", "torch", "typer", "gpus", "platform"} <= set(facts)
    assert facts["checkpoints"] == ["demo", "org/tiny"]
    assert facts["gpus"] == [] or os.path.exists("/dev/nvidia0")
    table = demo.run("env").out
    assert all(len(line) < 120 for line in table.splitlines())
    assert f"minivllm  {facts['minivllm']}" in " ".join(table.split()).replace(" ", "  ")


def test_answers_keep_to_the_form_that_was_asked_for(demo: Program) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    lines = [
        _user("Define trumpet.", structured={"json_schema": schema}),
        _user("Define trumpet.", structured_outputs={"regex": "[ab]{3}"}),
        _user("Define trumpet.", structured={"json_schema": {"not": {}}}),
        _user("Define trumpet."),
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (demo.home / "in.jsonl").write_text(text)
    done = demo.run("generate", "demo", "-i", "in.jsonl", "--choice", "yes", "--choice", "no")
    first, second, bad, last = done.records
    assert isinstance(json.loads(first["outputs"][0]["text"])["ok"], bool)
    assert re.fullmatch("[ab]{3}", second["outputs"][0]["text"])
    assert bad["error"]["code"] == "unsupported_schema" and "not" in bad["error"]["message"]
    assert last["outputs"][0]["text"] in ("yes", "no")
    assert last["sampling"]["structured"] == {"choice": ["yes", "no"]}
