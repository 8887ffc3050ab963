"""Measure a checkpoint with transformers: the second opinion beside evaluate.py.

python -m demo_training.evaluate_transformers CHECKPOINT [--out FILE] [--sample N]
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from . import report
from .checks import Request, all_checks, ask_by_kind, score
from .entries import Dictionary, load_entries

MAX_NEW_TOKENS = 96


class TransformersAnswerer:
    """Greedy, in batches of similar length, padded on the left."""

    def __init__(self, checkpoint: Path, device: str, batch_tokens: int) -> None:
        self.device, self.batch_tokens = device, batch_tokens
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            checkpoint, padding_side="left"
        )
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32
        ).to(device)

    def __call__(self, requests: list[Request]) -> list[str]:
        prompts = [self._render(request) for request in requests]
        lengths = [len(ids) for ids in self.tokenizer(prompts).input_ids]
        texts = [""] * len(prompts)
        waiting = sorted(range(len(prompts)), key=lambda i: -lengths[i])
        while waiting:
            size = max(1, self.batch_tokens // (lengths[waiting[0]] + MAX_NEW_TOKENS))
            batch, waiting = waiting[:size], waiting[size:]
            for i, text in zip(batch, self._generate([prompts[i] for i in batch]), strict=True):
                texts[i] = text.split("</think>\n\n")[-1]
        return texts

    def _render(self, request: Request) -> str:
        settings = {} if request.thinking is None else {"enable_thinking": request.thinking}
        text = self.tokenizer.apply_chat_template(
            request.messages, tokenize=False, add_generation_prompt=True, **settings
        )
        assert isinstance(text, str)
        return text

    @torch.inference_mode()
    def _generate(self, prompts: list[str]) -> list[str]:
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.device)
        ids = self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        new = ids[:, inputs.input_ids.shape[1] :]
        return self.tokenizer.batch_decode(new, skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--sample", type=int, help="entries to ask for instead of all")
    parser.add_argument("--batch-tokens", type=int, default=16_000)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.time()
    checks = all_checks(Dictionary(load_entries()), args.sample)
    answers = ask_by_kind(checks, TransformersAnswerer(args.checkpoint, device, args.batch_tokens))
    counts = score(checks, answers)
    print(report.table(counts))
    print(f"{time.time() - started:.0f} s on {device}")
    if args.out:
        report.save(args.out, counts, engine="transformers", device=device, dtype="float32")


if __name__ == "__main__":
    main()
