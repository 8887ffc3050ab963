"""Which modules may load what: the boundary between plain Python and torch, and no import upward."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import minivllm_engine

ROOT = Path(minivllm_engine.__file__).parent

# The layers of DESIGN in docs/architecture.md, from the bottom: a module imports from lines above it only.
ORDER = [
    "errors",
    "printable",
    "units",
    "grid",
    "config",
    "sampling_params",
    "request_output",
    "request",
    "stats",
    "load_report",
    "generation_config",
    "config_reader",
    "rope_config",
    "model_families",
    "model_config",
    "model_shapes",
    "random_weights",
    "checkpoint_rules",
    "checkpoint_names",
    "safetensors_header",
    "shard_index",
    "checkpoint_mismatch",
    "checkpoint_index",
    "device_memory",
    "nvidia_smi",
    "device_choice",
    "memory_sizes",
    "decode_limit",
    "memory_layout",
    "memory_fit",
    "memory_remedies",
    "memory_limits",
    "memory_plan",
    "tokenizer",
    "prepare",
    "random_model",
    "detokenizer",
    "prompt",
    "answer",
    "block_manager",
    "block_hash",
    "greedy_dual",
    "deltanet_state",
    "prefix_tree",
    "snapshot_worth",
    "cache_miss",
    "prefix_cache",
    "shared_beginnings",
    "cache_report",
    "admission",
    "step_budget",
    "scheduled_batch",
    "scheduler",
    "held_signals",
    "conversion",  # its parts that read or write tensors load torch when they are first used
    # torch from here on
    "device_copy",
    "device_measure",
    "device_shortage",
    "cache_pool",
    "model_input",
    "ops",
    "sampler",
    "layers",
    "models",
    "checkpoint",
    "weights",
    "stored_logits",
    "warm_up",
    "static_decode",
    "static_prompt",
    "cuda_graph_runner",
    "model_runner",
    "intake",
    "engine_loop",
    "llm",
]
FIRST_WITH_TORCH = ORDER.index("device_copy")


def imported_parts(path: Path) -> set[str]:
    """The first level of every minivllm_engine module that a file imports, deferred imports too."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("minivllm_engine."):
                parts.add(name.split(".")[1])
            assert not name.startswith("minivllm_cli"), f"{path} imports the command line"
    return parts


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


FILES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if path != ROOT / "__init__.py" and "demo" not in path.parts
]


def test_every_module_has_its_place() -> None:
    assert {part_of(path) for path in FILES} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    own = ORDER.index(part_of(path))
    for part in imported_parts(path):
        assert ORDER.index(part) <= own, f"{path.name} imports {part}"


@pytest.mark.parametrize("part", ORDER[:FIRST_WITH_TORCH])
def test_nothing_above_the_line_loads_torch_or_transformers(part: str) -> None:
    script = (
        f"import sys, minivllm_engine.{part};"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_public_names_are_there_and_the_hub_is_off() -> None:
    script = (
        "import os, minivllm_engine as m; assert os.environ['HF_HUB_OFFLINE'] == '1';"
        "import sys; assert 'torch' not in sys.modules;"
        "assert all(getattr(m, name) for name in m.__all__);"
        "assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError):
        _ = minivllm_engine.nothing
