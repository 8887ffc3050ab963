"""`generate --input`: records, orders, formats, and the lines that cost nothing but themselves."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from cli.program import Program, read_records


def _user(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def _texts(records: list[dict[str, Any]]) -> list[str]:
    return [r["outputs"][0]["text"] if r["outputs"] else r["error"]["code"] for r in records]


def test_a_record_has_the_shape_of_the_contract(program: Program, fake_model: Path) -> None:
    source = program.write_lines("in", [_user("say Hello!", id="a2", max_tokens=16, topic="g")])
    done = program.run("generate", fake_model, "-i", source)
    assert done.code == 0
    (record,) = done.records
    timing = record.pop("timing")
    assert list(timing) == ["queue_s", "ttft_s", "tpot_s", "e2e_s", "preemptions"]
    assert record == {
        "schema_version": 1,
        "id": "a2",
        "index": 0,
        "line": 1,
        "status": "ok",
        "outputs": [
            {
                "index": 0,
                "text": "Hello!",
                "reasoning": None,
                "finish_reason": "stop",
                "stop_reason": "<|im_end|>",
                "token_ids": None,
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 29,
            "cached_tokens": 0,
            "kv_matched": 0,
            "state_at": 0,
            "miss_reason": "below_granularity",
            "completion_tokens": 7,
            "reasoning_tokens": 0,
        },
        "sampling": {"temperature": 0.7, "top_p": 1.0, "top_k": 20, "max_tokens": 16, "seed": 0},
        "error": None,
        "meta": {"topic": "g"},
    }


def test_k1_one_bad_line_costs_one_record(program: Program, fake_model: Path) -> None:
    lines = [
        {"id": "a", "prompt": "say 1"},
        {"id": "b", "prompt": "say 2"},
        {"id": "c", "prompt": "x" * 64},
        '{"id": "d", ',
        {"id": "e", "prompt": "say 3"},
        {"id": "f", "prompt": "y" * 63, "max_tokens": 100},
    ]
    source = program.write_lines("in", lines)
    done = program.run("generate", fake_model, "-i", source, "--max-model-len", "64")
    assert done.code == 3
    assert [r["id"] for r in done.records] == ["a", "b", "c", "line-000004", "e", "f"]
    assert [r["line"] for r in done.records] == [1, 2, 3, 4, 5, 6]
    assert [r["status"] for r in done.records] == ["ok", "ok", "error", "error", "ok", "ok"]
    too_long, broken = done.records[2], done.records[3]
    assert too_long["usage"] == {"prompt_tokens": 64}
    assert too_long["error"] == {
        "code": "prompt_too_long",
        "message": "64 prompt tokens + 1 > max_model_len 64",
        "hint": "--max-model-len 1024 (fits) or --truncate middle",
    }
    assert broken["error"]["code"] == "invalid_json_line"
    assert done.records[5]["outputs"][0]["finish_reason"] == "context"
    assert "in:4:13: not JSON: " in done.err
    assert "error: 2 of 6 requests failed: " in done.err


def test_h16_each_kind_of_odd_line(program: Program, fake_model: Path) -> None:
    source = program.home / "odd.jsonl"
    source.write_bytes(
        b'\xef\xbb\xbf{"prompt": "say bom"}\r\n'
        b"\n"
        b"  \t\r\n"
        b"null\n"
        b"[1,2]\n"
        b'{"prompt": "caf\xe9"}\n'
        + '{"prompt": "say a\u2028b\u0085c\u000c"}\n'.encode().replace(b"\x0c", b"\\f")
        + b'{"prompt": "say \\ud800!"}\n'
        b'{"prompt": "say last"}'
    )
    done = program.run("generate", fake_model, "-i", source)
    assert done.code == 3
    assert [r["line"] for r in done.records] == [1, 4, 5, 6, 7, 8, 9]
    assert [r["index"] for r in done.records] == list(range(7))
    assert _texts(done.records) == [
        "bom",
        *["invalid_json_line"] * 3,
        "a\u2028b\u0085c\f",
        "\ufffd!",
        "last",
    ]
    assert len(done.out.splitlines()) == 7, "no record holds what ends a line elsewhere"
    assert "2 blank skipped" in done.err
    assert "odd.jsonl:6:16: not UTF-8 (byte 0xe9) (invalid_json_line)" in done.err


def test_h12_an_empty_prompt_is_a_record(program: Program, fake_model: Path) -> None:
    source = program.write_lines("in", [{"prompt": ""}, {"prompt": "say x"}])
    done = program.run("generate", fake_model, "-i", source)
    assert done.code == 3
    assert _texts(done.records) == ["empty_prompt", "x"]


def test_h14_k27_a_huge_max_tokens_is_no_reservation(program: Program, fake_model: Path) -> None:
    lines = [{"prompt": "forever", "max_tokens": 1_000_000_000}, {"prompt": "count 400"}]
    source = program.write_lines("in", lines)
    done = program.run("generate", fake_model, "-i", source, FAKE_TOKENS="100")
    assert done.code == 0
    endless, counted = done.records
    assert endless["outputs"][0]["finish_reason"] == "context"
    assert endless["usage"]["completion_tokens"] == 4096 - len("forever")
    assert counted["outputs"][0]["text"].endswith(" 399 400")
    assert counted["sampling"]["max_tokens"] == 2048


def test_all_bad_lines_need_no_model(program: Program, fake_model: Path) -> None:
    source = program.write_lines("in", ["null", "[]"])
    done = program.run("generate", fake_model, "-i", source)
    assert done.code == 3
    assert len(done.records) == 2
    assert program.engine_log == []


def test_on_error_stop_runs_nothing(program: Program, fake_model: Path) -> None:
    source = program.write_lines("in", [{"prompt": "say x"}, "null", '{"promt": "x"}'])
    done = program.run("generate", fake_model, "-i", source, "-o", "out", "--on-error", "stop")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"error: {source}:2:1: not a JSON object but null (invalid_json_line)\n"
        f"error: {source}:3:2: unknown key 'promt' (invalid_field); did you mean prompt?\n"
        f"error: {source}: 2 of 3 lines are bad; nothing was run\n"
        "try: mend them, or --on-error skip\n"
    )
    assert program.engine_log == []
    assert not (program.home / "out.partial").exists()


class TestSampling:
    def test_seeds_are_the_lines_own_or_counted(self, program: Program, fake_model: Path) -> None:
        lines = [
            {"prompt": "seeded"},
            "",
            "null",
            {"prompt": "seeded"},
            {"prompt": "seeded", "seed": 3},
        ]
        source = program.write_lines("in", lines)
        done = program.run("generate", fake_model, "-i", source, "--seed", "40")
        assert [r["sampling"]["seed"] for r in done.records if r["outputs"]] == [40, 42, 3]
        assert _texts(done.records)[2] == "seed 42 output 0"

    def test_n_gives_one_record_with_n_outputs(self, program: Program, fake_model: Path) -> None:
        source = program.write_lines("in", [{"prompt": "seeded", "n": 3}])
        done = program.run("generate", fake_model, "-i", source, "--progress", "json")
        (record,) = done.records
        assert [o["text"] for o in record["outputs"]] == [f"seed 0 output {i}" for i in range(3)]
        events = [json.loads(line) for line in done.err_lines]
        shown = [event for event in events if event["event"] == "progress"][-1]
        assert (shown["done"], shown["total"]) == (3, 3)

    def test_the_line_beats_the_flag_and_force_beats_the_line(
        self, program: Program, fake_model: Path
    ) -> None:
        lines = [{"prompt": "say x", "temperature": 0.2, "max_tokens": 4}, {"prompt": "say x"}]
        source = program.write_lines("in", lines)
        done = program.run(
            *("generate", fake_model, "-i", source, "--temperature", "0.5", "--max-tokens", "8"),
            *("--force-param", "max_tokens=6", "--stop", "q"),
        )
        shown = [(r["sampling"]["temperature"], r["sampling"]["max_tokens"]) for r in done.records]
        assert shown == [(0.2, 6), (0.5, 6)]
        assert done.records[0]["sampling"]["stop"] == ["q"]

    def test_k32_masked_tokens_make_valid_json(self, program: Program, fake_model: Path) -> None:
        source = program.write_lines("in", [{"prompt": "say ab"}])
        done = program.run("generate", fake_model, "-i", source, "--logprobs", "20")
        (record,) = done.records
        output = record["outputs"][0]
        assert output["token_ids"][:2] == [97, 98]
        first = output["logprobs"][0]
        assert (first["token"], first["token_id"], first["logprob"]) == ("a", 97, -0.5)
        assert len(first["top"]) == 20
        assert first["top"][1]["logprob"] == -9999.0
        assert all(math.isfinite(t["logprob"]) for p in output["logprobs"] for t in p["top"])


class TestThinking:
    def test_k7_reasoning_is_apart_from_the_answer(
        self, program: Program, fake_model: Path
    ) -> None:
        lines = [_user("think hm | yes"), _user("think endless", max_tokens=5)]
        source = program.write_lines("in", lines)
        done = program.run("generate", fake_model, "-i", source, "--think")
        answered, unclosed = (r["outputs"][0] for r in done.records)
        assert (answered["text"], answered["reasoning"]) == ("yes", "hm")
        assert (unclosed["text"], unclosed["finish_reason"]) == ("", "length")
        assert unclosed["reasoning"] == "endle"
        assert done.records[0]["usage"]["reasoning_tokens"] > 0

    def test_strip_thinking_leaves_it_out(self, program: Program, fake_model: Path) -> None:
        source = program.write_lines("in", [_user("think hm | yes")])
        done = program.run("generate", fake_model, "-i", source, "--think", "--strip-thinking")
        assert done.records[0]["outputs"][0]["reasoning"] is None
        assert _texts(done.records) == ["yes"]

    def test_no_think_closes_it_and_the_line_wins(self, program: Program, fake_model: Path) -> None:
        own = {"chat_template_kwargs": {"enable_thinking": True}}
        source = program.write_lines("in", [_user("say x"), _user("say x", **own)])
        program.run("generate", fake_model, "-i", source, "--no-think")
        closing = 260
        assert [closing in entry["add"] for entry in program.added] == [True, False]


class TestTemplates:
    def test_k28_messages_get_the_template_and_raw_lines_warn_once(
        self, program: Program, fake_model: Path
    ) -> None:
        source = program.write_lines(
            "in", [_user("say x"), {"prompt": "say y"}, {"prompt": "say z"}]
        )
        done = program.run("generate", fake_model, "-i", source)
        assert _texts(done.records) == ["x", "y", "z"]
        assert [e["add"][0] for e in program.added] == [257, ord("s"), ord("s")]
        assert done.err.count("raw prompts") == 1
        program.forget_engine()
        done = program.run("generate", fake_model, "-i", source, "--chat-template-for-prompts")
        assert [e["add"][0] for e in program.added] == [257, 257, 257]
        assert "raw prompts" not in done.err

    @pytest.mark.parametrize(
        ("num_raw", "said"),
        [
            (1, "1 of 4 lines is a raw prompt, and this model has a chat template: --chat-"),
            (2, "2 of 4 lines are raw prompts, and this model has a chat template: --chat-"),
            (3, "warning: 3 of 4 lines are raw prompts, and this model has a chat template"),
        ],
    )
    def test_any_raw_line_is_told_and_most_of_them_warned_of(
        self, program: Program, fake_model: Path, num_raw: int, said: str
    ) -> None:
        lines = [{"prompt": "say y"}] * num_raw + [_user("say x")] * (4 - num_raw)
        source = program.write_lines("in", lines)
        done = program.run("generate", fake_model, "-i", source)
        assert any(line.startswith(said) for line in done.err_lines), done.err
        assert done.err.count("--chat-template-for-prompts, unless that is meant") == 1
        assert ("warning:" in done.err) == (num_raw > 2)
        program.forget_engine()
        program.run("generate", fake_model, "-i", source, "--chat-template-for-prompts")
        assert [e["add"][0] for e in program.added] == [257] * 4

    def test_a_template_that_refuses_costs_one_record(
        self, program: Program, tmp_path: Path, fake_model: Path
    ) -> None:
        model = tmp_path / "strict"
        model.mkdir()
        for file in fake_model.iterdir():
            (model / file.name).write_bytes(file.read_bytes())
        refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
        template = model / "chat_template.jinja"
        template.write_text(refusing + template.read_text())
        bad = {"messages": [{"role": "robot", "content": "say x"}]}
        source = program.write_lines("in", [bad, _user("say y")])
        done = program.run("generate", model, "-i", source)
        assert done.code == 3
        assert _texts(done.records) == ["invalid_field", "y"]
        assert "refuses" in done.records[0]["error"]["message"]


class TestTruncation:
    def test_k6_without_it_nothing_is_cut(self, program: Program, fake_model: Path) -> None:
        source = program.write_lines("in", [{"prompt": "x" * 200}])
        done = program.run("generate", fake_model, "-i", source, "--max-model-len", "100")
        assert _texts(done.records) == ["prompt_too_long"]
        assert program.added == []

    @pytest.mark.parametrize("where", ["left", "middle"])
    def test_what_was_cut_is_recorded(self, program: Program, fake_model: Path, where: str) -> None:
        text = "".join(chr(65 + i % 26) for i in range(190)) + "\nsay short"
        source = program.write_lines("in", [{"prompt": text}, {"prompt": "say y"}])
        args = ["generate", fake_model, "-i", source, "--max-model-len", "100", "--truncate", where]
        done = program.run(*args)
        assert done.code == 0
        cut, whole = done.records
        assert cut["truncated"] == 125
        assert "truncated" not in whole
        sent = bytes(program.added[0]["add"]).decode()
        assert len(sent) == 75
        assert sent == (text[-75:] if where == "left" else text[:38] + text[-37:])
        assert cut["outputs"][0]["text"] == "short"
        assert "1 truncated" in done.err


class TestOutput:
    def test_input_order_although_the_first_is_slowest(
        self, program: Program, fake_model: Path
    ) -> None:
        lines = [{"prompt": "count 50"}, {"prompt": "say a"}, "null", {"prompt": "count 9"}]
        source = program.write_lines("in", lines)
        done = program.run("generate", fake_model, "-i", source)
        assert [r["index"] for r in done.records] == [0, 1, 2, 3]
        done = program.run("generate", fake_model, "-i", source, "--order", "completion")
        assert [r["index"] for r in done.records] == [2, 1, 3, 0]

    @pytest.mark.parametrize("order", ["input", "completion"])
    def test_a_published_file(self, program: Program, fake_model: Path, order: str) -> None:
        lines = [{"prompt": "count 50"}, {"prompt": "say a"}, {"prompt": "count 9"}]
        source = program.write_lines("in", lines)
        done = program.run("generate", fake_model, "-i", source, "-o", "out", "--order", order)
        assert (done.code, done.out) == (0, "")
        expected = [0, 1, 2] if order == "input" else [1, 2, 0]
        assert [r["index"] for r in read_records(program.home / "out")] == expected
        assert {p.name for p in program.home.iterdir()} >= {"in", "out"}
        assert not list(program.home.glob("out.*"))

    def test_an_existing_output_is_kept(self, program: Program, fake_model: Path) -> None:
        source = program.write_lines("in", [{"prompt": "say a"}])
        (program.home / "out").write_text("kept")
        done = program.run("generate", fake_model, "-i", source, "-o", "out")
        assert (done.code, done.out) == (2, "")
        assert done.err == (
            "error: out exists\ntry: --overwrite, or --only-failed out --output new.jsonl\n"
        )
        assert (program.home / "out").read_text() == "kept"
        (program.home / "out").chmod(0o640)
        done = program.run("generate", fake_model, "-i", source, "-o", "out", "--overwrite")
        assert done.code == 0
        assert _texts(read_records(program.home / "out")) == ["a"]
        assert (program.home / "out").stat().st_mode & 0o777 == 0o640

    def test_a_link_is_followed_not_replaced(self, program: Program, fake_model: Path) -> None:
        source = program.write_lines("in", [{"prompt": "say a"}])
        (program.home / "deep").mkdir()
        (program.home / "link").symlink_to("deep/real")
        assert program.run("generate", fake_model, "-i", source, "-o", "link").code == 0
        assert (program.home / "link").is_symlink()
        assert _texts(read_records(program.home / "deep" / "real")) == ["a"]

    def test_text_format_and_separators(self, program: Program, fake_model: Path) -> None:
        lines = [{"prompt": "say a"}, "null", {"prompt": "seeded", "n": 2}]
        source = program.write_lines("in", lines)
        base = ["generate", fake_model, "-i", source, "--format", "text"]
        done = program.run(*base)
        assert done.code == 3
        assert done.out == "a\n\nseed 2 output 0\nseed 2 output 1\n"
        done = program.run(*base, "--separator", r"\0")
        assert done.stdout == b"a\0\0seed 2 output 0\0seed 2 output 1\0"
        done = program.run(*base, "--separator", r"\n--\n", "-o", "out.txt")
        assert done.out == ""
        assert (program.home / "out.txt").read_text().split("\n--\n")[0] == "a"

    def test_stdin_is_spooled(self, program: Program, fake_model: Path) -> None:
        done = program.run(
            "generate",
            fake_model,
            "-i",
            "-",
            stdin=b'{"prompt": "say a"}\nnull\n{"prompt": "say b"}',
        )
        assert _texts(done.records) == ["a", "invalid_json_line", "b"]
        assert "stdin:2:1: not a JSON object but null" in done.err

    def test_text_input(self, program: Program, fake_model: Path) -> None:
        (program.home / "in.txt").write_text('say a\n\nsay {"b": 1}\r\n')
        done = program.run("generate", fake_model, "-i", "in.txt", "--input-format", "text")
        assert _texts(done.records) == ["a", '{"b": 1}']
        assert "2 text lines · 1 blank skipped" in done.err

    def test_batch_lines_are_answered_in_their_own_shape(
        self, program: Program, fake_model: Path
    ) -> None:
        def line(custom_id: str, text: str) -> dict[str, Any]:
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            url = "/v1/chat/completions"
            return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}

        lines = [
            line("r-1", "say Hi"),
            line("r-2", "x" * 5000),
            line("r-3", "nan"),
            line("r-1", "y"),
        ]
        source = program.write_lines("in", lines)
        done = program.run("generate", fake_model, "-i", source)
        assert done.code == 3
        good, too_long, dead, double = done.records
        assert (good["custom_id"], good["error"]) == ("r-1", None)
        assert good["response"]["status_code"] == 200
        choice = good["response"]["body"]["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "Hi"}
        assert choice["finish_reason"] == "stop"
        assert too_long["response"]["status_code"] == 400
        assert too_long["response"]["body"]["error"]["code"] == "prompt_too_long"
        assert dead["response"]["status_code"] == 500
        assert double["response"]["body"]["error"]["code"] == "duplicate_custom_id"
        assert [r["error"] for r in done.records] == [None] * 4

    def test_a_request_that_dies_costs_one_record(self, program: Program, fake_model: Path) -> None:
        source = program.write_lines("in", [{"prompt": "nan"}, {"prompt": "say a"}])
        done = program.run("generate", fake_model, "-i", source)
        assert done.code == 3
        assert _texts(done.records) == ["non_finite_logits", "a"]

    @pytest.mark.parametrize("device", ["/dev/null", "fifo"])
    def test_what_is_no_file_gets_records_as_they_come(
        self, program: Program, fake_model: Path, device: str
    ) -> None:
        source = program.write_lines("in", [{"prompt": "say a"}, {"prompt": "say b"}])
        args = ["generate", fake_model, "-i", source, "-o"]
        if device == "/dev/null":
            assert program.run(*args, device).code == 0
        else:
            path = program.home / "fifo"
            os.mkfifo(path)
            process = program.start(*args, path)
            with open(path) as reader:
                texts = [json.loads(line)["outputs"][0]["text"] for line in reader]
            assert program.finish(process).code == 0
            assert texts == ["a", "b"]
        assert not list(program.home.glob("*.partial"))
        done = program.run(*args, "/dev/null", "--overwrite")
        assert (done.code, done.err_lines) == (
            2,
            ["error: --overwrite needs a regular file; /dev/null is none", "try: --output FILE"],
        )

    def test_dev_stdout_is_stdout(self, program: Program, fake_model: Path) -> None:
        source = program.write_lines("in", [{"prompt": "say a"}])
        process = program.start("generate", fake_model, "-i", source, "-o", "/dev/stdout")
        done = program.finish(process)
        assert done.code == 0
        assert _texts(done.records) == ["a"]


class TestParts:
    def test_limit_and_select_keep_index_and_seed(self, program: Program, fake_model: Path) -> None:
        lines = [{"id": name, "prompt": "seeded"} for name in "abcd"]
        source = program.write_lines("in", lines)
        done = program.run("generate", fake_model, "-i", source, "--limit", "2")
        assert [r["id"] for r in done.records] == ["a", "b"]
        done = program.run("generate", fake_model, "-i", source, "--select", "d", "--select", "b")
        assert [(r["id"], r["index"], r["sampling"]["seed"]) for r in done.records] == [
            ("b", 1, 1),
            ("d", 3, 3),
        ]
        done = program.run("generate", fake_model, "-i", source, "--select", "z")
        assert (done.code, done.err) == (2, f"error: no line of {source} has id z\n")

    def test_only_failed_answers_the_failures_of_an_earlier_output(
        self, program: Program, fake_model: Path
    ) -> None:
        lines = [{"id": "a", "prompt": "say a"}, {"id": "b", "prompt": "say b" + "x" * 60}]
        source = program.write_lines("in", lines)
        args = ["generate", fake_model, "-i", source]
        done = program.run(*args, "-o", "out", "--max-model-len", "50")
        assert done.code == 3
        assert "try: --truncate middle --only-failed out --output retry.jsonl" in done.err_lines
        done = program.run(*args, "--only-failed", "out")
        assert [r["id"] for r in done.records] == ["b"]
        assert done.code == 0
        done = program.run(*args, "--only-failed", source)
        assert done.err.endswith("in:1: not a record of minivllm generate\n")


class TestSummary:
    def test_the_document(self, program: Program, fake_model: Path) -> None:
        lines = [{"prompt": "say a"}, "null", {"prompt": "count 99", "max_tokens": 4}]
        source = program.write_lines("in", lines)
        args = ["generate", fake_model, "-i", source, "-o", "out", "--max-num-seqs", "1"]
        done = program.run(*args, "--summary", "sum.json")
        document = json.loads((program.home / "sum.json").read_text())
        assert document["schema_version"] == 1
        assert document["requests"] == {
            "ok": 2,
            "failed": {"invalid_json_line": 1},
            "length": 1,
            "context": 0,
            "resumed": 0,
        }
        assert document["tokens"] == {"in": 13, "cached": 0, "out": 6, "reasoning": 0}
        assert document["peak"]["state_slots"] == 1
        assert set(document["ttft_s"]) == {"p50", "p90", "p99"}
        assert 0 < document["limited_by"]["state slots"] <= 1
        rows = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in done.err_lines}
        assert rows["requests"] == "2 ok · 1 failed · 1 ended at length"

    def test_quiet_shows_failures_only(self, program: Program, fake_model: Path) -> None:
        source = program.write_lines("in", [{"prompt": "say a"}])
        assert program.run("generate", fake_model, "-i", source, "-q").err == ""
        source = program.write_lines("in", [{"prompt": "say a"}, "null"])
        done = program.run("generate", fake_model, "-i", source, "-q")
        assert done.err == "error: 1 of 2 requests failed: invalid_json_line 1\n"


class TestDryRun:
    def test_k39_the_first_prompt_is_what_the_engine_gets(
        self, program: Program, fake_model: Path
    ) -> None:
        lines = [_user("say a"), {"prompt": "x" * 90}, "null", {"prompt_token_ids": [1, 2]}]
        source = program.write_lines("in", lines)
        args = ["generate", fake_model, "-i", source, "--max-model-len", "80"]
        done = program.run(*args, "--dry-run", "--json")
        assert done.code == 3
        document = json.loads(done.out)
        assert document["lines"] == {"total": 4, "messages": 1, "prompt": 1, "bad": 1, "tokens": 1}
        assert document["too_long"]["first"] == [
            {"id": "line-000002", "line": 2, "prompt_tokens": 90}
        ]
        assert document["first_prompt"]["text"] == (
            "<|im_start|>user\nsay a<|im_end|>\n<|im_start|>assistant\n"
        )
        assert program.engine_log == []
        program.run(*args)
        assert program.added[0]["add"] == document["first_prompt"]["token_ids"]

    def test_characters_of_several_tokens_are_whole(
        self, program: Program, fake_model: Path
    ) -> None:
        text = "Define caf\u00e9. \u65e5\u672c\u8a9e \U0001f642"
        args = ["generate", fake_model, "-p", text, "--raw", "--dry-run"]
        assert json.loads(program.run(*args, "--json").out)["first_prompt"]["text"] == text
        assert text in program.run(*args).out

    def test_the_table(self, program: Program, fake_model: Path) -> None:
        source = program.write_lines("in", [_user("say a"), {"prompt": "say b"}])
        done = program.run("generate", fake_model, "-i", source, "--dry-run", "-o", source)
        assert done.code == 0
        assert done.out.splitlines()[0] == "lines           2 (1 chat · 1 prompt)"
        assert "memory          fits: 256 state slots, 12,800 blocks of 64 tokens, 1.00 GiB" in (
            done.out
        )
        assert "  snapshots     32\n  weights       1.00 MiB\n" in done.out


def test_the_proposed_retry_never_names_a_file_that_is_there(
    program: Program, fake_model: Path
) -> None:
    source = program.write_lines("in.jsonl", [{"prompt": "say a"}, {"prompt": "x" * 60}])
    args = ["generate", fake_model, "-i", source, "--max-model-len", "50"]
    done = program.run(*args, "-o", "retry.jsonl")
    assert done.code == 3
    again = "--truncate middle --only-failed retry.jsonl --output retry-2.jsonl"
    assert f"try: {again}" in done.err_lines
    assert program.run(*args, *again.split()).code == 0


@pytest.mark.parametrize(
    ("line", "then"),
    [
        ({"id": "b", "prompt": 3}, "--only-failed out --output retry.jsonl"),
        ("null", "--overwrite"),  # its record has another id than the corrected line
    ],
)
def test_bad_lines_alone_are_to_be_corrected_before_a_retry(
    program: Program, fake_model: Path, line: object, then: str
) -> None:
    source = program.write_lines("in", [{"id": "a", "prompt": "say a"}, line])
    done = program.run("generate", fake_model, "-i", source, "-o", "out")
    assert done.code == 3
    assert f"try: correct these lines of {source}, then {then}" in done.err_lines


@pytest.mark.parametrize(
    ("own", "args", "advice"),
    [
        ([None, None], ["--max-tokens", "9"], "--max-tokens N gives them more room"),
        ([9, None], ["--max-tokens", "9"], "1 of 2 lines set it themselves, or --force-param does"),
        ([9, 9], ["--force-param", "max-tokens=9"], "2 of 2 lines set it themselves, or "),
    ],
)
def test_k27_outputs_cut_short_name_what_set_the_limit(
    program: Program, fake_model: Path, own: list[int | None], args: list[str], advice: str
) -> None:
    source = program.write_lines("in", [{"prompt": "count 400", "max_tokens": n} for n in own])
    done = program.run("generate", fake_model, "-i", source, *args)
    assert f"warning: 2 of 2 outputs stopped at max_tokens; {advice}" in done.err


def test_a_dry_run_counts_the_sequences_that_would_run(program: Program, fake_model: Path) -> None:
    lines = [{"prompt": "say a", "n": 2}, {"prompt": 3}, {"prompt": "x" * 60}]
    args = ["-i", program.write_lines("in", lines), "--max-model-len", "50", "--dry-run", "--json"]
    done = program.run("generate", fake_model, *args)
    assert done.code == 3
    assert json.loads(done.out)["sequences"] == 2


def test_lines_of_plain_text_are_told_of_the_input_format(
    program: Program, fake_model: Path
) -> None:
    source = program.write_lines("in", ["Define zebra.", '{"prompt": ', {"prompt": "say a"}])
    done = program.run("generate", fake_model, "-i", source, "-o", "out")
    assert done.code == 3
    first, second = [line for line in done.err_lines if "not JSON" in line]
    assert first.endswith("(invalid_json_line); for plain text: --input-format text")
    assert second.endswith("(invalid_json_line)")
