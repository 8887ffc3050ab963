"""What the demo model must answer: questions with their expected answers, and the scoring.

A check is a list of user messages with the expected answer to each. The model is asked one after
the other, with its own answers as the history. Used by the evaluations and by the tests.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import phrasings as say
from . import smalltalk as talk
from .dialogue import WordTalk
from .entries import Dictionary, Entry, refusal
from .recall import NOTED, RecallTalk

Message = dict[str, str]
CHARS_PER_TOKEN = 3.3  # a little more than on average, so distances are at least as named
FIRST_WORDS_OF_REFUSAL = "I don't know the word"


@dataclass(frozen=True)
class Check:
    kind: str
    users: tuple[str, ...]
    expected: tuple[str | None, ...]  # None: not scored
    system: str | None = None
    thinking: bool | None = None

    def as_record(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": text} for text in self.users]
        return {"kind": self.kind, "messages": messages, "expected": list(self.expected)}


@dataclass(frozen=True)
class Request:
    messages: list[Message]
    thinking: bool | None


Answerer = Callable[[list[Request]], list[str]]


def define(entries: Sequence[Entry], kind: str = "define", **settings: Any) -> list[Check]:
    template = say.DEFINE[0]
    return [Check(kind, (template.format(w=e.word),), (e.definition,), **settings) for e in entries]


def define_untrained(entries: Sequence[Entry]) -> list[Check]:
    templates = say.DEFINE_UNTRAINED
    return [
        Check(
            "define_untrained", (templates[i % len(templates)].format(w=e.word),), (e.definition,)
        )
        for i, e in enumerate(entries)
    ]


def define_any(dictionary: Dictionary, count: int) -> list[Check]:
    """Any trained phrasing, with capitals and missing punctuation."""
    talker = WordTalk(dictionary, random.Random(20))
    turns = (talker.define(talker.next_entry()) for _ in range(count))
    return [Check("define_any_phrasing", (turn.user,), (turn.answer,)) for turn in turns]


def chains(entries: Sequence[Entry]) -> list[Check]:
    return [
        Check(
            "chain",
            (say.DEFINE[0].format(w=e.word), say.KIND_OF_IT[0], say.SYNONYM_OF_IT[0]),
            (e.definition, e.kind, e.synonym),
        )
        for e in entries
    ]


def unknown(dictionary: Dictionary) -> list[Check]:
    template = say.DEFINE[0]
    return [Check("unknown", (template.format(w=w),), (refusal(w),)) for w in dictionary.held_out]


def small_talk() -> list[Check]:
    return [Check("small_talk", (p,), (a,)) for a, prompts in talk.FIXED for p in prompts]


class RecallChecks:
    """Facts that are in the prompt and nowhere else."""

    def __init__(self, dictionary: Dictionary, seed: int = 30) -> None:
        self.rng = random.Random(seed)
        self.words = [entry.word for entry in dictionary.entries]
        self.talker = RecallTalk(WordTalk(dictionary, self.rng), self.rng)

    def _numbers(self, count: int) -> dict[str, str]:
        keys = self.rng.sample(self.words, count)
        return {key: str(self.rng.randrange(10, 1000)) for key in keys}

    @staticmethod
    def _told(numbers: dict[str, str]) -> str:
        return "Remember: " + ", ".join(f"{k} = {v}" for k, v in numbers.items()) + "."

    def pairs(self, pairs: int, count: int) -> Iterator[Check]:
        for _ in range(count):
            numbers = self._numbers(pairs)
            key = self.rng.choice(list(numbers))
            text = f"{self._told(numbers)} What number is {key}?"
            yield Check(f"recall_{pairs}_pairs", (text,), (f"{numbers[key]}.",))

    def distance(self, tokens: int, count: int) -> Iterator[Check]:
        for _ in range(count):
            numbers = self._numbers(4)
            key = self.rng.choice(list(numbers))
            prose = self.talker.prose(int(tokens * CHARS_PER_TOKEN))
            text = f"{self._told(numbers)}\n{prose}\nWhat number is {key}?"
            yield Check(f"recall_distance_{tokens}", (text,), (f"{numbers[key]}.",))

    def overwrite(self, count: int) -> Iterator[Check]:
        for _ in range(count):
            numbers = self._numbers(8)
            key = self.rng.choice(list(numbers))
            ask, new = f"What number is {key}?", str(self.rng.randrange(10, 1000))
            yield Check(
                "recall_overwrite",
                (f"{self._told(numbers)} {ask}", f"{key} = {new} now.", ask),
                (f"{numbers[key]}.", NOTED, f"{new}."),
            )

    def code_after_turns(self, count: int) -> Iterator[Check]:
        for i in range(count):
            code = str(self.rng.randrange(100, 10000))
            others = self.talker.words.chain(1 + i % 8)
            yield Check(
                "recall_code_after_turns",
                (f"The code is {code}.", *(t.user for t in others), "What is the code?"),
                (None, *(None for _ in others), f"The code is {code}."),
            )

    def lists(self, count: int) -> Iterator[Check]:
        for i in range(count):
            items = self.rng.sample(self.words, 3 + i % 6)
            text = ", ".join(items)
            if i % 2:
                yield Check("repeat_list", (f"Repeat: {text}",), (text,))
            else:
                yield Check("reverse_list", (f"Reverse: {text}",), (", ".join(items[::-1]),))

    def varied(self, count: int) -> Iterator[Check]:
        """The forms of training, with fresh content."""
        for i in range(count):
            turns = self.talker.conversation(80 + 40 * (i % 16)).turns
            yield Check(
                "recall_varied", tuple(t.user for t in turns), tuple(t.answer for t in turns)
            )


def all_checks(dictionary: Dictionary, sample: int | None = None) -> list[Check]:
    """Everything that is measured; `sample` limits the checks that go through all entries."""
    entries = list(dictionary.entries)
    random.Random(40).shuffle(entries)
    few, recall = entries[:500], RecallChecks(dictionary)
    return [
        *define(entries[:sample]),
        *define_untrained(entries[:sample]),
        *define_any(dictionary, 2000),
        *chains(entries[: min(4000, sample or 4000)]),
        *(check for pairs in (4, 8, 16, 32) for check in recall.pairs(pairs, 500)),
        *(check for tokens in (128, 256, 512, 1024) for check in recall.distance(tokens, 250)),
        *recall.overwrite(500),
        *recall.code_after_turns(400),
        *sorted(recall.lists(400), key=lambda check: check.kind),
        *recall.varied(500),
        *unknown(dictionary),
        *small_talk(),
        *define(few, "define_no_think", thinking=False),
        *define(few, "define_think", thinking=True),
        *define(few, "define_system_prompt", system=say.SYSTEM[0]),
    ]


def fixture_checks(dictionary: Dictionary) -> list[Check]:
    """The sample that the tests run."""
    entries = list(dictionary.entries)
    random.Random(50).shuffle(entries)
    recall = RecallChecks(dictionary, seed=60)
    held_out = unknown(dictionary)
    return [
        *define(entries[:400]),
        *define_untrained(entries[400:500]),
        *chains(entries[500:560]),
        *(check for pairs in (4, 8, 16) for check in recall.pairs(pairs, 15)),
        *(check for tokens in (256, 512) for check in recall.distance(tokens, 10)),
        *recall.overwrite(15),
        *recall.code_after_turns(10),
        *recall.lists(10),
        *random.Random(70).sample(held_out, 100),
    ]


def ask_by_kind(checks: Sequence[Check], answer: Answerer) -> list[list[str]]:
    """The model's answers; the progress is printed after each kind."""
    answers: list[list[str]] = []
    for kind, group in itertools.groupby(checks, lambda check: check.kind):
        of_kind, started = list(group), time.time()
        answers += ask_all(of_kind, answer)
        print(f"{kind}: {len(of_kind):,} checks, {time.time() - started:.0f} s", flush=True)
    return answers


