"""The program `minivllm` with the scripted engine behind it. Run as a script; loads no torch."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from cli.chat.scripted_engine import ScriptedEngine
from minivllm_cli import engine
from minivllm_cli.main import main
from minivllm_engine.model_config.generation_config import load_generation_config


def _prepare_model(settings, command):
    path = Path(settings.model)
    return SimpleNamespace(
        path=path,
        tokenizer=engine.load_tokenizer(path),
        generation_config=load_generation_config(path),
        settings=settings,
        plan=SimpleNamespace(device=None),
    )


def _open_engine(prepared, progress=None):
    seconds = float(os.environ.get("FAKE_LOAD_SECONDS", "0"))
    parts = 20 if seconds else 1
    for done in range(parts + 1):
        if progress is not None:
            progress("weights", done, parts)
        time.sleep(seconds / parts)
    return ScriptedEngine(prepared.settings, prepared.path, os.environ.get("FAKE_LOG"))


def install(replace=setattr):
    """Put the scripted engine behind the one door to the engine."""
    replace(engine, "find_model", Path)
    replace(engine, "prepare_model", _prepare_model)
    replace(engine, "open_engine", _open_engine)


if __name__ == "__main__":
    install()
    try:
        main()
    finally:
        assert "torch" not in sys.modules, "the scripted engine needs no torch"
