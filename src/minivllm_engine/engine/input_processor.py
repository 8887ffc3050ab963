"""From a prompt and its parameters to requests: what can be refused is refused here."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minivllm_engine.core.errors import RequestError
from minivllm_engine.core.outputs import RequestOutput, Timing, Usage
from minivllm_engine.core.request import ReadyRequest, ReadyScore, Request
from minivllm_engine.core.sampling_params import ResolvedSampling, SamplingParams
from minivllm_engine.core.structured import Structured
from minivllm_engine.engine.output_processor import RequestState
from minivllm_engine.engine.prepare import PreparedModel
from minivllm_engine.engine.score_state import ScoreState, count_sequences, sequence_ids
from minivllm_engine.structured.compiler import Compiler
from minivllm_engine.structured.matcher import Matcher
from minivllm_engine.text.continuations import read_score
from minivllm_engine.text.detokenizer import opens_reasoning
from minivllm_engine.text.prompt import Prompt, is_messages, read_prompt


class InputProcessor:
    """Reads prompts, checks them against the model, and numbers the requests by arrival."""

    def __init__(self, prepared: PreparedModel) -> None:
        self._tokenizer = prepared.tokenizer
        self._config, self._generation_config = prepared.config, prepared.generation_config
        self._vocab_size = prepared.model_config.vocab_size
        self._max_model_len = prepared.plan.max_model_len
        self._end_ids = prepared.end_ids
        self._num_arrived = 0
        self._compiler = Compiler(self._vocab_size, self._tokenizer, self._end_ids)

    def read(self, prompt: Prompt, params: SamplingParams | None, place: int) -> ReadyRequest:
        """Read a prompt and resolve its parameters.

        Args:
            place: of the prompt among those that came with it; its seed, if it has none of its own.

        Raises:
            RequestError: one of them cannot be read.
        """
        if not isinstance(params, SamplingParams | None):
            raise RequestError(
                f"params: {type(params).__name__} is no SamplingParams",
                hint="SamplingParams(max_tokens=...)",
            )
        ids, is_chat = read_prompt(prompt, self._tokenizer, self._max_model_len)
        resolved = (params or SamplingParams()).resolved(
            self._config.sampling,
            self._generation_config.sampling,
            seed=self._config.sampling.seed + place,
        )
        return ReadyRequest(tuple(ids), resolved, is_chat)

    def admit(self, ready: ReadyRequest, request_id: str, *, counted: bool = True) -> RequestState:
        """Make the state of a new request, with one Request an output.

        Args:
            counted: the cache's sums know of it.

        Raises:
            RequestError: it can never be served.
        """
        ids, params = ready.prompt_ids, ready.params
        self._check(ids, params)
        answer_at = self._tokenizer.answer_start(ids) if ready.chat else None
        matcher = self.matcher(ids, params.structured, chat=ready.chat)
        total = min(len(ids) + params.max_tokens, self._max_model_len)
        requests = [
            Request(
                request_id,
                ids,
                params,
                self._num_arrived + i,
                index=i,
                max_total_tokens=total,
                answer_at=answer_at,
                counted=counted,
            )
            for i in range(params.n)
        ]
        self._num_arrived += len(requests)
        end_ids = frozenset() if params.ignore_eos else self._end_ids
        return RequestState(
            request_id,
            requests,
            self._tokenizer,
            end_ids,
            split_reasoning=ready.chat,
            matcher=matcher,
        )

    def matcher(self, ids: Sequence[int], form: Structured | None, *, chat: bool) -> Matcher | None:
        """Make the matcher of an output, which takes time where its form was not compiled lately.

        Raises:
            RequestError: it cannot be held to.
        """
        if form is None:
            return None
        thinks = chat and opens_reasoning(self._tokenizer, ids)
        return self._compiler.matcher(form, after_thinking=thinks)

    def read_score(self, item: Mapping[str, Any]) -> ReadyScore:
        """Read a prompt and its continuations.

        Raises:
            RequestError: they cannot be read.
        """
        return read_score(item, self._tokenizer, self._max_model_len)

    def admit_score(
        self, ready: ReadyScore, request_id: str, *, counted: bool = True
    ) -> ScoreState:
        """Make the state of new scores, with one Request a sequence that must be computed.

        Raises:
            RequestError: they can never be computed.
        """
        for place, one in enumerate(ready.continuations):
            ids = sequence_ids(one)
            self._check_range((*ids, one.token_ids[-1]), f"continuation {place}: token")
            if len(ids) > self._max_model_len:
                raise RequestError(
                    f"{len(one.context_ids)} prompt tokens + {len(one.token_ids)} of continuation "
                    f"{place} - 1 > max_model_len {self._max_model_len}",
                    code="prompt_too_long",
                )
        state = ScoreState(request_id, ready, self._num_arrived, counted=counted)
        self._num_arrived += count_sequences(ready)
        return state

    def probe(self, prompt: Prompt) -> Request:
        """Make of a prompt a request that will not run.

        Raises:
            RequestError: the prompt cannot be read, is empty, or has an id that is out of range.
        """
        ids, is_chat = read_prompt(prompt, self._tokenizer)
        self._check_prompt(ids)
        answer_at = self._tokenizer.answer_start(ids) if is_chat else None
        return Request("", tuple(ids), ResolvedSampling(seed=0), 0, answer_at=answer_at)

    def _check(self, ids: Sequence[int], params: ResolvedSampling) -> None:
        self._check_prompt(ids)
        self._check_range(params.logit_bias, "logit_bias")
        self._check_range(params.stop_token_ids, "stop_token_ids")
        if params.structured is not None and (params.ignore_eos or params.min_tokens):
            name = "ignore_eos" if params.ignore_eos else f"min_tokens {params.min_tokens}"
            raise RequestError(f"structured and {name} exclude each other: the form says the end")
        if params.min_tokens > params.max_tokens:
            raise RequestError(f"min_tokens {params.min_tokens} > max_tokens {params.max_tokens}")
        if len(ids) + 1 > self._max_model_len:
            raise RequestError(
                f"{len(ids)} prompt tokens + 1 > max_model_len {self._max_model_len}",
                code="prompt_too_long",
            )

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if not ids:
            raise RequestError("the prompt is empty", code="empty_prompt")
        self._check_range(ids, "prompt token")

    def _check_range(self, ids: Iterable[int], what: str) -> None:
        wrong = next((i for i in ids if not 0 <= i < self._vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"{what} id {wrong} is out of range",
                why=f"the model has ids 0 to {self._vocab_size - 1}",
            )


def is_batch(prompts: object) -> bool:
    """Say whether this is a list of prompts. A list of integers is one, and so is one of messages."""
    if not isinstance(prompts, list | tuple) or is_messages(prompts):
        return False
    return not prompts or not isinstance(prompts[0], int)


def refused(request_id: str, error: RequestError) -> RequestOutput:
    """Make the output of a request that was not taken."""
    return RequestOutput(
        request_id=request_id,
        prompt_token_ids=[],
        outputs=[],
        usage=Usage(prompt_tokens=0),
        timing=Timing(),
        params=None,
        finished=True,
        error=error,
    )
