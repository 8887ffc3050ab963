"""Config: precedence, provenance, and mistakes with the place where they stand."""

from pathlib import Path
from typing import Any

import pytest

from cli.program import Program
from minivllm_cli.config.settings import Settings, resolve_settings
from minivllm_cli.config.show import render_config
from minivllm_cli.errors import CliError
from minivllm_engine.core.config import SamplingOptions


def _settings(tmp_path: Path, text: str = "", **layers: Any) -> Settings:
    path = tmp_path / "cfg.yaml"
    path.write_text(text)
    return resolve_settings(files=[path], **{"environ": {}, **layers})


def _problems(tmp_path: Path, text: str = "", **layers: Any) -> list[str]:
    with pytest.raises(CliError) as caught:
        _settings(tmp_path, text, **layers)
    assert caught.value.exit_code == 2
    return ["\n".join(p.lines()).replace(str(tmp_path) + "/", "") for p in caught.value.problems]


class TestPrecedence:
    FILE = "engine: {max_num_seqs: 2}\nsampling: {temperature: 0.2}\n"
    ENV = "MINIVLLM_SAMPLING__TEMPERATURE"

    def test_k23_each_layer_beats_the_ones_below(self, tmp_path: Path) -> None:
        path = "sampling.temperature"
        recommended = SamplingOptions(temperature=0.1)
        assert _settings(tmp_path).resolved(path) == 1.0
        assert _settings(tmp_path).with_model_sampling(recommended).resolved(path) == 0.1
        found = _settings(tmp_path, self.FILE).with_model_sampling(recommended)
        assert (found.resolved(path), found.source(path)) == (0.2, f"{tmp_path}/cfg.yaml:2")
        environ = {self.ENV: "0.3"}
        found = _settings(tmp_path, self.FILE, environ=environ)
        assert (found.get(path), found.source(path)) == (0.3, self.ENV)
        found = _settings(
            tmp_path, self.FILE, environ=environ, flags={path: ("--temperature", 0.4)}
        )
        assert (found.get(path), found.source(path)) == (0.4, "--temperature")
        found = _settings(tmp_path, self.FILE, environ=environ, assignments=[f"{path}=0.5"])
        assert (found.get(path), found.source(path)) == (0.5, f"--set {path}=0.5")

    def test_k23_later_files_win_key_by_key_and_lists_are_replaced(self, tmp_path: Path) -> None:
        first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
        first.write_text("sampling: {stop: [a, b], seed: 1, top_p: 0.5}\n")
        second.write_text("sampling: {stop: [c], seed: 2}\n")
        found = resolve_settings(files=[first, second], environ={})
        assert found.get("sampling.stop") == ("c",)
        assert (found.get("sampling.seed"), found.get("sampling.top_p")) == (2, 0.5)

    def test_k23_flags_win_on_either_side_of_config(
        self, program: Program, fake_model: Path
    ) -> None:
        (program.home / "c.yaml").write_text("engine: {max_num_seqs: 2}\n")
        common = ["generate", fake_model, "--print-config"]
        before = program.run(*common, "--max-num-seqs", "3", "--config", "c.yaml")
        after = program.run(*common, "--config=c.yaml", "--max-num-seqs", "3")
        assert before.out == after.out
        assert "max_num_seqs: 3\n" in before.out

    def test_the_users_own_file_is_the_lowest(self, program: Program, fake_model: Path) -> None:
        own = program.home / "config" / "minivllm" / "config.yaml"
        own.parent.mkdir(parents=True)
        own.write_text(f"model: {fake_model}\nsampling: {{seed: 1, top_k: 7}}\n")
        (program.home / "c.yaml").write_text("sampling: {seed: 2}\n")
        args = ["generate", "--config", "c.yaml", "--print-config", "--sources"]
        done = program.run_here(*args)
        assert f"model: {fake_model}  # {own}:1 (default demo)\n" in done.out
        assert "  seed: 2  # c.yaml:1 (default 0)\n" in done.out
        assert f"  top_k: 7  # {own}:2 (default" in done.out
        own.write_text("sampling: {sed: 1}\n")
        done = program.run_here(*args)
        assert (done.code, done.err_lines[0]) == (
            2,
            f"error: {own}:1:12: unknown key sampling.sed",
        )
        elsewhere = program.home / "h" / ".config" / "minivllm" / "config.yaml"
        elsewhere.parent.mkdir(parents=True)
        elsewhere.write_text("sampling: {seed: 3}\n")
        done = program.run_here("chat", *args[3:], HOME=str(program.home / "h"), XDG_CONFIG_HOME="")
        assert f"  seed: 3  # {elsewhere}:1 (default 0)\n" in done.out

    def test_null_resets_a_key(self, tmp_path: Path) -> None:
        found = _settings(tmp_path, self.FILE, assignments=["engine.max_num_seqs=null"])
        assert found.get("engine.max_num_seqs") is None
        assert found.source("engine.max_num_seqs") == "default"

    def test_a_flag_and_set_for_one_key_clash(self, tmp_path: Path) -> None:
        assert _problems(
            tmp_path,
            assignments=["engine.max_num_seqs=32"],
            flags={"engine.max_num_seqs": ("--max-num-seqs", "64")},
        ) == [
            "error: engine.max_num_seqs is given twice: --max-num-seqs 64 and "
            "--set engine.max_num_seqs=32"
        ]

    def test_the_model_argument_and_set_clash(self, program: Program, fake_model: Path) -> None:
        done = program.run("generate", fake_model, "--set", "model=demo", "-p", "x")
        assert done.code == 2
        assert done.err == f"error: model is given twice: MODEL {fake_model} and --set model=demo\n"

    def test_a_model_in_a_file_is_relative_to_the_file(self, tmp_path: Path) -> None:
        assert _settings(tmp_path, "model: ./m\n").model == str(tmp_path / "m")
        assert _settings(tmp_path, "model: demo\n").model == "demo"
        assert _settings(tmp_path, "", assignments=["model=./m"]).model == "./m"


