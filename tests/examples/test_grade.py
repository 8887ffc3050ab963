"""The grader of examples/evaluate: 60 replies with every trap, and statistics against known values."""

import sys
from decimal import Decimal
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/evaluate"))

import grade

LETTERS = [
    ("B", "B"),
    ("B.", "B"),
    (" B", "B"),
    ("(C) because", "C"),
    ("（D）", "D"),
    ("**A**", "A"),
    ('"A"', "A"),
    ("The answer is C.", "C"),
    ("the answer is (C)", "C"),
    ("The Answer is **D**", "D"),
    ("Answer: B", "B"),
    ("Answer:\nB", "B"),
    ("答案是C。", "C"),
    ("答案：A", "A"),
    ("答案为 D", "D"),
    ("因此，答案是B", "B"),
    ("The answer is A. No: the answer is B.", "B"),
    ("A is wrong, so the answer is C", "C"),
    ("Answer the question", None),
    ("An answer", None),
    ("a", None),
    ("A cat sat there", None),
    ("the answer is a cat", None),
    ("Because of A", None),
    ("Beijing", None),
    ("E", None),
    ("The answer is E", None),
    ("I don't know", None),
    ("A's colour", None),
    ("", None),
    ("I think the answer is B, since AB is longer than AC", "B"),
    ("Dogs are animals. The answer is Dog.", None),
    ("C\n\nQuestion: what? Answer: ", "C"),
]
NUMBERS = [
    ("#### 72", "72"),
    ("12 + 60 = 72\n#### 72", "72"),
    ("#### 72\n#### 80", "72"),
    ("#### 72 of 80", "72"),
    ("72.", "72"),
    ("It is 72", "72"),
    ("It costs $130,000.", "130000"),
    ("#### $1,234.50", "1234.50"),
    ("1.50", "1.5"),
    ("-3", "-3"),
    ("#### -3", "-3"),
    ("the loss is -$20", "-20"),
    ("10-3", "3"),
    ("from 5 to 7", "7"),
    ("[8.124,12.852]", "12.852"),
    (",", None),
    ("no number", None),
    ("", None),
    ("1,2", "2"),
    ("1,000,000 people", "1000000"),
    ("0.5%", "0.5"),
    ("####", None),
    ("x2 is 9", "9"),
]
TEXTS = [
    ("Paris", "paris", True),
    ("Paris.", "Paris", True),
    ("Ｐａｒｉｓ", "Paris", True),
    (" New  York ", "new york", True),
    ("Paris!!", "Paris", False),
    ("London", "Paris", False),
    ("北京。", "北京", True),
]


def test_the_table_has_sixty_replies() -> None:
    assert len(LETTERS) + len(NUMBERS) + len(TEXTS) >= 60


@pytest.mark.parametrize(("reply", "letter"), LETTERS)
def test_letters(reply: str, letter: str | None) -> None:
    assert grade.letter_of(reply) == letter


@pytest.mark.parametrize(("reply", "number"), NUMBERS)
def test_numbers(reply: str, number: str | None) -> None:
    assert grade.number_of(reply) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(("reply", "target", "same"), TEXTS)
def test_texts(reply: str, target: str, same: bool) -> None:
    assert grade.same_text(reply, target) is same


def test_the_first_of_equal_scores_wins_and_is_told() -> None:
    assert grade.choose([-2.0, -1.0, -1.0]) == (1, True)
    assert grade.choose([-2.0, -1.0, -3.0]) == (1, False)


def test_wilson_against_known_values() -> None:
    assert grade.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert grade.wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert grade.wilson(500, 1000) == pytest.approx((0.4691, 0.5309), abs=1e-4)
    assert grade.wilson(0, 0) == (0.0, 1.0)


def test_mcnemar_against_known_values() -> None:
    assert grade.mcnemar(0, 0) == 1.0
    assert grade.mcnemar(5, 5) == 1.0
    assert grade.mcnemar(1, 9) == pytest.approx(0.021484, abs=1e-6)
    assert grade.mcnemar(0, 6) == pytest.approx(0.03125)
