"""Grade a model over a file of questions: evaluate.py MODEL FILE --task mmlu --out DIR

Answers are computed by `minivllm generate`. DIR gets items.jsonl and results.json, which goes to stdout too.
Exit code 5 where answers with and without the prefix cache differ.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import grade
from questions import TASKS, BadQuestions, Question, read_questions, request_lines

# Two choices that lie closer together may change places by rounding.
_TIES = {"fp32": 1e-4, "fp16": 0.06, "bf16": 0.5}


def grade_record(question: Question, record: dict[str, Any], task: str) -> dict[str, Any]:
    """Mark one record. `correct` is None where the request failed."""
    item: dict[str, Any] = {"id": question.id, "subject": question.subject, "gold": question.gold}
    if record["status"] != "ok":
        return item | {"answer": None, "correct": None, "error": record["error"]["code"]}
    item["cached_tokens"] = record["usage"]["cached_tokens"]
    if question.choices:
        scores = [score["logprob"] for score in record["scores"]]
        answer, tied = grade.choose(scores)
        return item | {
            "answer": answer,
            "correct": answer == question.gold,
            "scores": scores,
            "tied": tied,
        }
    output = record["outputs"][0]
    text, golds = output["text"], question.gold
    assert isinstance(golds, tuple)
    item |= {"text": text, "finish_reason": output["finish_reason"]}
    if task == "gsm8k":
        number = grade.number_of(text)
        answer = None if number is None else str(number)
        return item | {"answer": answer, "correct": number == Decimal(golds[0])}
    return item | {"answer": text, "correct": any(grade.same_text(text, gold) for gold in golds)}


def share_of(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Count marks: a request that failed counts as wrong."""
    correct = sum(item["correct"] is True for item in items)
    low, high = grade.wilson(correct, len(items))
    share = correct / len(items) if items else 0.0
    return {"n": len(items), "correct": correct, "accuracy": share, "wilson95": [low, high]}


def results_of(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Make the document of all marks."""
    subjects: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for item in items:
        subjects[item["subject"]].append(item)
    shares = {name: share_of(some) for name, some in subjects.items()}
    cut = sum(item.get("finish_reason") in ("length", "context") for item in items)
    document = share_of(items) | {
        "macro": sum(one["accuracy"] for one in shares.values()) / len(shares),
        "unparsed": sum(item["answer"] is None and "error" not in item for item in items),
        "failed": sum("error" in item for item in items),
        "ties": sum(item.get("tied", False) for item in items),
        "cut_off": cut,
        "by_subject": shares,
    }
    if cut > 0.05 * len(items):
        return {"warning": f"{cut} of {len(items)} answers were cut off"} | document
    return document


def compare(warm: list[dict[str, Any]], cold: list[dict[str, Any]], tie: float) -> dict[str, Any]:
    """Hold answers with the prefix cache against those without it, question by question."""
    different, gap = [], 0.0
    for one, other in zip(warm, cold, strict=True):
        pairs = zip(one.get("scores", ()), other.get("scores", ()), strict=True)
        gap = max([gap, *(abs(a - b) for a, b in pairs)])
        if one["answer"] != other["answer"]:
            best = sorted(other.get("scores", ()), reverse=True)
            if len(best) < 2 or best[0] - best[1] > tie:
                different.append(one["id"])
    equal = len(warm) - len(different)
    return {"equal": equal, "different": different, "largest_gap": gap}


def run(model: str, requests: Path, output: Path, extra: list[str]) -> list[dict[str, Any]]:
    """Answer all requests. Records in the order of their lines."""
    command = [sys.executable, "-m", "minivllm_cli", "generate", model, "-i", str(requests)]
    done = subprocess.run([*command, "-o", str(output), "--overwrite", *extra])
    if done.returncode not in (0, 3):
        raise SystemExit(done.returncode)
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    return sorted(records, key=lambda record: record["index"])


def against(items: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    """Compare with the items of another model over the same questions, by McNemar's exact test."""
    lines = path.read_text(encoding="utf-8").splitlines()
    other = {item["id"]: item["correct"] is True for item in map(json.loads, lines)}
    if other.keys() != {item["id"] for item in items}:
        raise SystemExit(f"{path}: not of the same questions")
    mine = {item["id"]: item["correct"] is True for item in items}
    first = sum(mine[name] and not other[name] for name in mine)
    second = sum(other[name] and not mine[name] for name in mine)
    return {"only_this": first, "only_other": second, "p": grade.mcnemar(first, second)}


def main(argv: list[str] | None = None) -> int:
    """Run the program. Returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory for what is written")
    parser.add_argument("--dev", type=Path, help="questions to take examples from")
    parser.add_argument("--shots", type=int, default=0, help="examples before each question")
    parser.add_argument("--choices", choices=("letter", "text"), default="letter")
    parser.add_argument("--compare-cache", action="store_true")
    parser.add_argument("--tie", choices=tuple(_TIES), default="fp32", help="dtype of the run")
    parser.add_argument("--against", type=Path, help="items.jsonl of another model")
    parser.add_argument("--set", action="append", default=[], metavar="K=V", help="for generate")
    args = parser.parse_args(argv)
    try:
        questions = read_questions(args.file, args.task)
        examples = read_questions(args.dev, args.task) if args.dev and args.shots else []
        if args.dev and args.dev.resolve() == args.file.resolve():
            raise BadQuestions(f"{args.dev}: examples must not come from the graded file")
        if len(examples) < args.shots:
            raise BadQuestions(f"--shots {args.shots}: --dev has {len(examples)} examples")
    except BadQuestions as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines = request_lines(
        questions, args.task, examples[: args.shots], as_texts=args.choices == "text"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    requests = args.out / "requests.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    extra = [part for one in args.set for part in ("--set", one)]

    def marks(name: str, *more: str) -> list[dict[str, Any]]:
        records = run(args.model, requests, args.out / name, [*extra, *more])
        return [grade_record(q, r, args.task) for q, r in zip(questions, records, strict=True)]

    items = marks("records.jsonl")
    document: dict[str, Any] = {"schema_version": 1, "model": args.model, "task": args.task}
    document |= {
        "shots": args.shots,
        "requests_sha256": hashlib.sha256(requests.read_bytes()).hexdigest(),
    }
    document |= results_of(items)
    if args.compare_cache:
        cold = marks("records-cold.jsonl", "--set", "cache.prefix_cache=false")
        document["cache"] = compare(items, cold, _TIES[args.tie])
    if args.against:
        document["against"] = against(items, args.against)
    text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
    (args.out / "items.jsonl").write_text(text, encoding="utf-8")
    result = json.dumps(document, ensure_ascii=False, indent=2)
    (args.out / "results.json").write_text(result + "\n", encoding="utf-8")
    print(result)
    return 5 if document.get("cache", {}).get("different") else 0


if __name__ == "__main__":
    sys.exit(main())
