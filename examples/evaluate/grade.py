"""Replies and scores to marks, and marks to shares with intervals: plain Python."""

import math
import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

# The last answer that is stated, whatever words surround it. Upper case alone: "a" is a word.
_STATED = re.compile(
    r"(?i:\banswer\s+is|\banswer\s*:|答案是|答案为|答案[：:])[\s(（*\"']*([A-Z])(?![A-Za-z])"
)
_BEGINS = re.compile(r"[\s(（*\"']*([A-Z])(?![A-Za-z'’]| [a-z])")
# Digits, or groups of three of them; a sign only where no digit or letter stands before it.
_NUMBER = re.compile(
    r"(?<![\w.])-?\$?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,]*\d)|(?:(?<![\w.])-\$?|\$)?\d+(?:\.\d+)?"
)


def letter_of(reply: str, letters: str = "ABCD") -> str | None:
    """Read the letter that a reply states. None where it states none of `letters`."""
    stated = [letter for letter in _STATED.findall(reply) if letter in letters]
    if stated:
        return stated[-1]
    begins = _BEGINS.match(reply)
    return begins[1] if begins and begins[1] in letters else None


def number_of(reply: str) -> Decimal | None:
    """Read the number behind the first "####", else the last number. None where there is none."""
    _, marked, after = reply.partition("####")
    numbers = _NUMBER.findall(after if marked else reply)
    if not numbers:
        return None
    text = (numbers[0] if marked else numbers[-1]).replace(",", "").replace("$", "")
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def same_text(reply: str, target: str) -> bool:
    """Compare texts but for width, case, spaces and one final mark."""
    return _plain(reply) == _plain(target)


def _plain(text: str) -> str:
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return folded[:-1].rstrip() if folded and folded[-1] in ".!?。" else folded


def choose(scores: Sequence[float]) -> tuple[int, bool]:
    """Return the place of the largest score, the first of equal ones, and whether there were several."""
    best = max(scores)
    return scores.index(best), list(scores).count(best) > 1


def wilson(correct: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Return the interval of a share by Wilson's formula: from 0 to 1 where nothing was counted."""
    if not n:
        return 0.0, 1.0
    share, square = correct / n, z * z
    centre = (share + square / (2 * n)) / (1 + square / n)
    half = z / (1 + square / n) * math.sqrt(share * (1 - share) / n + square / (4 * n * n))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return how likely so uneven a split is between two models of the same share: exact, two-sided.

    Args:
        only_first, only_second: questions that only one of the two has right.
    """
    n, few = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(n, k) for k in range(few + 1))
    return float(min(1.0, 2 * tail / 2**n))
