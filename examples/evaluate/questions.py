"""Files of questions to request lines of `minivllm generate`: JSONL, C-Eval, MMLU and GSM8K."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grade

LETTERS = "ABCDEFGHIJ"
TASKS = ("choices", "exact", "ceval", "mmlu", "gsm8k")
_END = {"english": ("\nAnswer:", " "), "chinese": ("\n答案：", "")}


class BadQuestions(Exception):
    """A file that cannot be read as questions, with its place."""


@dataclass(frozen=True)
class Question:
    """One question with its right answer.

    Attributes:
        choices: what can be chosen; () where an answer is written.
        gold: the place of the right choice, or the answers that are right.
    """

    id: str
    text: str
    choices: tuple[str, ...]
    gold: int | tuple[str, ...]
    subject: str
    solution: str = ""


def read_questions(path: Path, task: str) -> list[Question]:
    """Read all questions of a file.

    Raises:
        BadQuestions: with file and line.
    """
    questions, seen = [], set()
    for line, row in _rows(path, task):
        place = f"{path}:{line}"
        try:
            question = _question(row, task, f"{path.stem}-{line}", path.stem)
        except (KeyError, ValueError, TypeError) as error:
            raise BadQuestions(f"{place}: {error}") from None
        if question.id in seen:
            raise BadQuestions(f"{place}: id {question.id} was used by an earlier line")
        seen.add(question.id)
        questions.append(question)
    if not questions:
        raise BadQuestions(f"{path}: no questions")
    return questions


def _rows(path: Path, task: str) -> Iterator[tuple[int, Any]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            if task == "ceval":
                reader = csv.DictReader(file)
                yield from ((reader.line_num, row) for row in reader)
            elif task == "mmlu":
                rows = csv.reader(file)
                yield from ((rows.line_num, row) for row in rows if row)
            else:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield number, _object(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise BadQuestions(f"{path}: {error}") from None


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadQuestions(f"{place}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadQuestions(f"{place}: not an object")
    return value


def _question(row: Any, task: str, name: str, stem: str) -> Question:
    if task == "mmlu":
        if len(row) != 6:
            raise ValueError(f"{len(row)} columns instead of 6")
        return Question(name, row[0], tuple(row[1:5]), _place(row[5], row[1:5]), stem)
    if task == "ceval":
        choices = [_text(row, letter) for letter in "ABCD"]
        gold = _place(_text(row, "answer"), choices)
        return Question(f"{stem}-{row['id']}", _text(row, "question"), tuple(choices), gold, stem)
    name, subject = str(row.get("id", name)), str(row.get("subject", ""))
    if task == "gsm8k":
        solution = _text(row, "answer")
        gold = grade.number_of(solution)
        if "####" not in solution or gold is None:
            raise ValueError("the answer has no number behind ####")
        return Question(name, _text(row, "question"), (), (str(gold),), subject, solution)
    if task == "exact":
        targets = row["target"] if isinstance(row.get("target"), list) else [_text(row, "target")]
        return Question(name, _text(row, "prompt"), (), tuple(map(str, targets)), subject)
    choices = row["choices"]
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(f"choices: not a list of 2 to {len(LETTERS)}")
    choices = [str(choice) for choice in choices]
    return Question(
        name, _text(row, "question"), tuple(choices), _place(row["answer"], choices), subject
    )


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"no text under {key}")
    return value


def _place(answer: Any, choices: list[str]) -> int:
    """A place, a letter, or the text of one of the choices."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    if isinstance(answer, str):
        if answer in choices:
            return choices.index(answer)
        letters = LETTERS[: len(choices)]
        if len(answer.strip()) == 1 and answer.strip() in letters:
            return letters.index(answer.strip())
    raise ValueError(f"the answer {answer!r} is none of the {len(choices)} choices")


def request_lines(
    questions: list[Question], task: str, examples: list[Question], *, as_texts: bool = False
) -> list[dict[str, Any]]:
    """Write the lines of `minivllm generate`, those of one subject behind the same header.

    Args:
        examples: come before each question, with their answers.
        as_texts: score the texts of the choices instead of their letters.
    """
    return [_line(question, task, examples, as_texts) for question in questions]


def _line(
    question: Question, task: str, examples: list[Question], as_texts: bool
) -> dict[str, Any]:
    style = "chinese" if task == "ceval" else "english"
    end, space = _END[style]
    shown = [_asked(one, end, as_texts) + _shown(one, space, as_texts) for one in examples]
    prompt = _header(task, question.subject) + "".join(one + "\n\n" for one in shown)
    line: dict[str, Any] = {"id": question.id}
    if question.choices:
        line["prompt"] = prompt + _asked(question, end, as_texts)
        if as_texts:
            line["continuations"] = [f"{space}{choice}" for choice in question.choices]
        else:
            line["continuations"] = [f"{space}{x}" for x in LETTERS[: len(question.choices)]]
        return line
    line |= {"temperature": 0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    if task == "gsm8k":
        line["prompt"] = prompt + _asked(question, end, as_texts)
        return line | {"max_tokens": 512, "stop": ["\n\n", "\nQuestion:"]}
    return line | {"prompt": prompt + question.text, "max_tokens": 64, "stop": ["\n"]}


def _header(task: str, subject: str) -> str:
    name = subject.removesuffix("_test").removesuffix("_val").replace("_", " ")
    if task == "mmlu":
        return f"The following are multiple choice questions (with answers) about {name}.\n\n"
    return f"以下是关于{name}的单项选择题，请选出其中的正确答案。\n\n" if task == "ceval" else ""


def _asked(question: Question, end: str, as_texts: bool) -> str:
    if not question.choices:
        return question.text if not question.solution else f"Question: {question.text}{end}"
    if as_texts:
        return question.text + end
    pairs = zip(LETTERS, question.choices, strict=False)
    return question.text + "".join(f"\n{letter}. {choice}" for letter, choice in pairs) + end


def _shown(question: Question, space: str, as_texts: bool) -> str:
    if isinstance(question.gold, int):
        choice = question.choices[question.gold]
        return space + (choice if as_texts else LETTERS[question.gold])
    return " " + (question.solution or question.gold[0])
