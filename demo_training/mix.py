"""The training mix: which conversations, in which shares, with which trimmings."""

import random
from collections.abc import Iterator
from dataclasses import replace

from . import phrasings as say
from . import smalltalk as talk
from .dialogue import Conversation, Turn, WordTalk, ask
from .entries import Dictionary, with_article
from .recall import RecallTalk

# Chances of a conversation, not shares of tokens: chains and recall are several times longer.
SHORT_MIX = {
    "define": 0.40,
    "chain": 0.14,
    "direct": 0.08,
    "recall": 0.10,
    "unknown": 0.23,
    "small_talk": 0.05,
}


class Mix:
    """An endless source of conversations for one worker."""

    def __init__(self, dictionary: Dictionary, seed: int) -> None:
        self.rng = random.Random(seed)
        self.defines = WordTalk(dictionary, self.rng)
        self.chains = WordTalk(dictionary, self.rng)
        self.directs = WordTalk(dictionary, self.rng)
        self.recalls = RecallTalk(WordTalk(dictionary, self.rng), self.rng)

    def short(self, max_tokens: int) -> Iterator[Conversation]:
        """Mostly single questions; recall is kept within max_tokens."""
        kinds, chances = list(SHORT_MIX), list(SHORT_MIX.values())
        while True:
            kind = self.rng.choices(kinds, chances)[0]
            yield self._trimmed(self._one(kind, max_tokens))

    def long(self, max_tokens: int) -> Iterator[Conversation]:
        """Recall at a distance, of any length up to max_tokens."""
        while True:
            length = int(max_tokens ** self.rng.uniform(0.7, 1.0))
            yield self._trimmed(self.recalls.conversation(length - 40))

    def _one(self, kind: str, max_tokens: int) -> Conversation:
        rng = self.rng
        if kind == "define":
            return Conversation((self.defines.define(self.defines.next_entry()),))
        if kind == "chain":
            if rng.random() < 0.6:
                return Conversation(tuple(self.chains.canonical_chain()))
            return Conversation(tuple(self.chains.chain(rng.randint(2, 5))))
        if kind == "direct":
            entry = self.directs.next_entry()
            return Conversation(
                (self.directs.kind(entry, say.KIND), self.directs.synonym(entry, say.SYNONYM))
                if rng.random() < 0.5
                else (self.directs.synonym(entry, say.SYNONYM), self.directs.kind(entry, say.KIND))
            )
        if kind == "recall":
            return self.recalls.conversation(rng.randint(40, max_tokens - 40))
        if kind == "unknown":
            return self.defines.unknown()
        return Conversation(tuple(self._small_talk() for _ in range(rng.choice((1, 1, 2)))))

    def _small_talk(self) -> Turn:
        rng = self.rng
        if rng.random() < 0.5:
            answer, prompts = rng.choice(talk.FIXED)
            return Turn(rng.choice(prompts), answer, "The user makes small talk.")
        word, other = (rng.choice(self.defines.dictionary.entries).word for _ in range(2))
        templates = tuple(
            t.replace("{a}", with_article(word)).replace("{v}", other)
            for t in talk.OUT_OF_SCOPE_ABOUT
        )
        user = ask(rng, templates, word, noun=False)
        return Turn(user, talk.OUT_OF_SCOPE, "The user wants something that I cannot do.")

    def _trimmed(self, conversation: Conversation) -> Conversation:
        """With a system prompt, a think block or no chat template now and then."""
        rng = self.rng
        if len(conversation.turns) == 1 and rng.random() < 0.04:
            return replace(conversation, raw=True)
        return replace(
            conversation,
            system=rng.choice(say.SYSTEM) if rng.random() < 0.08 else None,
            thinking=rng.choices((None, False, True), (0.85, 0.1, 0.05))[0],
        )
