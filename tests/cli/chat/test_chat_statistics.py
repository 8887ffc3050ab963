"""The line after an answer, and what a file keeps of it."""

from minivllm_cli.chat.statistics import (
    context_warning,
    saved_figures,
    statistics_line,
    thought_line,
)
from minivllm_engine.core.outputs import (
    CompletionOutput,
    FinishReason,
    RequestOutput,
    Timing,
    Usage,
)
from minivllm_engine.core.sampling_params import ResolvedSampling


def _output(usage: Usage, timing: Timing, reason: FinishReason) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt_token_ids=[],
        outputs=[CompletionOutput(0, finish_reason=reason)],
        usage=usage,
        timing=timing,
        params=ResolvedSampling(seed=7),
        finished=True,
    )


def test_statistics_line():
    output = _output(
        Usage(prompt_tokens=1690, completion_tokens=412),
        Timing(ttft_s=0.214, tpot_s=1 / 96.3),
        FinishReason.STOP,
    )
    assert statistics_line(output, 32768) == (
        "412 tok · 96.3 tok/s · TTFT 0.21 s · prompt 1,690 = 0 reused + 1,690 new "
        "· ctx 2,102/32,768 (6%) · stop"
    )
    assert saved_figures(output) == {
        "prompt_tokens": 1690,
        "cached_tokens": 0,
        "completion_tokens": 412,
        "reasoning_tokens": 0,
        "ttft_s": 0.214,
        "tok_s": 96.3,
        "seed": 7,
    }


def test_what_was_not_measured_is_left_out():
    output = _output(Usage(prompt_tokens=5), Timing(), FinishReason.ABORT)
    assert statistics_line(output, 100) == (
        "0 tok · prompt 5 = 0 reused + 5 new · ctx 5/100 (5%) · abort"
    )
    assert saved_figures(output)["ttft_s"] is None
    assert saved_figures(output)["tok_s"] is None


def test_reused_tokens_are_told_apart():
    usage = Usage(prompt_tokens=1690, completion_tokens=1, cached_tokens=1152)
    line = statistics_line(_output(usage, Timing(ttft_s=1.0), FinishReason.LENGTH), 4096)
    assert "prompt 1,690 = 1,152 reused + 538 new" in line
    assert line.endswith("· length")


def test_the_warning_begins_at_80_percent():
    assert context_warning(79, 100) is None
    assert context_warning(80, 100) == "the context is 80% full: 20 tokens are left"
    assert context_warning(101, 100) == "the context is 101% full: 0 tokens are left"


def test_thought_line():
    assert thought_line(412, 6.12) == "· thought 412 tok, 6.1 s"
