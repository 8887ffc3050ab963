"""The program `minivllm` with the scripted engine behind it, as a process: run as a script it loads no torch.

MODEL is a directory such as the fixture `fake_model`. FAKE_LOAD_SECONDS makes loading last; FAKE_CAPACITY is
the largest `engine.max_num_seqs` that fits; FAKE_PUBLISH_SECONDS lie between writing the output and moving it
into place; FAKE_CLEAN_UP_SECONDS replaces the time that a signal gives running requests and a stuck step.
MEASURE_PEAK names a file for the peak memory in KiB.
"""

import os
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from minivllm_cli import engine
from minivllm_cli.config.settings import Settings
from minivllm_cli.errors import CliError
from minivllm_engine.core.errors import CapacityError
from minivllm_engine.model_config.generation_config import load_generation_config
from support.fake_llm import MAX_MODEL_LEN, FakeLLM, Pace


def _find_model(model: str) -> Path:
    if not Path(model).is_dir():
        raise CliError(f"model {model!r} is not a directory")
    return Path(model)


def _prepare_model(settings: Settings, command: str) -> SimpleNamespace:
    path = _find_model(settings.model)
    fitting = int(os.environ.get("FAKE_CAPACITY", "1000"))
    asked = settings.get("engine.max_num_seqs")
    if asked is not None and asked > fitting:
        raise CapacityError(
            f"max_num_seqs {asked} needs {asked} state slots (36.7 GiB); {fitting} fit",
            hint=f"--set engine.max_num_seqs={fitting}",
        )
    return SimpleNamespace(
        path=path,
        tokenizer=engine.load_tokenizer(path),
        generation_config=load_generation_config(path),
        settings=settings,
        plan=SimpleNamespace(device=None),
    )


def _open_engine(prepared: SimpleNamespace, progress: Any = None) -> FakeLLM:
    seconds = float(os.environ.get("FAKE_LOAD_SECONDS", "0"))
    parts = 11
    for done in range(parts + 1):
        if progress is not None:
            progress("weights", done, parts)
        time.sleep(seconds / parts)
    log = os.environ.get("FAKE_LOG")
    return FakeLLM(prepared.settings, prepared.path, Pace.from_environ(), log)


def _plan_memory(settings: Settings, model_path: Path, device: object = None) -> SimpleNamespace:
    longest = settings.get("engine.max_model_len") or MAX_MODEL_LEN
    if longest > 2 * MAX_MODEL_LEN:
        raise CapacityError(f"max_model_len {longest} does not fit")
    return SimpleNamespace(
        max_model_len=longest,
        max_num_seqs=256,
        num_blocks=12_800,
        block_size=64,
        num_snapshots=32,
        pool_bytes=2**30,
        weight_bytes=2**20,
        activation_bytes=2**20,
        slot_bytes=2**20,
    )


# What stands in for the functions of minivllm_cli.engine.
FACTORY = {
    "find_model": _find_model,
    "prepare_model": _prepare_model,
    "open_engine": _open_engine,
    "plan_memory": _plan_memory,
}


def _install() -> None:
    for name, function in FACTORY.items():
        setattr(engine, name, function)
    if "FAKE_PUBLISH_SECONDS" in os.environ:
        from minivllm_cli.batch import sinks

        class SlowPublication(sinks.FileSink):
            def _write(self, beside: Path) -> None:
                super()._write(beside)
                time.sleep(float(os.environ["FAKE_PUBLISH_SECONDS"]))

        sinks.FileSink = SlowPublication  # type: ignore[misc]
    if "FAKE_CLEAN_UP_SECONDS" in os.environ:
        from minivllm_cli.batch import run_loop
        from minivllm_cli.console import signals

        seconds = float(os.environ["FAKE_CLEAN_UP_SECONDS"])
        run_loop.CLEAN_UP_SECONDS = signals._GRACE_SECONDS = seconds


if __name__ == "__main__":
    from minivllm_cli.main import main

    _install()
    try:
        main()
    finally:
        assert "torch" not in sys.modules, "the fake engine needs no torch"
        if "MEASURE_PEAK" in os.environ:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            Path(os.environ["MEASURE_PEAK"]).write_text(str(peak))
