"""The adapter: the harness's requests as scores and answers of one engine.

Requests keep the harness's order: items with one header follow each other, and the prefix cache computes it
once. What is finished goes to the harness's cache at once, so that an interruption loses nothing of it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.core.config import CacheOptions, EngineOptions
from minivllm_engine.core.outputs import ContinuationScore, RequestOutput
from minivllm_engine.text.detokenizer import opens_reasoning

logger = logging.getLogger(__name__)

Ids = Sequence[int]
# Texts whose ids are kept: the harness encodes a context again for each of its continuations.
_MOST_TEXTS = 1024
# Generation arguments that say nothing which the others do not.
_MEANINGLESS = {"do_sample": None, "num_beams": 1, "until": None, "max_gen_toks": None}
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@register_model("minivllm")
class MiniVLLM(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A model directory, or "demo", answered by an engine of this process.

    Args:
        pretrained: what `LLM` takes as its model.
        batch_size, max_batch_size: what the harness passes to every model; the engine fills its own
            batches, whose size is `max_num_seqs`.
        device: "cpu", "cuda" or "cuda:0"; where there is no GPU the harness's default means the CPU.
        max_gen_toks: most tokens of an answer whose task sets none.
        enable_thinking: for the chat template; None leaves it alone.
        prefix_token_id: stands before a text without context; default the end token.
        options: keys of the `engine` and `cache` sections of the config.
    """

    def __init__(
        self,
        pretrained: str = "demo",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str = "auto",
        max_gen_toks: int = 256,
        enable_thinking: bool | None = None,
        prefix_token_id: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        sections: dict[str, dict[str, Any]] = {"engine": {"dtype": dtype}, "cache": {}}
        sections["engine"]["device"] = _device_of(device)
        for key, value in options.items():
            section = "cache" if key in CacheOptions.model_fields else "engine"
            if section == "engine" and key not in EngineOptions.model_fields:
                raise ValueError(f"model_args: {key} is no key of the engine's config")
            sections[section][key] = value
        self.llm = LLM(pretrained, engine=sections["engine"], cache=sections["cache"])
        self.tokenizer = self.llm.tokenizer
        self.max_gen_toks = max_gen_toks
        self._thinking: dict[str, Any] = (
            {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        )
        self._prefix_token_id = prefix_token_id
        self._window = 2 * (self.llm.config.engine.max_num_seqs or 1)
        self._num_moved_cuts = 0
        self._encoded = lru_cache(_MOST_TEXTS)(lambda text: tuple(self.tokenizer.encode(text)))

    # -- what the harness asks of every model ----------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end token, or the model's first one."""
        ids = self.tokenizer.eos_ids or tuple(sorted(self.llm.stop_token_ids))
        if not ids:
            raise ValueError("this model names no end token: give prefix_token_id in model_args")
        return int(ids[0])

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        return self.eot_token_id if self._prefix_token_id is None else self._prefix_token_id

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return self.llm.max_model_len

    @property
    def tokenizer_name(self) -> str:
        """What tells cached requests of one tokenizer from those of another."""
        return str(self.llm.model_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return what the results say of the model."""
        config = self.llm.config.engine
        return {
            "model_path": str(self.llm.model_path),
            "model_dtype": config.dtype,
            "device": self.llm.device,
            "max_length": self.max_length,
            "prefix_cache": self.llm.config.cache.prefix_cache,
            "continuations_cut_elsewhere": self._num_moved_cuts,
        }

    def apply_chat_template(
        self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the model's chat template writes it."""
        return self.tokenizer.render_chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._thinking,
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **rest: Any
    ) -> list[int]:
        """Return ids of a text; nothing is added to it, whatever is asked for."""
        return list(self._encoded(string))

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        context_ids, ids = super()._encode_pair(context, continuation)
        if ids:
            return context_ids, ids
        # One token spans the join: there the harness's cut leaves nothing to score.
        whole = self.tok_encode(context + continuation)
        most = min(len(whole) - 1, len(context_ids))
        cut = next((i for i in range(most) if whole[i] != context_ids[i]), most)
        if not self._num_moved_cuts:
            logger.warning(
                "%r and %r share a token: such continuations are scored from that token on",
                context[-20:],
                continuation[:20],
            )
        self._num_moved_cuts += 1
        return whole[:cut] or [self.prefix_token_id], whole[cut:]

    # -- scores ------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **rest: Any,
    ) -> list[tuple[float, bool]]:
        thinks = next((c for _, c, _ in requests if opens_reasoning(self.tokenizer, c)), None)
        if thinks is not None:
            raise ValueError(
                "a context opens the model's reasoning, and a choice is no reasoning: "
                "give enable_thinking=False in model_args"
            )
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)

        def take(place: int, score: ContinuationScore) -> None:
            answers[place] = (score.logprob, score.is_greedy)
            key = requests[place][0]
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answers[place])

        self._score([(c, k) for _, c, k in requests], take, disable=disable_tqdm)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in windows of `max_length` that do not overlap."""
        texts = [request.args[0] for request in requests]
        pairs: list[tuple[Ids, Ids]] = []
        owners: list[int] = []
        for owner, text in enumerate(texts):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, 1
            )
            for window in windows:
                pairs.append(make_disjoint_window(window))
                owners.append(owner)
        sums = [0.0] * len(texts)
        left = [owners.count(owner) for owner in range(len(texts))]

        def take(place: int, score: ContinuationScore) -> None:
            owner = owners[place]
            sums[owner] += score.logprob
            left[owner] -= 1
            if not left[owner]:
                key = (texts[owner],)
                self.cache_hook.add_partial("loglikelihood_rolling", key, sums[owner])

        self._score(pairs, take, disable=disable_tqdm)
        return sums

    def _score(
        self,
        pairs: Sequence[tuple[Ids, Ids]],
        take: Callable[[int, ContinuationScore], None],
        *,
        disable: bool,
    ) -> None:
        """Score continuations; `take` gets each one's place and its score, as they come."""
        cut = [(self._cut(context, ids), ids) for context, ids in pairs]
        runs = [list(run) for _, run in groupby(range(len(cut)), key=lambda i: cut[i][0])]

        def add(number: int, request_id: str) -> None:
            places = runs[number]
            item = {
                "prompt_token_ids": list(cut[places[0]][0]),
                "continuation_token_ids": [list(cut[place][1]) for place in places],
            }
            self.llm.add_score(item, request_id=request_id)

        for number, out in self._answers(len(runs), add, "scores", disable=disable):
            for place, score in zip(runs[number], out.scores or (), strict=True):
                take(place, score)

    def _cut(self, context: Ids, ids: Ids) -> tuple[int, ...]:
        """The end of a context that a continuation leaves room for: its last token is not computed."""
        room = self.max_length + 1 - len(ids)
        if room < 1:
            raise ValueError(f"a continuation has {len(ids)} tokens, more than {self.max_length}")
        return tuple(context[-room:])

    # -- answers -----------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return answers, each up to the first of its stop strings."""
        asked = [request.args for request in requests]
        read = [self._read_generation(context, kwargs) for context, kwargs in asked]
        answers = [""] * len(asked)

        def add(number: int, request_id: str) -> None:
            prompt, params = read[number]
            self.llm.add_request(prompt, params, request_id=request_id)

        for number, out in self._answers(len(asked), add, "answers", disable=disable_tqdm):
            stops = list(read[number][1].stop or ())
            answers[number] = postprocess_generated_text(out.text, stops, None)
            self.cache_hook.add_partial("generate_until", asked[number], answers[number])
        return answers

    def _read_generation(
        self, context: str, given: Mapping[str, Any]
    ) -> tuple[dict[str, Any], SamplingParams]:
        kwargs = normalize_gen_kwargs(dict(given), self.max_gen_toks)
        most = int(kwargs["max_gen_toks"])
        if most >= self.max_length:
            raise ValueError(
                f"max_gen_toks {most} leaves no room below max_length {self.max_length}"
            )
        end = self.tokenizer.eos_ids
        eos = self.tokenizer.token_text(end[0]) if end else None
        stops = [s for s in handle_stop_sequences(kwargs.get("until"), None) if s and s != eos]
        rest = {
            key: value
            for key, value in kwargs.items()
            if key not in _MEANINGLESS or (key == "num_beams" and value != 1)
        }
        # The model's own generation config must not bring penalties that the task does not know.
        params = SamplingParams.create(
            **(_PENALTIES | rest), max_tokens=most, stop=tuple(stops) or None
        )
        ids = self.tok_encode(context)[-(self.max_length - most) :]
        chat = self.tokenizer.answer_start(ids) is not None
        return {"prompt_token_ids": ids, "chat": chat}, params

    # -- the engine --------------------------------------------------------------------------------

    def _answers(
        self, number: int, add: Callable[[int, str], None], what: str, *, disable: bool
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Queue requests, a window of them at a time, and yield each with its place when it is done."""
        ids = {f"harness-{place}": place for place in range(number)}
        waiting = iter(ids)
        open_ids: set[str] = set()
        bar = tqdm(total=number, desc=f"minivllm {what}", disable=disable)
        try:
            while True:
                while len(open_ids) < self._window and (name := next(waiting, None)) is not None:
                    add(ids[name], name)
                    open_ids.add(name)
                if not open_ids:
                    return
                for out in self.llm.step():
                    if out.finished:
                        open_ids.remove(out.request_id)
                        if out.error is not None:
                            raise out.error
                        bar.update()
                        yield ids[out.request_id], out
        finally:
            bar.close()
            for name in open_ids:
                self.llm.abort(name)


def _device_of(device: str | None) -> str:
    kind = (device or "auto").partition(":")[0]
    # The harness's command line asks for "cuda:0" where nobody asked for anything.
    return "auto" if kind == "cuda" and not torch.cuda.is_available() else kind
