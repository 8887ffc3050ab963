"""The dictionary: 14,676 WordNet entries, and the words that are deliberately not in it."""

import gzip
import random
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).parent
# The second file holds everyday words that the limits of the first left out.
DEFINITIONS = (HERE / "demo_defs.tsv.gz", HERE / "demo_more.tsv.gz")
HELD_OUT = HERE / "held_out_words.txt"
PLAIN_WORD = re.compile(r"(?<![A-Za-z-])[a-z]{3,14}(?![A-Za-z-])")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PREFIXES = ("un", "in", "re", "dis", "over", "non", "mis", "out", "pre", "sub", "counter")
ENDINGS = (
    *("", "s", "es", "ed", "ing", "er", "or", "ers", "ly", "ness", "able", "ish", "ment", "al"),
    *("ation", "ity", "ive", "ous", "ful", "less", "age", "ist", "ism", "y", "ic", "ance", "e"),
)


def sentence(text: str) -> str:
    """Capitalised, with a full stop."""
    return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")


def with_article(phrase: str) -> str:
    return ("an " if phrase[0].lower() in "aeiou" else "a ") + phrase


@dataclass(frozen=True)
class Entry:
    word: str
    part_of_speech: str  # n, v, a or r
    gloss: str
    hypernym: str  # empty where WordNet has none
    synonyms: tuple[str, ...]

    @property
    def definition(self) -> str:
        return sentence(self.gloss)

    @property
    def kind(self) -> str:
        """The answer to "What kind of thing is it?"."""
        if not self.hypernym:
            return "I know no broader term for it."
        if self.part_of_speech == "v":
            return f"A way to {self.hypernym}."
        return f"A kind of {self.hypernym}."

    @property
    def synonym(self) -> str:
        """The answer to "Another word for it?"."""
        if not self.synonyms:
            return "I know no other word for it."
        return f"Another word is {self.synonyms[0]}."


def refusal(word: str) -> str:
    return f"I don't know the word '{word}'."


def load_entries() -> list[Entry]:
    rows = []
    for path in DEFINITIONS:
        with gzip.open(path, "rt", encoding="utf-8") as f:
            rows += [line.rstrip("\n").split("\t") for line in f]
    return [Entry(r[0], r[1], r[2], r[3], tuple(filter(None, r[4].split(", ")))) for r in rows]


class WordInventor:
    """Invents words that look like English, most of them close to known words."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.next_letters: dict[str, str] = {}
        for word in words:
            padded = f"^^{word}$"
            for i in range(len(padded) - 2):
                pair = padded[i : i + 2]
                self.next_letters[pair] = self.next_letters.get(pair, "") + padded[i + 2]

    def invent(self, rng: random.Random) -> str:
        make = rng.choice((self._from_trigrams, self._with_slip, self._derived, self._crossed))
        return make(rng)

    def _from_trigrams(self, rng: random.Random) -> str:
        word = "^^"
        while not word.endswith("$") and len(word) < 16:
            word += rng.choice(self.next_letters[word[-2:]])
        return word.strip("^$")

    def _with_slip(self, rng: random.Random) -> str:
        word = rng.choice(self.words)
        i = rng.randrange(len(word))
        replacement = rng.choice(("", rng.choice(LETTERS), rng.choice(LETTERS) + word[i]))
        return word[:i] + replacement + word[i + 1 :]

    def _derived(self, rng: random.Random) -> str:
        """Another form of a known word, or what remains of it without its ending."""
        word = rng.choice(self.words)
        for ending in ENDINGS:
            if word.endswith(ending) and len(word) - len(ending) >= 3 and rng.random() < 0.7:
                word = word.removesuffix(ending)
                break
        if rng.random() < 0.25:
            return rng.choice(PREFIXES) + word
        if word.endswith("y") and rng.random() < 0.8:
            word = word[:-1] + "i"
        elif word.endswith("e") and rng.random() < 0.8:
            word = word[:-1]
        return word + rng.choice(ENDINGS)

    def _crossed(self, rng: random.Random) -> str:
        first, second = rng.choice(self.words), rng.choice(self.words)
        return (first[: rng.randint(2, 6)] + second[-rng.randint(2, 6) :])[:14]


class Dictionary:
    """The entries, and endless words outside them, of which 973 are never trained."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.known = {entry.word for entry in entries}
        self.held_out = HELD_OUT.read_text(encoding="utf-8").split()
        self._forbidden = self.known.union(self.held_out)
        self._inventor = WordInventor([entry.word for entry in entries])

    @cached_property
    def _outside(self) -> list[str]:
        """Words that the entries use without being entries themselves."""
        texts = (f"{e.gloss} {e.hypernym} {' '.join(e.synonyms)}" for e in self.entries)
        used = {word for text in texts for word in PLAIN_WORD.findall(text)}
        return sorted(used - self._forbidden)

    def unknown_word(self, rng: random.Random) -> str:
        """A word outside the dictionary and outside the held-out ones."""
        if rng.random() < 0.3:
            return rng.choice(self._outside)
        while True:
            word = self._inventor.invent(rng)
            if len(word) >= 3 and word not in self._forbidden:
                return word
