"""Facts that exist only in the conversation: numbers, names, codes, lists, made fresh each time."""

import random
from collections.abc import Callable

from . import phrasings as say
from . import smalltalk as talk
from .dialogue import Conversation, Turn, WordTalk

ANSWER_WEIGHT = 3  # the few tokens that carry the recalled value count more in the loss
NOTED = "Noted."
NOT_TOLD = "You have not told me."
CHARS_PER_TOKEN = 3.0


def number(rng: random.Random) -> str:
    digits = rng.choice((1, 2, 2, 3, 3, 3, 4))
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


class RecallTalk:
    """Makes conversations that can only be answered from their own text."""

    def __init__(self, words: WordTalk, rng: random.Random) -> None:
        self.words = words
        self.rng = rng

    def conversation(self, max_tokens: int) -> Conversation:
        """About as long as fits into max_tokens where the task can be stretched to it."""
        makers: tuple[Callable[[int], list[Turn]], ...] = (self._pairs, self._facts, self._lists)
        lists = 0.15 if max_tokens < 256 else 0.03  # lists cannot be stretched
        make = self.rng.choices(makers, (0.6, 0.25, lists))[0]
        return Conversation(tuple(make(int(max_tokens * CHARS_PER_TOKEN))))

    # Pairs of a word and a number.

    def _pairs(self, max_chars: int) -> list[Turn]:
        rng = self.rng
        numbers = {self._key(): number(rng) for _ in range(self._pair_count(max_chars))}
        form, separator = rng.choice(say.PAIR), rng.choice(say.PAIR_SEPARATORS)
        items = [form.format(k=key, v=value) for key, value in numbers.items()]
        text = rng.choice(say.LEAD_IN) + separator.join(items)
        room = max_chars - len(text) - 250
        if room > 200 and rng.random() < 0.5:
            text, room = self._buried(text, rng.randint(150, room)), 0
        if rng.random() < 0.5:
            query = self._query(numbers, say.QUERY)
            joint = rng.choice((" ", "\n", ". "))
            turns = [Turn(text + joint + query.user, query.answer, query.thought, query.weight)]
        else:
            turns = [Turn(text, NOTED, "The user gives me numbers to remember.")]
            if room > 200:
                turns += self._other_turns(rng.randint(100, room))
            turns.append(self._query(numbers, say.QUERY))
        for _ in range(rng.randint(0, 5)):
            turns += self._next_move(numbers)
        return turns

    def _pair_count(self, max_chars: int) -> int:
        most = max(2, min(32, max_chars // 25 - 6))
        return self.rng.choice((self.rng.randint(1, min(8, most)), self.rng.randint(2, most)))

    def _key(self) -> str:
        chance, rng = self.rng.random(), self.rng
        if chance < 0.75:
            return rng.choice(self.words.dictionary.entries).word
        if chance < 0.88:
            return self.words.dictionary.unknown_word(rng)
        return rng.choice(talk.FIRST_NAMES)

    def _query(self, numbers: dict[str, str], templates: tuple[str, ...]) -> Turn:
        rng = self.rng
        if rng.random() < 0.06:
            key = self._key()
            if key not in numbers:
                user = rng.choice(say.QUERY[:4]).format(k=key)
                answer = f"I have no number for {key}."
                return Turn(user, answer, f"The user asks for the number of {key}.")
        key = rng.choice(list(numbers))
        user = rng.choice(templates).format(k=key)
        thought = f"The user asks for the number of {key}."
        return Turn(user, f"{numbers[key]}.", thought, ANSWER_WEIGHT)

    def _next_move(self, numbers: dict[str, str]) -> list[Turn]:
        """One more query, or a change that the queries after it must respect."""
        rng, chance = self.rng, self.rng.random()
        if chance < 0.55:
            return [self._query(numbers, rng.choice((say.QUERY, say.NEXT_QUERY)))]
        if chance < 0.6:
            return self._other_turns(60)
        key = rng.choice(list(numbers)) if chance < 0.85 else self._key()
        templates = say.OVERWRITE if key in numbers else say.ADD
        numbers[key] = number(rng)
        user = rng.choice(templates).format(k=key, v=numbers[key])
        change = Turn(user, NOTED, f"The user gives me a number for {key}.")
        if rng.random() < 0.5:
            return [change]
        changed_only = {key: numbers[key]} if rng.random() < 0.5 else numbers
        return [change, self._query(changed_only, say.QUERY)]

    # Distance: other text in the same message, or other turns.

    def prose(self, chars: int) -> str:
        parts: list[str] = []
        while chars > 0:
            parts.append(self.words.next_entry().definition)
            chars -= len(parts[-1]) + 1
        return " ".join(parts)

    def _buried(self, text: str, chars: int) -> str:
        before = self.rng.choice((0, 0, chars // 2, chars))
        joint = self.rng.choice((" ", "\n", "\n\n"))
        parts = (self.prose(before), text.strip(), self.prose(chars - before))
        return joint.join(part for part in parts if part)

    def _other_turns(self, chars: int) -> list[Turn]:
        turns: list[Turn] = []
        while chars > 0:
            length = self.rng.choice((1, 1, 2, 3))
            more = self.words.chain(length) if self.rng.random() < 0.92 else [self._small_talk()]
            turns += more
            chars -= sum(len(turn.user) + len(turn.answer) + 25 for turn in more)
        return turns

    def _small_talk(self) -> Turn:
        answer, prompts = self.rng.choice(talk.FIXED)
        return Turn(self.rng.choice(prompts), answer, "The user makes small talk.")

    # Facts about the user, and codes.

    def _facts(self, max_chars: int) -> list[Turn]:
        rng = self.rng
        told: dict[str, str] = {}
        turns: list[Turn] = []
        for subject in rng.sample(list(self._subjects()), rng.choice((1, 1, 2, 3))):
            turns.append(self._tell(subject, told))
            if rng.random() < 0.2:
                turns += self._other_turns(60)
        room = max_chars - sum(len(t.user) + len(t.answer) + 25 for t in turns) - 200
        if room > 60 and rng.random() < 0.8:
            turns += self._other_turns(rng.randint(50, room))
        if rng.random() < 0.25:
            turns.append(self._tell(rng.choice(list(told)), told, again=True))
        asked = list(told)
        if rng.random() < 0.15:
            asked += rng.sample(list(self._subjects()), 1)
        rng.shuffle(asked)
        return turns + [self._ask(subject, told) for subject in asked]

    def _subjects(self) -> dict[str, Callable[[], str]]:
        """What can be told, and what its value looks like; "my" marks facts about the user."""
        rng, entries = self.rng, self.words.dictionary.entries

        def word() -> str:
            return rng.choice(entries).word

        return {
            "my name": lambda: self._name(),
            "my favourite colour": lambda: rng.choice(talk.COLOURS),
            "my favourite animal": lambda: rng.choice((*talk.ANIMALS, word())),
            "my favourite food": lambda: rng.choice((*talk.FOODS, word())),
            "my favourite word": word,
            "my favourite number": lambda: number(rng),
            "my city": lambda: rng.choice(talk.CITIES),
            "my age": lambda: str(rng.randrange(5, 100)),
            "my dog's name": lambda: self._name(),
            "the code": lambda: number(rng),
            "the password": lambda: rng.choice((word(), number(rng))),
            "the secret word": word,
            "the room number": lambda: number(rng),
            "the magic number": lambda: number(rng),
        }

    def _name(self) -> str:
        if self.rng.random() < 0.8:
            return self.rng.choice(talk.FIRST_NAMES)
        return self.words.dictionary.unknown_word(self.rng).capitalize()

    def _tell(self, subject: str, told: dict[str, str], again: bool = False) -> Turn:
        rng = self.rng
        told[subject] = value = self._subjects()[subject]()
        owner, what = subject.split(" ", 1)
        templates: tuple[str, ...] = say.FACT_NOW if again else say.FACT
        if owner == "my":
            templates = say.OWN_FACT_NOW if again else say.OWN_FACT
        answer = NOTED
        if subject == "my name":
            templates = templates if again else say.INTRODUCE
            answer = f"Nice to meet you, {value}."
        user = rng.choice(templates).format(x=what, v=value)
        return Turn(user, answer, f"The user tells me {subject.replace('my ', 'their ')}.")

    def _ask(self, subject: str, told: dict[str, str]) -> Turn:
        owner, what = subject.split(" ", 1)
        templates = say.OWN_ASK if owner == "my" else say.ASK
        user = self.rng.choice(templates).format(x=what)
        thought = f"The user asks for {subject.replace('my ', 'their ')}."
        if subject not in told:
            return Turn(user, NOT_TOLD, thought)
        whose = "Your" if owner == "my" else "The"
        return Turn(user, f"{whose} {what} is {told[subject]}.", thought, ANSWER_WEIGHT)

    # Lists to repeat or to reverse.

    def _lists(self, max_chars: int) -> list[Turn]:
        return [
            self._list_turn() for _ in range(self.rng.randint(1, max(1, min(3, max_chars // 250))))
        ]

    def _list_turn(self) -> Turn:
        rng = self.rng
        items = [self._key() for _ in range(rng.randint(3, 8))]
        if rng.random() < 0.2:
            items = [number(rng) for _ in items]
        separator = rng.choice((", ", ", ", " "))
        text = separator.join(items)
        if rng.random() < 0.5:
            user = rng.choice(say.REPEAT).format(x=text)
            return Turn(user, text, "The user wants the list repeated.", ANSWER_WEIGHT)
        user = rng.choice(say.REVERSE).format(x=text)
        answer = separator.join(reversed(items))
        return Turn(user, answer, "The user wants the list reversed.", ANSWER_WEIGHT)