class TestMistakes:
    def test_k23_an_unknown_key_is_shown_where_it_stands(self, tmp_path: Path) -> None:
        text = "# mine\nmodel: demo\nengine:\n  max_num_sqs: 64\n"
        assert _problems(tmp_path, text) == [
            "error: cfg.yaml:4:3: unknown key engine.max_num_sqs\n"
            "    max_num_sqs: 64\n"
            "    ^\n"
            "try: max_num_seqs"
        ]

    def test_at_the_top_a_section_is_proposed_and_in_a_section_a_key(self, tmp_path: Path) -> None:
        found = _problems(tmp_path, "samplng: {}\nengine: {foo: 1, temprature: 2}\n")
        assert [p.partition("\ntry: ")[2] for p in found] == [
            "sampling",
            "",
            "sampling.temperature",
        ]

    def test_k23_all_mistakes_come_at_once(self, tmp_path: Path) -> None:
        text = (
            "engine: {max_num_seqs: 0, divice: cpu}\n"
            "sampling:\n  seed: 1\n  seed: 2\n  temperature: hot\n  block_size: 64\n"
            "  ignore_eos: yes\nchat: 3\nsamplng: {}\n"
        )
        firsts = [p.splitlines()[0] for p in _problems(tmp_path, text, assignments=["x=1"])]
        assert firsts == [
            "error: cfg.yaml:1:24: engine.max_num_seqs: should be greater than or equal to 1, not '0'",
            "error: cfg.yaml:1:27: unknown key engine.divice",
            "error: cfg.yaml:4:3: duplicate key sampling.seed, first in line 3",
            "error: cfg.yaml:5:16: sampling.temperature: should be a valid number, not 'hot'",
            "error: cfg.yaml:6:3: unknown key sampling.block_size: block_size belongs to section cache",
            "error: cfg.yaml:7:15: sampling.ignore_eos: write true or false, not 'yes'",
            "error: cfg.yaml:8:7: section chat should hold keys",
            "error: cfg.yaml:9:1: unknown key samplng",
            "error: --set x=1: unknown key x",
        ]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a: [1\n", "error: cfg.yaml:2:1: expected ',' or ']', but got '<stream end>'"),
            ("- 1\n", "error: cfg.yaml:1:1: a config is a mapping of keys"),
            ("model: a\n---\nmodel: b\n", "error: cfg.yaml:2:1: a config is one document"),
            ("model: !!python/object:os.system x\n", "error: cfg.yaml:1:8: could not determine"),
            ("engine: {max_num_seqs: [1]}\n", "error: cfg.yaml:1:24: engine.max_num_seqs: "),
            ("model: 3\n", "error: cfg.yaml:1:8: model: should be a string; put it in quotes"),
            ("[" * 3000, "error: cfg.yaml"),
        ],
    )
    def test_broken_files_give_a_place(self, tmp_path: Path, text: str, message: str) -> None:
        (problem,) = _problems(tmp_path, text)
        assert problem.startswith(message)
        assert len(problem.splitlines()) <= 6

    def test_a_file_that_is_not_utf8(self, tmp_path: Path) -> None:
        path = tmp_path / "l1.yaml"
        path.write_bytes(b"model: demo\nchat: {system: caf\xe9}\n")
        with pytest.raises(CliError, match=r"l1.yaml:2: not UTF-8 \(byte 0xe9\)"):
            resolve_settings(files=[path], environ={})

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(CliError, match=r"cannot read config .*: No such file"):
            resolve_settings(files=[tmp_path / "none.yaml"], environ={})

    @pytest.mark.parametrize("text", ["", "# only a comment\n", "engine:\n", "\ufeffmodel: demo\n"])
    def test_empty_files_and_sections_are_fine(self, tmp_path: Path, text: str) -> None:
        assert _settings(tmp_path, text).model == "demo"

    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            (
                "engine.max_num_sqs=1",
                "unknown key engine.max_num_sqs\ntry: --set engine.max_num_seqs=...",
            ),
            ("engine.foo=1", "unknown key engine.foo\ntry: minivllm generate --print-config shows"),
            ("engin=1", "unknown key engin\ntry: minivllm generate --print-config shows"),
            (
                "engine.temprature=1",
                "unknown key engine.temprature\ntry: --set sampling.temperature=...",
            ),
            (
                "enigne.max_num_sqs=1",
                "unknown key enigne.max_num_sqs\ntry: --set engine.max_num_seqs=...",
            ),
            ("max_num_seqs=1", "unknown key max_num_seqs: max_num_seqs belongs to section engine"),
            ("engine.max_num_seqs", "not KEY=VALUE"),
            ("engine.max_num_seqs=x", "engine.max_num_seqs: 'x' is not a whole number"),
            ("engine=3", "engine is a section, not a key"),
            ("sampling.stop=[a", "the value is not YAML"),
        ],
    )
    def test_set_errors_name_the_argument(
        self, tmp_path: Path, argument: str, message: str
    ) -> None:
        (problem,) = _problems(tmp_path, assignments=[argument])
        assert problem.startswith(f"error: --set {argument}: {message}")

    def test_environment_mistakes(self, tmp_path: Path) -> None:
        environ = {"MINIVLLM_ENGINE__MAX_NUM_SEQS": "many", "OTHER": "x"}
        (problem,) = _problems(tmp_path, environ=environ)
        assert problem.startswith(
            "error: MINIVLLM_ENGINE__MAX_NUM_SEQS=many: engine.max_num_seqs: "
        )
        found = _settings(tmp_path, environ={"MINIVLLM_ENGINE__MAX_NUM_SEQ": "3"})
        assert found.warnings == (
            "environment variable MINIVLLM_ENGINE__MAX_NUM_SEQ is not known; "
            "did you mean MINIVLLM_ENGINE__MAX_NUM_SEQS?",
        )


