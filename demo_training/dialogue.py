"""Turns and conversations, and the turns about words: define, kind, synonym, refusal."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from . import phrasings as say
from .entries import Dictionary, Entry, refusal, with_article
from .smalltalk import CONVERSATIONAL


@dataclass(frozen=True)
class Turn:
    user: str
    answer: str
    thought: str  # what the model says to itself when thinking is on
    weight: int = 1  # of the answer's tokens in the loss


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Turn, ...]
    system: str | None = None
    thinking: bool | None = None  # None: no think block; False: an empty one; True: the thought
    raw: bool = False  # plain text without the chat template


def spelling(rng: random.Random, word: str) -> str:
    chance = rng.random()
    return word.capitalize() if chance < 0.08 else word.upper() if chance < 0.1 else word


def ask(rng: random.Random, templates: tuple[str, ...], word: str, noun: bool) -> str:
    """One question about a word, with the small liberties that people take in typing."""
    text = rng.choice(templates).format(w=word, a=with_article(word) if noun else word)
    if rng.random() < 0.12 and not text.startswith(word):
        text = text[0].lower() + text[1:]
        if rng.random() < 0.5:
            text = text.rstrip(".?")
    return text


class WordTalk:
    """Makes turns about words. Every entry comes round once before any comes round again."""

    def __init__(self, dictionary: Dictionary, rng: random.Random) -> None:
        self.dictionary = dictionary
        self.rng = rng
        self._stream = self._endless_entries()

    def _endless_entries(self) -> Iterator[Entry]:
        order = list(self.dictionary.entries)
        while True:
            self.rng.shuffle(order)
            yield from order

    def next_entry(self) -> Entry:
        return next(self._stream)

    def define(self, entry: Entry, templates: tuple[str, ...] | None = None) -> Turn:
        if templates is None:
            templates = self._any_define()
        user = self._ask(templates, entry)
        while user.strip("?' ").lower() in CONVERSATIONAL:
            user = self._ask(templates, entry)
        return Turn(user, entry.definition, f"The user asks what '{entry.word}' means.")

    def _any_define(self) -> tuple[str, ...]:
        return say.DEFINE if self.rng.random() < 0.5 else say.DEFINE_IN_MANY_WORDS

    def kind(self, entry: Entry, templates: tuple[str, ...] = say.KIND_OF_IT) -> Turn:
        user = self._ask(templates, entry)
        return Turn(user, entry.kind, f"The user asks for a broader term for '{entry.word}'.")

    def synonym(self, entry: Entry, templates: tuple[str, ...] = say.SYNONYM_OF_IT) -> Turn:
        user = self._ask(templates, entry)
        return Turn(user, entry.synonym, f"The user asks for another word for '{entry.word}'.")

    def _ask(self, templates: tuple[str, ...], entry: Entry) -> str:
        word = spelling(self.rng, entry.word)
        return ask(self.rng, templates, word, entry.part_of_speech == "n")

    def unknown(self) -> Conversation:
        """A word outside the dictionary; it may be asked about twice, a known one may follow."""
        rng = self.rng
        word = spelling(rng, self._unknown_term())
        first = self._any_define() if rng.random() < 0.85 else say.KIND + say.SYNONYM
        turns = [self._refused(word, first)]
        if rng.random() < 0.15:
            turns.append(self._refused(word, say.KIND_OF_IT + say.SYNONYM_OF_IT))
        if rng.random() < 0.15:
            turns.append(self.define(self.next_entry()))
        return Conversation(tuple(turns))

    def _unknown_term(self) -> str:
        """A word outside the dictionary; now and then a term of two words, which it has none of."""
        if self.rng.random() < 0.08:
            return " ".join(entry.word for entry in self.rng.sample(self.dictionary.entries, 2))
        return self.dictionary.unknown_word(self.rng)

    def _refused(self, word: str, templates: tuple[str, ...]) -> Turn:
        user = ask(self.rng, templates, word, self.rng.random() < 0.8)
        thought = f"The user asks about '{word}', a word I don't know."
        return Turn(user, refusal(word), thought)

    def chain(self, length: int) -> list[Turn]:
        """Turns that refer back: "it" is the last word defined, "the first one" the first."""
        rng = self.rng
        entry = self.next_entry()
        defined, turns, it_is_clear = [entry], [self.define(entry)], True
        while len(turns) < length:
            action = rng.random()
            if action < 0.36 and it_is_clear:
                turns.append(self.kind(entry))
            elif action < 0.72 and it_is_clear:
                turns.append(self.synonym(entry))
            elif action < 0.76 and it_is_clear:
                turns.append(self.define(entry, say.DEFINE_AGAIN))
            elif action < 0.9 and 1 < len(defined) <= len(say.ORDINALS):
                turns.append(self._about_nth(defined))
                it_is_clear = False
            else:
                entry, it_is_clear = self.next_entry(), True
                defined.append(entry)
                turns.append(self.define(entry))
        return turns

    def _about_nth(self, defined: list[Entry]) -> Turn:
        rng = self.rng
        n = rng.randrange(len(defined)) if rng.random() < 0.4 else 0
        make, templates = rng.choice(
            (
                (self.kind, say.KIND_OF_NTH),
                (self.synonym, say.SYNONYM_OF_NTH),
                (self.define, say.NTH_ONE),
            )
        )
        named = tuple(t.replace("{n}", say.ORDINALS[n]) for t in templates)
        return make(defined[n], named)

    def canonical_chain(self) -> list[Turn]:
        """Define, kind, synonym: the order in which most people ask."""
        entry = self.next_entry()
        follow_ups = [self.kind(entry), self.synonym(entry)]
        if self.rng.random() < 0.3:
            follow_ups.reverse()
        return [self.define(entry), *follow_ups]
