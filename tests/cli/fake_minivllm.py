"""The program `minivllm` with the fake engine behind it. Run as a script; loads no torch.

MODEL is a directory made by `write_fake_model`. FAKE_LOAD_SECONDS makes loading last; FAKE_CAPACITY is the
largest `engine.max_num_seqs` that fits. MEASURE_PEAK names a file for the peak memory in KiB.
"""

import os
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cli.fake_engine import MAX_MODEL_LEN, FakeEngine
from minivllm_cli import engine as engine_factory
from minivllm_cli.batch import sinks
from minivllm_cli.config.settings import Settings
from minivllm_cli.errors import CliError
from minivllm_cli.main import main
from minivllm_engine.core.errors import CapacityError
from minivllm_engine.model_config.generation_config import load_generation_config


def _find_model(model: str) -> Path:
    if not Path(model).is_dir():
        raise CliError(f"model {model!r} is not a directory")
    return Path(model)


def _prepare_model(settings: Settings) -> SimpleNamespace:
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
        tokenizer=engine_factory.load_tokenizer(path),
        generation_config=load_generation_config(path),
        settings=settings,
        plan=SimpleNamespace(device=None),
    )


def _open_engine(prepared: SimpleNamespace, progress: Any = None) -> FakeEngine:
    seconds = float(os.environ.get("FAKE_LOAD_SECONDS", "0"))
    parts = 11
    for done in range(parts + 1):
        if progress is not None:
            progress("weights", done, parts)
        time.sleep(seconds / parts)
    return FakeEngine(prepared.settings, prepared.path)


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


class _SlowPublication(sinks.FileSink):
    """Takes FAKE_PUBLISH_SECONDS between writing the file and moving it into place."""

    def _write(self, beside: Path) -> None:
        super()._write(beside)
        time.sleep(float(os.environ["FAKE_PUBLISH_SECONDS"]))


if "FAKE_PUBLISH_SECONDS" in os.environ:
    sinks.FileSink = _SlowPublication
engine_factory.find_model = _find_model
engine_factory.prepare_model = _prepare_model
engine_factory.open_engine = _open_engine
engine_factory.plan_memory = _plan_memory

if __name__ == "__main__":
    try:
        main()
    finally:
        assert "torch" not in sys.modules, "the fake engine needs no torch"
        if "MEASURE_PEAK" in os.environ:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            Path(os.environ["MEASURE_PEAK"]).write_text(str(peak))
