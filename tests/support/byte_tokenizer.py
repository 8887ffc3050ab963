"""A tokenizer with one token a byte, so that every character of more than one byte is split."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from minivllm_engine.text.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>")

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is true %}<think>\n{% endif %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The stand-in characters of the 256 bytes, in the order of the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def byte_backend() -> tokenizers.Tokenizer:
    """Ids 0 to 255 are the bytes; then SPECIAL, then ADDED."""
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in SPECIAL])
    backend.add_tokens([tokenizers.AddedToken(t, special=False, normalized=False) for t in ADDED])
    return backend


def byte_tokenizer() -> Tokenizer:
    return Tokenizer(byte_backend(), {"eos_token": "<|im_end|>"}, CHAT_TEMPLATE)


def write_byte_tokenizer(path: Path) -> None:
    """Write the tokenizer's files into a checkpoint's directory."""
    byte_backend().save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "Qwen2Tokenizer"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
