"""The wheel: what users install."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DEMO = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "NOTICE",
    "MODEL_CARD.md",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: setuptools writes beside the sources."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tree)
    for name in ("src", "demo_training"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*build, "-w", str(tree / "out"), str(tree)], check=True, capture_output=True)
    (path,) = (tree / "out").glob("minivllm-*.whl")
    return zipfile.ZipFile(path)


def test_the_demo_model_is_in_the_wheel_and_small(wheel: zipfile.ZipFile) -> None:
    prefix = "minivllm_engine/demo/"
    sizes = {i.filename: i.file_size for i in wheel.infolist() if i.filename.startswith(prefix)}
    assert {name.removeprefix(prefix) for name in sizes} == DEMO
    assert sum(sizes.values()) <= 12 * 10**6


def test_the_wheel_holds_the_packages_and_their_licence_and_nothing_else(wheel) -> None:
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "minivllm_cli",
        "minivllm_engine",
        "minivllm_lm_eval",
    }
    licences = {name.rsplit("/", 1)[1] for name in names if ".dist-info/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE"}
    assert "minivllm_engine/py.typed" in names
    metadata = next(name for name in names if name.endswith("METADATA"))
    assert "License-Expression: Apache-2.0" in wheel.read(metadata).decode()


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
