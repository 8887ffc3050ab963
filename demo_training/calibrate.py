"""Lean a trained checkpoint a little more towards refusing, by one row of its embedding.

    python -m demo_training.calibrate CHECKPOINT [--shift 1.5]

Training makes known words safe long before unknown ones, so the threshold between answering and
refusing is better a little on the refusing side. All refusals begin with the same token: its logit is
raised by about --shift where an answer begins, and left alone elsewhere. Entries and fresh invented
words are looked at for this, the held-out words are not.
"""

import argparse
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import shape
from .dialogue import Conversation, WordTalk
from .entries import Dictionary, load_entries, refusal
from .export import export_weights, read_weights
from .mix import Mix
from .model import DemoModel
from .packing import ChatEncoder, fill_rows, pack

ROW_LENGTH = 512
ROWS = 48  # of each kind of conversation
RIDGE = 10.0


def questions(talk: WordTalk) -> Iterator[Conversation]:
    while True:
        yield Conversation((talk.define(talk.next_entry()),))
        yield talk.unknown()


@torch.inference_mode()
def hidden_states(
    model: DemoModel, encode: ChatEncoder, conversations: Iterator[Conversation]
) -> tuple[Tensor, Tensor]:
    """Final hidden states where the model speaks, and whether an answer begins there."""
    newlines = torch.tensor([*encode.text("\n"), *encode.text("\n\n")])
    states, begins = [], []
    for row in islice(fill_rows(map(encode, conversations), ROW_LENGTH), ROWS):
        batch = pack([row], ROW_LENGTH)
        states.append(model(batch.tokens, batch.docs)[0][batch.where])
        begins.append(torch.isin(batch.tokens[0][batch.where], newlines))
    return torch.cat(states), torch.cat(begins)


def row_change(states: Tensor, begins: Tensor, shift: float) -> Tensor:
    """The smallest change whose product with a state is the shift at beginnings, else zero."""
    target = torch.where(begins, shift, 0.0)
    weight = torch.where(begins, 1.0, begins.sum() / (~begins).sum()).unsqueeze(1)
    gram = states.T @ (weight * states) + RIDGE * torch.eye(states.shape[1])
    return torch.linalg.solve(gram, states.T @ (weight.squeeze(1) * target))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--shift", type=float, default=1.5)
    args = parser.parse_args()
    model = DemoModel(shape.TEXT_CONFIG)
    model.load_state_dict(read_weights(args.checkpoint))
    encode = ChatEncoder(Tokenizer.from_file(str(args.checkpoint / "tokenizer.json")))
    dictionary = Dictionary(load_entries())
    asked = hidden_states(model, encode, questions(WordTalk(dictionary, random.Random(80))))
    mixed = hidden_states(model, encode, Mix(dictionary, 81).short(ROW_LENGTH))
    states, begins = torch.cat((asked[0], mixed[0])), torch.cat((asked[1], mixed[1]))
    change = row_change(states, begins, args.shift)
    got = states @ change
    print(f"raised by {got[begins].mean():.2f} +- {got[begins].std():.2f} at beginnings")
    print(f"and by {got[~begins].mean():.2f} +- {got[~begins].std():.2f} elsewhere")
    token = encode.text(refusal("x"))[0]
    with torch.no_grad():
        row = model.embed_tokens.weight[token]
        print(f"the row's norm is {row.norm():.2f}, the change's {change.norm():.2f}")
        row += change
    export_weights(model, args.checkpoint)


if __name__ == "__main__":
    main()
