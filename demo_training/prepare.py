"""Write everything of the checkpoint but trained weights: tokenizer, configs, template, notice.

    python -m demo_training.prepare OUT_DIR [--random-weights]

The tokenizer is a byte-level BPE of 2,048 tokens, trained on a sample of the training mix.
"""

import argparse
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from . import shape
from .dialogue import Conversation
from .entries import Dictionary, load_entries
from .mix import Mix

HERE = Path(__file__).parent
SAMPLE_CONVERSATIONS = 60_000
QWEN3_5_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NOTICE_HEAD = """\
The demo model was trained on word definitions, hypernyms and synonyms from WordNet 3.0, and
reproduces them. WordNet is used under the following licence, which must accompany the model and
everything derived from it.

"""


def texts(conversations: Iterator[Conversation]) -> Iterator[str]:
    for conversation in conversations:
        if conversation.system:
            yield f"system\n{conversation.system}"
        for turn in conversation.turns:
            yield f"user\n{turn.user}"
            yield f"assistant\n{turn.answer}"
            if conversation.thinking:
                yield f"\n{turn.thought}\n"


def train_tokenizer(sample: Iterator[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN3_5_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=shape.VOCAB_SIZE - len(shape.SPECIAL_TOKENS + shape.THINK_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in shape.SPECIAL_TOKENS])
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t in shape.THINK_TOKENS]
    )
    assert tokenizer.token_to_id("<|im_end|>") == shape.IM_END
    assert tokenizer.get_vocab_size() == shape.VOCAB_SIZE
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--random-weights", action="store_true", help="untrained, for tests")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    mix = Mix(Dictionary(load_entries()), seed=0)
    train_tokenizer(texts(islice(mix.short(256), SAMPLE_CONVERSATIONS))).save(
        str(args.out / "tokenizer.json")
    )
    shape.write_json(args.out / "config.json", shape.CONFIG)
    shape.write_json(args.out / "generation_config.json", shape.GENERATION_CONFIG)
    shape.write_json(args.out / "tokenizer_config.json", shape.TOKENIZER_CONFIG)
    shutil.copy(HERE / "chat_template.jinja", args.out)
    licence = (HERE / "WORDNET_LICENSE.txt").read_text(encoding="utf-8")
    (args.out / "NOTICE").write_text(NOTICE_HEAD + licence, encoding="utf-8")
    if args.random_weights:
        from .export import export_weights  # needs torch
        from .model import DemoModel

        export_weights(DemoModel(shape.TEXT_CONFIG), args.out)


if __name__ == "__main__":
    main()
