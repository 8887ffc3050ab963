"""generation_config.json: recommended sampling and end ids."""

import json
import logging
from pathlib import Path

import pytest

from minivllm_engine.core.config import SamplingOptions
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.model_config.generation_config import load_generation_config


def write(path: Path, **content: object) -> Path:
    (path / "generation_config.json").write_text(json.dumps(content))
    return path


def test_a_model_without_one_recommends_nothing(tmp_path: Path) -> None:
    config = load_generation_config(tmp_path)
    assert config.sampling == SamplingOptions()
    assert config.eos_token_ids == ()


def test_h18_values_become_defaults_of_requests(tmp_path: Path) -> None:
    config = load_generation_config(
        write(tmp_path, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, eos_token_id=[7, 8])
    )
    assert config.eos_token_ids == (7, 8)
    params = SamplingParams(top_k=5).resolved(SamplingOptions(top_p=0.5), config.sampling, seed=3)
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.6, 5, 0.5, 3)
    assert params.min_p == 0


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    config = load_generation_config(
        write(tmp_path, do_sample=False, temperature=0.6, eos_token_id=1)
    )
    assert config.sampling.temperature == 0
    assert config.eos_token_ids == (1,)


def test_c9_max_new_tokens_is_the_default_of_requests(tmp_path: Path) -> None:
    sampling = load_generation_config(write(tmp_path, max_new_tokens=77)).sampling
    assert SamplingParams().resolved(SamplingOptions(), sampling, seed=0).max_tokens == 77
    own = SamplingParams(max_tokens=5).resolved(SamplingOptions(), sampling, seed=0)
    assert own.max_tokens == 5
    set_by_user = SamplingParams().resolved(SamplingOptions(max_tokens=6), sampling, seed=0)
    assert set_by_user.max_tokens == 6


def test_c9_what_is_not_honoured_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    usual = {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None}
    with caplog.at_level(logging.WARNING):
        load_generation_config(write(tmp_path, do_sample=True, eos_token_id=3, **usual))
    assert not caplog.records
    lost = {"suppress_tokens": [5], "bad_words_ids": [[7]], "num_beams": 4, "min_new_tokens": 3}
    with caplog.at_level(logging.WARNING):
        load_generation_config(write(tmp_path, **lost))
    (record,) = caplog.records
    assert all(key in record.getMessage() for key in lost)


@pytest.mark.parametrize(
    "content",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": "many"},
        {"eos_token_id": list(range(200_000))},
        {"temperature": "warm"},
        {"top_p": 7},
        {"eos_token_id": "x"},
        {"eos_token_id": [True]},
    ],
)
def test_wrong_values_are_named(tmp_path: Path, content: dict) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_generation_config(write(tmp_path, **content))
    assert next(iter(content)) in str(caught.value)
    assert "generation_config.json" in str(caught.value)


def test_a_file_that_is_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[1")
    with pytest.raises(CheckpointError, match="generation_config"):
        load_generation_config(tmp_path)
