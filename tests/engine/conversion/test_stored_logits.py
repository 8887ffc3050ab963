"""A model against logits that transformers has stored."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minivllm_engine.conversion.stored_logits import compare_logits
from minivllm_engine.core.errors import ConfigError
from support.tiny_checkpoint import random_tensors, tiny_config, write_checkpoint
from support.transformers_oracle import TransformersOracle

IDS = torch.arange(90) * 7 % 320
CONFIG = tiny_config()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), CONFIG, random_tensors(CONFIG))


@pytest.fixture(scope="module")
def logits(model: Path) -> torch.Tensor:
    return TransformersOracle(model).logits(IDS.tolist())


def stored(path: Path, logits: torch.Tensor, ids: torch.Tensor = IDS) -> Path:
    save_file({"input_ids": ids, "logits": logits.contiguous()}, path)
    return path


@pytest.mark.parametrize("count", [1, 5, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_model(count: int, dtype: torch.dtype, model, logits, tmp_path: Path) -> None:
    file = stored(tmp_path / "l", logits[-count:].to(dtype))
    report = compare_logits(model, file)
    assert report.ok and report.num_positions == count
    if dtype == torch.float32:
        assert report.num_other_tokens == 0
        assert report.max_difference < 2e-4 < report.tolerance < 2e-3


def test_a_difference_in_one_logit(model, logits, tmp_path: Path) -> None:
    changed = logits.clone()
    changed[3, 5] += 0.01
    report = compare_logits(model, stored(tmp_path / "l", changed))
    assert not report.ok
    assert report.max_difference == pytest.approx(0.01, abs=2e-4)
    changed[3] = changed[3].flip(0)
    assert compare_logits(model, stored(tmp_path / "l", changed)).num_other_tokens == 1


def test_weights_that_were_cast_are_allowed_more(model, logits, tmp_path: Path) -> None:
    cast = {name: tensor.bfloat16() for name, tensor in random_tensors(CONFIG).items()}
    path = write_checkpoint(tmp_path / "cast", CONFIG, cast)
    file = stored(tmp_path / "l", logits)
    assert not compare_logits(path, file).ok
    assert compare_logits(path, file, cast=True).ok
    other = write_checkpoint(tmp_path / "other", CONFIG, random_tensors(CONFIG, seed=1))
    assert not compare_logits(other, file, cast=True).ok


WRONG = {
    "no_logits": {"input_ids": IDS},
    "ids_of_floats": {"input_ids": IDS.float(), "logits": torch.zeros(1, 320)},
    "more_logits_than_ids": {"input_ids": IDS[:2], "logits": torch.zeros(3, 320)},
    "no_position": {"input_ids": IDS, "logits": torch.zeros(0, 320)},
    "another_vocabulary": {"input_ids": IDS, "logits": torch.zeros(1, 321)},
    "ids_outside": {"input_ids": IDS + 300, "logits": torch.zeros(1, 320)},
    "not_finite": {"input_ids": IDS, "logits": torch.full((1, 320), torch.nan)},
}


@pytest.mark.parametrize("name", WRONG)
def test_files_of_another_form(name: str, model: Path, tmp_path: Path) -> None:
    save_file(WRONG[name], tmp_path / "l")
    with pytest.raises(ConfigError, match=str(tmp_path / "l")):
        compare_logits(model, tmp_path / "l")


def test_files_that_are_none(model: Path, tmp_path: Path) -> None:
    (tmp_path / "l").write_text("hello, this is a text")
    for file in (tmp_path / "l", tmp_path / "absent"):
        with pytest.raises(ConfigError, match=str(file)) as caught:
            compare_logits(model, file)
        assert "save_file" in str(caught.value.hint)
