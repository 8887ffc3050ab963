"""Measure the shipped model through the engine, with every check and every entry.

python -m demo_training.evaluate [MODEL] [--out FILE] [--sample N] [--dtype fp32]
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from minivllm_engine import LLM, SamplingParams

from . import report
from .checks import Check, Request, all_checks, ask_by_kind, score
from .entries import Dictionary, load_entries

MAX_TOKENS = 96


class EngineAnswerer:
    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.errors = 0

    def __call__(self, requests: list[Request]) -> list[str]:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        outputs = self.llm.generate([_prompt(request) for request in requests], params)
        self.errors += sum(output.error is not None for output in outputs)
        return [output.text for output in outputs]


def _prompt(request: Request) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": request.messages}
    if request.thinking is not None:
        prompt["chat_template_kwargs"] = {"enable_thinking": request.thinking}
    return prompt


def save_misses(path: Path, checks: list[Check], answers: list[list[str]]) -> None:
    with path.open("w", encoding="utf-8") as f:
        for check, texts in zip(checks, answers, strict=True):
            pairs = zip(texts, check.expected, strict=True)
            if any(expected not in (None, text) for text, expected in pairs):
                print(json.dumps(check.as_record() | {"answers": texts}), file=f)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--misses", type=Path, help="JSON lines file for the wrong answers")
    parser.add_argument("--sample", type=int, help="entries to ask for instead of all")
    parser.add_argument("--dtype", default="fp32", help="of the computation, on any device")
    args = parser.parse_args()
    checks = all_checks(Dictionary(load_entries()), args.sample)
    with LLM(args.model, engine={"dtype": args.dtype}) as llm:
        started = time.time()
        answerer = EngineAnswerer(llm)
        answers = ask_by_kind(checks, answerer)
    counts = score(checks, answers)
    print(report.table(counts))
    print(f"{time.time() - started:.0f} s, {answerer.errors} requests ended with an error")
    if args.out:
        report.save(args.out, counts, engine="minivllm", errors=answerer.errors)
    if args.misses:
        save_misses(args.misses, checks, answers)


if __name__ == "__main__":
    main()
