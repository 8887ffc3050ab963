"""The crash file: what an unexpected error leaves for a report, outside the terminal."""

import json
import os
import sys
import time
import traceback
from pathlib import Path


def state_dir() -> Path:
    """Where this program keeps what it remembers: $XDG_STATE_HOME/minivllm."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "minivllm"


def write_crash_file(error: BaseException, command: str) -> Path | None:
    """Write traceback, arguments and versions; the path, or None where it cannot be written."""
    from minivllm_cli.versions import environment

    document = {
        "schema_version": 1,
        "kind": "crash",
        "command": command,
        "argv": sys.argv[1:],
        "error": f"{type(error).__name__}: {error}",
        "traceback": traceback.format_exception(error),
        "env": environment(),
    }
    stamp = time.strftime("%Y%m%dT%H%M%S") + f"-{os.getpid()}"
    path = state_dir() / f"crash-{stamp}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8", errors="replace") as file:
            os.chmod(path, 0o600)
            json.dump(document, file, indent=1)
    except OSError:
        return None
    return path
