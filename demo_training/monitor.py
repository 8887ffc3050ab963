"""Exact-match shares during training: teacher-forced, on fixed samples, in a second or less."""

import itertools

import torch
from torch import Tensor

from . import checks
from .dialogue import Conversation, Turn
from .entries import Dictionary
from .model import DemoModel
from .packing import ChatEncoder, Packed, fill_rows, pack
from .step import trained_logits

ROW_LENGTH = 1280
SAMPLE = 500


class Monitor:
    def __init__(self, dictionary: Dictionary, encode: ChatEncoder, device: torch.device) -> None:
        self.batches: dict[str, Packed] = {}
        recall = checks.RecallChecks(dictionary)
        samples = [
            checks.define(dictionary.entries[:: len(dictionary.entries) // SAMPLE]),
            checks.define_untrained(dictionary.entries[7 :: len(dictionary.entries) // SAMPLE]),
            checks.chains(dictionary.entries[11 :: len(dictionary.entries) // SAMPLE]),
            checks.unknown(dictionary)[::2],
            [*recall.pairs(4, 200)],
            [*recall.pairs(16, 200)],
            [*recall.distance(512, 100)],
            [*recall.overwrite(100)],
            [*recall.lists(100)],
            [*recall.varied(150)],
        ]
        for sample in samples:
            rows = list(fill_rows((encode(conversation(check)) for check in sample), ROW_LENGTH))
            batch = pack(rows, ROW_LENGTH)
            self.batches[sample[0].kind] = Packed(*(t.to(device) for t in batch))

    def exact_shares(self, model: DemoModel) -> dict[str, float]:
        """The share of conversations in which every trained token is the most likely one."""
        return {kind: round(exact_share(model, batch), 4) for kind, batch in self.batches.items()}


def conversation(check: checks.Check) -> Conversation:
    answers = (answer or "" for answer in check.expected)
    return Conversation(tuple(map(Turn, check.users, answers, itertools.repeat(""))))


@torch.no_grad()
def exact_share(model: DemoModel, batch: Packed) -> float:
    with torch.compiler.set_stance("force_eager"):
        wrong = trained_logits(model, batch).argmax(-1) != batch.targets
    rows: Tensor = batch.where // batch.docs.shape[1]
    numbers = rows * 1000 + batch.docs.flatten()[batch.where]  # one for each conversation
    return 1 - len(torch.unique(numbers[wrong])) / len(torch.unique(numbers))