class TestValues:
    @pytest.mark.parametrize(
        ("args", "line"),
        [
            (["--temperature", "hot"], "sampling.temperature: should be a valid number"),
            (["--seed", "-1"], "sampling.seed: should be greater than or equal to 0"),
            (["--seed", "1.5"], "sampling.seed: should be a valid integer"),
            (["--device", "tpu"], "engine.device: should be 'auto', 'cpu' or 'cuda'"),
            (["--top-p", "[0.5"], "sampling.top_p: should be a valid number"),
        ],
    )
    def test_what_a_flag_may_be_is_what_its_key_may_be(
        self, program: Program, args: list[str], line: str
    ) -> None:
        done = program.run_here("chat", *args)
        assert (done.code, done.err) == (2, f"error: {' '.join(args)}: {line}\n")

    def test_gpu_is_cuda(self, tmp_path: Path) -> None:
        assert _settings(tmp_path, "engine: {device: gpu}\n").get("engine.device") == "cuda"
        flags = {"engine.device": ("--device", "gpu")}
        assert _settings(tmp_path, flags=flags).engine_config.engine.device == "cuda"

    def test_numbers_as_people_write_them(self, tmp_path: Path) -> None:
        text = (
            "engine: {max_model_len: 32K, cpu_memory: 2GiB, max_num_seqs: 1_0}\n"
            "sampling: {max_tokens: 2k}\n"
        )
        found = _settings(tmp_path, text)
        assert found.get("engine.max_model_len") == 32768
        assert found.get("engine.cpu_memory") == 2 * 2**30
        assert found.get("engine.max_num_seqs") == 10
        assert found.get("sampling.max_tokens") == 2000

    def test_the_expanded_number_is_echoed(self, program: Program, fake_model: Path) -> None:
        done = program.run("generate", fake_model, "-p", "say x", "--max-model-len", "1K")
        assert (done.code, done.out) == (0, "x\n")
        assert "engine.max_model_len: 1K = 1,024 (--max-model-len)" in done.err_lines

    def test_dashes_and_auto(self, tmp_path: Path) -> None:
        found = _settings(tmp_path, "engine: {max-num-seqs: auto, dtype: float32}\n")
        assert found.get("engine.max_num_seqs") is None
        assert found.get("engine.dtype") == "fp32"

    def test_environment_text_is_taken_as_it_is(self, tmp_path: Path) -> None:
        environ = {"MINIVLLM_CHAT__SYSTEM": "Be brief: yes", "MINIVLLM_SAMPLING__STOP": '["\\n"]'}
        found = _settings(tmp_path, environ=environ)
        assert found.chat.system == "Be brief: yes"
        assert found.get("sampling.stop") == ("\n",)

    def test_engine_config_holds_what_was_set(self, tmp_path: Path) -> None:
        config = _settings(
            tmp_path, "engine: {max_num_seqs: 3}\ncache: {block_size: 32}\n"
        ).engine_config
        assert (config.engine.max_num_seqs, config.cache.block_size) == (3, 32)
        assert config.sampling.temperature is None


