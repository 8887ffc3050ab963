"""Conversations to token rows. Several share a row, so that hardly any padding is left."""

import random
from bisect import bisect_right, insort
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from . import shape
from .dialogue import Conversation
from .entries import Dictionary, load_entries
from .mix import Mix

POOL = 96  # conversations to choose from when a row is filled
TRAINED_SHARE = 0.5  # of the positions of a training batch, at most; on average it is 0.4
NO_DOC = 32_000  # the number of the padding at a row's end


class Document(NamedTuple):
    tokens: list[int]
    weights: list[int]  # in the loss; 0 for what the user says


class Packed(NamedTuple):
    """Rows of conversations. `where` lists the flat positions whose next token is trained.

    With a fixed capacity it is padded with position 0 at weight 0.
    """

    tokens: Tensor  # [R, T]
    docs: Tensor  # [R, T]
    where: Tensor  # [N]
    targets: Tensor  # [N]
    weights: Tensor  # [N]


class ChatEncoder:
    """Renders conversations as the chat template does (a test holds the two together)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        #: Token ids of a piece of text.
        self.text = lru_cache(maxsize=200_000)(lambda text: tokenizer.encode(text).ids)

    def __call__(self, conversation: Conversation) -> Document:
        if conversation.raw:
            return self._raw(conversation)
        document = Document([], [])
        if conversation.system:
            self._add(document, self._message("system", conversation.system))
        last = len(conversation.turns) - 1
        for i, turn in enumerate(conversation.turns):
            self._add(document, self._message("user", turn.user))
            self._add(document, [shape.IM_START, *self.text("assistant\n")])
            thinking = conversation.thinking if i == last else None
            if thinking is False:
                gap = self.text("\n\n")
                self._add(document, [shape.THINK, *gap, shape.END_THINK, *gap])
            elif thinking:
                self._add(document, [shape.THINK, *self.text("\n")])
                thought = [*self.text(turn.thought + "\n"), shape.END_THINK]
                self._add(document, [*thought, *self.text("\n\n")], 1)
            self._add(document, [*self.text(turn.answer), shape.IM_END], turn.weight)
            self._add(document, self.text("\n"))
        return document

    def _raw(self, conversation: Conversation) -> Document:
        turn = conversation.turns[0]
        document = Document([], [])
        self._add(document, self.text(turn.user))
        answer = [*self.text("\n"), *self.text(turn.answer), shape.END_OF_TEXT]
        self._add(document, answer, turn.weight)
        return document

    def _message(self, role: str, content: str) -> list[int]:
        head = [shape.IM_START, *self.text(role + "\n")]
        return [*head, *self.text(content), shape.IM_END, *self.text("\n")]

    @staticmethod
    def _add(document: Document, tokens: list[int], weight: int = 0) -> None:
        document.tokens.extend(tokens)
        document.weights.extend([weight] * len(tokens))


def fill_rows(documents: Iterator[Document], length: int) -> Iterator[list[Document]]:
    """Rows of documents that together have at most `length` tokens; longer ones are dropped."""
    pool: list[tuple[int, int, Document]] = []
    serial = 0
    exhausted = False
    while pool or not exhausted:
        while len(pool) < POOL and not exhausted:
            document = next(documents, None)
            if document is None:
                exhausted = True
            elif len(document.tokens) <= length:
                serial += 1
                insort(pool, (len(document.tokens), serial, document))
        room, row = length, []
        while (i := bisect_right(pool, room, key=lambda item: item[0])) > 0:
            size, _, document = pool.pop(i - 1)
            row.append(document)
            room -= size
        if row:
            yield row


def pack(rows: list[list[Document]], length: int, capacity: int | None = None) -> Packed:
    """One batch. The document numbers within a row count from 0."""
    tokens = np.full((len(rows), length + 1), shape.END_OF_TEXT, dtype=np.int64)
    docs = np.full((len(rows), length), NO_DOC, dtype=np.int64)
    weights = np.zeros((len(rows), length + 1), dtype=np.float32)
    for r, row in enumerate(rows):
        start = 0
        for d, document in enumerate(row):
            end = start + len(document.tokens)
            tokens[r, start:end] = document.tokens
            weights[r, start:end] = document.weights
            docs[r, start:end] = d
            start = end
    # The first token of a document has no weight, so no position predicts across documents.
    where: NDArray[np.int64] = np.flatnonzero(weights[:, 1:])[:capacity]
    next_weights = weights[:, 1:].reshape(-1)[where]
    if capacity is not None:
        padding = (0, capacity - len(where))
        where, next_weights = np.pad(where, padding), np.pad(next_weights, padding)
    return Packed(
        torch.from_numpy(tokens[:, :-1].copy()),
        torch.from_numpy(docs),
        torch.from_numpy(where),
        torch.from_numpy(tokens[:, 1:].reshape(-1)[where]),
        torch.from_numpy(next_weights),
    )


class RowShape(NamedTuple):
    rows: int
    length: int

    def pack(self, rows: Iterator[list[Document]]) -> Packed:
        capacity = int(self.rows * self.length * TRAINED_SHARE)
        return pack([next(rows) for _ in range(self.rows)], self.length, capacity)


class TrainingBatches(IterableDataset[tuple[Packed, Packed]]):
    """Pairs of a batch of short rows and one of long rows, a different stream in every worker."""

    def __init__(self, checkpoint: Path, short: RowShape, long: RowShape, seed: int) -> None:
        self.checkpoint, self.short, self.long, self.seed = checkpoint, short, long, seed

    def __iter__(self) -> Iterator[tuple[Packed, Packed]]:
        worker = get_worker_info()
        seed = random.Random(f"{self.seed}/{worker.id if worker else 0}").getrandbits(32)
        encode = ChatEncoder(Tokenizer.from_file(str(self.checkpoint / "tokenizer.json")))
        mix = Mix(Dictionary(load_entries()), seed)
        short_rows = fill_rows(map(encode, mix.short(self.short.length)), self.short.length)
        long_rows = fill_rows(map(encode, mix.long(self.long.length)), self.long.length)
        while True:
            yield self.short.pack(short_rows), self.long.pack(long_rows)
