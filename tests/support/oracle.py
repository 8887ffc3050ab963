"""The oracle: one prompt alone, one token a step through the recurrent form; and the rule for ties."""

from collections.abc import Sequence
from dataclasses import dataclass

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.core.outputs import CompletionOutput

# Matrix products over other numbers of rows differ in the last bits. Where the oracle's two best
# logits lie closer than this, either token is right.
TIE = 1e-4
TOLERANCE = 2e-4


@dataclass(frozen=True)
class OracleAnswer:
    """Greedy ids with the two best logprobs at each position."""

    ids: tuple[int, ...]
    best: tuple[tuple[float, float], ...]


class Oracle:
    """Answers of a model to prompts, computed once each."""

    def __init__(self, model: object, max_tokens: int, *, device: str = "auto") -> None:
        self._llm = LLM(
            model,
            engine={"max_num_batched_tokens": 1, "max_num_seqs": 1, "device": device},
            cache={"prefix_cache": False},
        )
        self._max_tokens = max_tokens
        self._answers: dict[tuple[int, ...], OracleAnswer] = {}

    def __call__(self, prompt: Sequence[int]) -> OracleAnswer:
        key = tuple(prompt)
        if key not in self._answers:
            params = SamplingParams(
                temperature=0, max_tokens=self._max_tokens, ignore_eos=True, logprobs=2
            )
            output = self._llm.generate([list(prompt)], params)[0].outputs[0]
            best = tuple((p.top[0].logprob, p.top[1].logprob) for p in output.logprobs)
            self._answers[key] = OracleAnswer(tuple(output.token_ids), best)
        return self._answers[key]


def agrees(
    output: CompletionOutput,
    oracle: OracleAnswer,
    *,
    tie: float = TIE,
    tolerance: float = TOLERANCE,
) -> bool:
    """Is the output the oracle's? False where it left the oracle at a tie, which the caller counts.

    Raises AssertionError for any other difference, also of logprobs before the ids differ.
    """
    assert len(output.token_ids) <= len(oracle.ids)
    for position, (token_id, best) in enumerate(
        zip(output.token_ids, oracle.best[: len(output.token_ids)], strict=True)
    ):
        if token_id != oracle.ids[position]:
            assert best[0] - best[1] < tie, (
                f"token {position}: {token_id} for {oracle.ids[position]}"
            )
            return False
        if output.logprobs is not None:
            sampled = output.logprobs[position].sampled.logprob
            assert abs(sampled - best[0]) < tolerance, (
                f"token {position}: logprob {sampled} {best[0]}"
            )
    return True