class TestPrintConfig:
    TEXT = (
        "engine: {max_model_len: 32K, dtype: bf16}\n"
        'sampling: {stop: ["\\n\\n", "1e-3", "no"], temperature: 1e-3}\nchat: {system: "true"}\n'
    )

    def test_it_round_trips(self, tmp_path: Path) -> None:
        first = _settings(tmp_path, self.TEXT)
        printed = render_config(first)
        second = _settings(tmp_path, printed)
        assert render_config(second) == printed
        assert second.engine_config == first.engine_config.model_copy(
            update={"sampling": second.engine_config.sampling}
        )
        assert second.sampling() == first.sampling()
        assert second.chat == first.chat

    def test_sources_say_where_and_how(self, tmp_path: Path) -> None:
        text = render_config(_settings(tmp_path, self.TEXT), sources=True)
        assert (
            f"  max_model_len: 32768  # {tmp_path}/cfg.yaml:1, written 32K (default auto)\n" in text
        )
        assert "  max_num_seqs: auto  # default\n" in text
        assert render_config(_settings(tmp_path, text)) == render_config(
            _settings(tmp_path, self.TEXT)
        )

    def test_diff_defaults_prints_changed_keys_only(self, tmp_path: Path) -> None:
        found = _settings(tmp_path, "engine: {max_num_seqs: 3, dtype: auto}\n")
        assert render_config(found, diff_defaults=True) == "engine:\n  max_num_seqs: 3\n"
        assert render_config(_settings(tmp_path), diff_defaults=True) == "{}\n"

    def test_the_models_generation_config_is_in_it(
        self, program: Program, fake_model: Path
    ) -> None:
        done = program.run("generate", fake_model, "--print-config", "--sources")
        assert done.code == 0
        assert "  temperature: 0.7  # generation_config.json (default 1.0)\n" in done.out
        assert f"model: {fake_model}  # MODEL (default demo)\n" in done.out

    def test_sources_without_print_config_is_an_error(self, program: Program) -> None:
        done = program.run("generate", "--sources", "-p", "x")
        assert done.code == 2
        assert done.err == (
            "error: --sources goes with --print-config\ntry: --print-config --sources\n"
        )
