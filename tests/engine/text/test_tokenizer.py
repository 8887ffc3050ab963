"""Encoding, decoding, chat templates, and the errors of broken tokenizer files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minivllm_engine.checkpoint.index import resolve_model
from minivllm_engine.core.errors import CheckpointError, RequestError
from minivllm_engine.text.tokenizer import Tokenizer
from support.byte_tokenizer import byte_tokenizer, write_byte_tokenizer

MIXED = "Hello, naïve café! 中文 मानक हिन्दी עברית 🙂👨‍👩‍👧 1234 \t\n x=1; <think> \u0301"


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_dir(resolve_model("demo"))


def test_g11_ids_equal_those_of_the_raw_library_and_no_warning_is_printed() -> None:
    script = (
        "import sys, tokenizers; from minivllm_engine.checkpoint.index import resolve_model;"
        "from minivllm_engine.text.tokenizer import Tokenizer; p = resolve_model('demo');"
        f"t = {MIXED!r}; raw = tokenizers.Tokenizer.from_file(str(p / 'tokenizer.json'));"
        "assert Tokenizer.from_dir(p).encode(t) == raw.encode(t, add_special_tokens=False).ids;"
        "Tokenizer.from_dir(p).encode_chat([{'role': 'user', 'content': t}]);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_text_survives_a_round_trip(demo: Tokenizer) -> None:
    import unicodedata

    for tokenizer in (demo, byte_tokenizer()):
        text = tokenizer.decode(tokenizer.encode(MIXED), skip_special_tokens=False)
        assert unicodedata.normalize("NFC", text) == unicodedata.normalize("NFC", MIXED)


def test_token_bytes_concatenate_to_the_text(demo: Tokenizer) -> None:
    ids = demo.encode(MIXED)
    assert b"".join(demo.token_bytes(i) for i in ids).decode() == demo.decode(ids)


def test_ids_without_a_token_decode_to_nothing(demo: Tokenizer) -> None:
    assert demo.token_bytes(10**6) == b""
    assert demo.decode([10**6]) == ""


def test_a_lone_surrogate_becomes_a_replacement_character() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude42")) == "🙂"


def test_g15_thinking_reaches_the_template() -> None:
    tokenizer = byte_tokenizer()
    messages = [{"role": "user", "content": "hi"}]
    plain = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages) == plain
    off = tokenizer.render_chat(messages, enable_thinking=False)
    assert off == plain + "<think>\n\n</think>\n\n"
    assert tokenizer.render_chat(messages, enable_thinking=True) == plain + "<think>\n"
    assert tokenizer.encode_chat(messages) == tokenizer.encode(plain)


def test_g15_demo_rendering_equals_transformers(demo: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = resolve_model("demo")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    reference.chat_template = (path / "chat_template.jinja").read_text()
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Define aardvark."},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\nAn animal."},
        {"role": "user", "content": "What kind of thing is it?"},
    ]
    for kwargs in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        text = reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **kwargs
        )
        assert demo.render_chat(messages, **kwargs) == text
        assert demo.encode_chat(messages, **kwargs) == reference(text).input_ids


def test_a_template_that_refuses_is_a_request_error(demo: Tokenizer) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no user query') }}"
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat([{"role": "user", "content": "x"}])
    assert "no user query" in str(caught.value) and "role" not in str(caught.value)
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat([{"role": "user", "content": "x"}, {"role": "usr", "content": "x"}])
    assert "messages[1] has the role 'usr', not system, user, assistant, tool" in caught.value.why
    tokenizer.chat_template = "{{ messages[0].nothing.at.all }}"
    with pytest.raises(RequestError):
        tokenizer.render_chat([{"role": "user", "content": "x"}])
    tokenizer.chat_template = None
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat([{"role": "user", "content": "x"}])
    assert "no chat template" in str(caught.value)


def test_the_template_may_live_in_tokenizer_config(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert not Tokenizer.from_dir(tmp_path).has_chat_template
    for template in (
        "T",
        [{"name": "tool", "template": "X"}, {"name": "default", "template": "T"}],
    ):
        settings = {"chat_template": template, "eos_token": {"content": "<|im_end|>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = Tokenizer.from_dir(tmp_path)
        assert tokenizer.chat_template == "T"
        assert tokenizer.eos_ids == byte_tokenizer().eos_ids


def test_broken_tokenizer_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_dir(tmp_path)
    write_byte_tokenizer(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["decoder"] = {"type": "Fuse"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="byte-level"):
        Tokenizer.from_dir(tmp_path)
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        Tokenizer.from_dir(tmp_path)


def test_a_stored_truncation_is_ignored(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert len(Tokenizer.from_dir(tmp_path).encode("abcdef")) == 6
