"""minivllm as a model of lm-evaluation-harness: `python -m minivllm_lm_eval --model minivllm ...`."""

import os

# The engine turns the hub off for whatever it imports; the harness may have to fetch its tasks' data.
_offline = os.environ.get("HF_HUB_OFFLINE")
from minivllm_lm_eval.model import MiniVLLM  # noqa: E402

if _offline is None:
    os.environ.pop("HF_HUB_OFFLINE", None)
else:
    os.environ["HF_HUB_OFFLINE"] = _offline

__all__ = ["MiniVLLM"]
