"""How deep the way from `LLM.step` to a kernel is: a reader walks it, and every step pays for it."""

import sys
from pathlib import Path

import pytest

import minivllm_engine
from minivllm_engine import LLM, SamplingParams
from minivllm_engine.ops import reference_backend

ENGINE = str(Path(minivllm_engine.__file__).parent)
# The step of the LLM, of the loop and of the runner, the model, a layer, its mixer, the operations' choice.
MOST = 11


def test_few_frames_lie_between_a_step_and_the_delta_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    step, depths = reference_backend.rule.gated_delta_step, []

    def counting(*args, **kwargs):
        frame, ours = sys._getframe(1), []
        while frame is not None:
            ours.append(frame.f_code)
            frame = frame.f_back
        inside = [code for code in ours if code.co_filename.startswith(ENGINE)]
        assert inside[-1].co_qualname == "LLM.step"
        depths.append(len(inside))
        return step(*args, **kwargs)

    monkeypatch.setattr(reference_backend.rule, "gated_delta_step", counting)
    with LLM("demo", engine={"device": "cpu", "max_num_seqs": 1, "max_model_len": 64}) as llm:
        llm.add_request([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
        while llm.has_unfinished:
            llm.step()
    assert depths
    assert max(depths) <= MOST
