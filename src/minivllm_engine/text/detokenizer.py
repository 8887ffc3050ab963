"""Tokens to text as they come: whole characters only, reasoning apart, and no part of a stop string."""

import codecs
from collections.abc import Sequence

from minivllm_engine.text.tokenizer import Tokenizer


def opens_reasoning(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Tell whether the prompt ends inside a `<think>` block that the chat template has opened."""
    if tokenizer.think_ids is None:
        return False
    tail = list(prompt_ids[-8:])
    if tokenizer.think_ids[0] not in tail:
        return False
    after = tail[len(tail) - tail[::-1].index(tokenizer.think_ids[0]) :]
    return not any(tokenizer.token_text(i).strip() for i in after)


class StopStrings:
    """Finds the first stop string to be completed in a growing text, whatever pieces the text comes in.

    The text is what was generated, special tokens included, whether or not they are shown. A match never
    cuts an added token: a stop string `</th` does not tear a `</think>`.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self.atoms: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._stops)

    def add_atom(self, start: int, end: int) -> None:
        """Note that the characters `start` to `end` of the text are one added token."""
        if self._stops:
            self.atoms.append((start, end))

    def find(self, text: str, old_length: int) -> tuple[int, str] | None:
        """Return where the first match that ends beyond `old_length` starts, and which stop string it is."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, old_length - len(stop) + 1))
            while start >= 0 and (self._cuts(start) or self._cuts(start + len(stop))):
                start = text.find(stop, start + 1)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def num_held(self, text: str, released: int) -> int:
        """Return length of the longest end of `text` beyond `released` that may become a stop string."""
        for length in range(min(self._longest - 1, len(text) - released), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) and len(stop) > length for stop in self._stops) and (
                not self._cuts(len(text) - length)
            ):
                return length
        return 0

    def _cuts(self, at: int) -> bool:
        return any(start < at < end for start, end in self.atoms)


class IncrementalDetokenizer:
    """The text of one output, fed token by token.

    `text` and `reasoning` hold what may be shown; both only ever grow. What a character or a stop
    string may still change is held back. For a text without reasoning and stop strings the end result
    equals `Tokenizer.decode` of all ids.

    Args:
        tokenizer: of the model.
        stops: strings that end the answer; they are not looked for in reasoning.
        split_reasoning: tell reasoning between the think tokens from the answer.
        in_reasoning: the prompt has already opened the reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        split_reasoning: bool = False,
        in_reasoning: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = StopStrings(stops)
        self._think_ids = tokenizer.think_ids if split_reasoning else None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_reasoning = in_reasoning and self._think_ids is not None
        self._answer = ""  # as it was generated
        self._hidden: list[tuple[int, int]] = []  # parts of it that are special tokens
        self._released = 0  # of it, what no stop string can change any more
        self._shown = ""
        self._skip_space = False
        self._pending_space = ""
        self.reasoning: str | None = "" if self._in_reasoning else None
        self.num_reasoning_tokens = 0

    @property
    def text(self) -> str:
        return self._shown

    @property
    def in_reasoning(self) -> bool:
        """Does the next token belong to the reasoning, unless it closes it?"""
        return self._in_reasoning

    def push(self, token_id: int, *, look_for_stops: bool = True) -> str | None:
        """Take one more token. Returns the stop string that it completes, if any; nothing may follow."""
        if self._in_reasoning:
            self.num_reasoning_tokens += 1
        if self._turns_section(token_id):
            return None
        if self._tokenizer.is_special(token_id):
            return self._add_hidden(token_id, look_for_stops)
        is_added = self._tokenizer.is_added(token_id)
        # The bytes before an added token are complete or never will be.
        before = self._utf8.decode(b"", final=True) if is_added else ""
        piece = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        if self._in_reasoning:
            self._add_reasoning(before + piece)
            return None
        return self._add_answer(before, piece, is_added, look_for_stops)

    def finish(self, *, keep_partial_character: bool) -> None:
        """Release what was held back. A partial last character becomes U+FFFD, or is dropped."""
        rest = self._utf8.decode(b"", final=True)
        if keep_partial_character and rest:
            if self._in_reasoning:
                self._add_reasoning(rest)
            else:
                self._answer += rest
        self._release(len(self._answer))

    def _turns_section(self, token_id: int) -> bool:
        if self._think_ids is None:
            return False
        if self._in_reasoning and token_id == self._think_ids[1]:
            self._add_reasoning(self._utf8.decode(b"", final=True))
            self._in_reasoning, self._skip_space = False, True
            return True
        opens = token_id == self._think_ids[0] and self.reasoning is None
        if opens and not self._in_reasoning and not self._visible(0, len(self._answer)).strip():
            self._answer, self._released, self._shown = "", 0, ""
            self._hidden.clear()
            self._stop_strings.atoms.clear()
            self.reasoning, self._in_reasoning = "", True
            self.num_reasoning_tokens += 1
            return True
        return False

    def _add_reasoning(self, piece: str) -> None:
        # White space around the reasoning belongs to the template, not to the thought.
        text = self._pending_space + piece
        if not self.reasoning:
            text = text.lstrip()
        shown = text.rstrip()
        self._pending_space = text[len(shown) :]
        self.reasoning = (self.reasoning or "") + shown

    def _add_answer(
        self, before: str, piece: str, is_added: bool, look_for_stops: bool
    ) -> str | None:
        if self._skip_space:
            before = before.lstrip()
            piece = piece if before else piece.lstrip()
            if not before + piece:
                return None
            self._skip_space = False
        if is_added:
            start = len(self._answer) + len(before)
            self._stop_strings.add_atom(start, start + len(piece))
        return self._grow(before + piece, look_for_stops)

    def _add_hidden(self, token_id: int, look_for_stops: bool) -> str | None:
        """Take a special token: nobody sees it, but a stop string may be or contain it."""
        if self._in_reasoning or not self._stop_strings:
            return None
        text, start = self._tokenizer.token_text(token_id), len(self._answer)
        self._hidden.append((start, start + len(text)))
        self._stop_strings.add_atom(start, start + len(text))
        return self._grow(text, look_for_stops)

    def _grow(self, text: str, look_for_stops: bool) -> str | None:
        old_length = len(self._answer)
        self._answer += text
        match = self._stop_strings.find(self._answer, old_length) if look_for_stops else None
        if match is not None:
            self._answer = self._answer[: match[0]]
            self._release(match[0])
            return match[1]
        held = self._stop_strings.num_held(self._answer, self._released)
        self._release(len(self._answer) - held)
        return None

    def _release(self, end: int) -> None:
        self._shown += self._visible(self._released, end)
        self._released = end

    def _visible(self, start: int, end: int) -> str:
        text, at = "", start
        for low, high in self._hidden:
            if low >= start and high <= end:
                text += self._answer[at:low]
                at = high
        return text + self._answer[at:end]