def ask_all(checks: Sequence[Check], answer: Answerer) -> list[list[str]]:
    """The model's answers, turn by turn, each turn of all checks in one call."""
    answers: list[list[str]] = [[] for _ in checks]
    for turn in range(max(len(check.users) for check in checks)):
        open_checks = [i for i, check in enumerate(checks) if len(check.users) > turn]
        requests = [_request(checks[i], answers[i]) for i in open_checks]
        for i, text in zip(open_checks, answer(requests), strict=True):
            answers[i].append(text)
    return answers


def _request(check: Check, answers: list[str]) -> Request:
    messages: list[Message] = []
    if check.system:
        messages.append({"role": "system", "content": check.system})
    for user, text in zip(check.users, answers, strict=False):
        messages.append({"role": "user", "content": user})
        messages.append({"role": "assistant", "content": text})
    messages.append({"role": "user", "content": check.users[len(answers)]})
    return Request(messages, check.thinking)


def score(checks: Sequence[Check], answers: list[list[str]]) -> dict[str, tuple[int, int]]:
    """(exact, all) for each kind, in the order of the checks; chains are counted by turn."""
    counts: dict[str, tuple[int, int]] = {}
    for check, texts in zip(checks, answers, strict=True):
        for turn, (text, expected) in enumerate(zip(texts, check.expected, strict=True), 1):
            if expected is not None:
                name = f"chain_turn_{turn}" if check.kind == "chain" else check.kind
                exact, total = counts.get(name, (0, 0))
                counts[name] = (exact + (text == expected), total + 1)
        if check.kind == "define":
            refused, total = counts.get("define_refused", (0, 0))
            counts["define_refused"] = (
                refused + texts[0].startswith(FIRST_WORDS_OF_REFUSAL),
                total + 1,
            )
    return counts
