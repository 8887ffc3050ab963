"""The laws of the house: imports go down by package, no command imports another, torch stays below."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import minivllm_engine

SRC = Path(minivllm_engine.__file__).parents[1]

# From the bottom up. A package imports itself and what stands before it.
WITHOUT_TORCH = [
    "core",
    "model_config",
    "checkpoint",
    "text",
    "structured",
    "protocol",
    "memory",
    "cache",
    "scheduling",
]
WITH_TORCH = ["tensors", "ops", "models", "runner", "conversion", "engine", "llm"]
PROGRAM = [
    "errors",
    "console",
    "config",
    "diagnostics",
    "files",
    "engine",
    "command",
    "startup",
    "cache_dump",
    "batch",
]
COMMANDS = ["generate", "chat", "serve", "bench", "inspect_cache", "convert", "env"]
ORDER = {
    "minivllm_engine": [*WITHOUT_TORCH, *WITH_TORCH, "__init__"],
    "minivllm_cli": ["__init__", *PROGRAM, *COMMANDS, "app", "main", "__main__"],
}
# What a command needs of the engine before it loads a model is free of torch, wherever it lies.
LIGHT = [
    *WITHOUT_TORCH,
    "conversion.source",
    "conversion.planning",
    "engine.prepare",
]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports() -> dict[str, set[str]]:
    """Every module of the project, and the project's modules that it imports, deferred imports too."""
    paths = {module_of(path): path for path in SRC.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for module, path in paths.items():
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
        names = [(n.module, f"{n.module}.{a.name}") for n in nodes for a in n.names if n.module]
        targets = {whole if whole in paths else base for base, whole in names}
        found[module] = {target for target in targets if target in paths}
    return found


def part(module: str) -> tuple[str, str]:
    root, _, rest = module.partition(".")
    return root, rest.partition(".")[0] or "__init__"


@pytest.mark.parametrize("root", ORDER)
def test_imports_go_down_by_package(root: str) -> None:
    order = ORDER[root]
    for module, targets in imports().items():
        own_root, own = part(module)
        if own_root != root:
            continue
        assert own in order, f"{module} has no place"
        for target_root, target in map(part, targets):
            if target_root == root and target != "__init__":
                assert order.index(target) <= order.index(own), f"{module} imports {target}"
            assert (root, target_root) != ("minivllm_engine", "minivllm_cli"), module


def test_no_command_imports_another() -> None:
    for module, targets in imports().items():
        root, own = part(module)
        if root == "minivllm_cli" and own in COMMANDS:
            others = {name for where, name in map(part, targets) if where == root} & set(COMMANDS)
            assert others <= {own}, module


def test_the_harness_adapter_stands_on_the_engine_alone_and_nothing_on_it() -> None:
    adapters = {m: targets for m, targets in imports().items() if part(m)[0] == "minivllm_lm_eval"}
    assert adapters
    for module, targets in imports().items():
        roots = {part(target)[0] for target in targets}
        if module in adapters:
            assert roots <= {"minivllm_engine", "minivllm_lm_eval"}, module
        else:
            assert "minivllm_lm_eval" not in roots, module


def test_no_circle() -> None:
    list(TopologicalSorter(imports()).static_order())  # raises CycleError, which names it


@pytest.mark.parametrize("name", LIGHT)
def test_nothing_above_the_tensors_loads_torch(name: str) -> None:
    modules = [m for m in imports() if f"{m}.".startswith(f"minivllm_engine.{name}.")]
    script = f"""import importlib, sys
for module in {sorted(modules)}: importlib.import_module(module)
print(sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


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


def test_the_rooms_of_the_documentation_are_those_of_the_tree() -> None:
    text = (SRC.parent / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \|[^|]*\| ([^|]*) \|$", text, re.MULTILINE)
    told = {room: set(re.findall(r"`([\w/]+)`", files)) for room, files in rows}
    found = {}
    for root in ORDER:
        for folder in (path.parent for path in (SRC / root).glob("*/__init__.py")):
            inside = [path for path in folder.iterdir() if not path.name.startswith("__")]
            found[folder.name] = {
                f"{path.name}/" if path.is_dir() else path.stem for path in inside
            }
    assert told == found
