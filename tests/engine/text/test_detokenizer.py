"""Streaming text: whole characters, reasoning apart, stop strings never shown."""

import random

import pytest

from minivllm_engine.text.detokenizer import IncrementalDetokenizer, opens_reasoning
from support.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
THINK, END_THINK = TOKENIZER.think_ids
IM_END = TOKENIZER.eos_ids[0]


def feed(ids, stops=(), *, natural=True, **kwargs):
    """Run a detokenizer over `ids`. Returns it, the stop that was found, and the pieces of text."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, stops, **kwargs)
    pieces, found, sent = [], None, 0
    for token_id in ids:
        found = detokenizer.push(token_id)
        assert len(detokenizer.text) >= sent, "text was taken back"
        pieces.append(detokenizer.text[sent:])
        sent = len(detokenizer.text)
        if found is not None:
            break
    detokenizer.finish(keep_partial_character=natural)
    pieces.append(detokenizer.text[sent:])
    assert "".join(pieces) == detokenizer.text
    return detokenizer, found, pieces


@pytest.mark.parametrize("text", ["plain", "naïve – 中文 🙂👨‍👩‍👧 ꟿ", "\n\t \x00 end", ""])
def test_k31_pieces_are_whole_characters_and_add_up(text: str) -> None:
    detokenizer, _, pieces = feed(TOKENIZER.encode(text))
    assert detokenizer.text == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_k31_an_interrupt_in_a_character_shows_nothing_of_it() -> None:
    ids = TOKENIZER.encode("a🙂")
    for cut in range(1, len(ids)):
        assert feed(ids[:cut], natural=False)[0].text == "a"
    assert feed(ids[:3])[0].text == "a\ufffd"


@pytest.mark.parametrize("seed", range(100))
def test_random_bytes_give_what_decode_gives(seed: int) -> None:
    rng = random.Random(seed)
    alphabet = [*range(256), *rng.choices(range(0x80, 0x100), k=400), IM_END, IM_END + 1, 9999]
    ids = rng.choices(alphabet, k=30)
    assert feed(ids)[0].text == TOKENIZER.decode(ids)


def test_h1_a_stop_string_across_tokens_is_found_and_never_shown() -> None:
    stop = "STOP\n!x"
    assert len(TOKENIZER.encode(stop)) == 7
    detokenizer, found, pieces = feed(TOKENIZER.encode(f"before {stop} after"), [stop])
    assert (detokenizer.text, found) == ("before ", stop)
    assert "S" not in "".join(pieces)


def test_h1_what_only_looked_like_a_stop_string_is_shown_in_the_end() -> None:
    detokenizer, found, _ = feed(TOKENIZER.encode("abc STO"), ["STOP"])
    assert (detokenizer.text, found) == ("abc STO", None)
    detokenizer, found, pieces = feed(TOKENIZER.encode("abc STOX"), ["STOP"])
    assert (detokenizer.text, found) == ("abc STOX", None)
    assert "STOX" in pieces


def test_h1_the_first_stop_string_to_be_complete_wins() -> None:
    assert feed(TOKENIZER.encode("xabcd"), ["abcd", "bc"])[0].text == "xa"
    assert feed(TOKENIZER.encode("xabc"), ["c", "abc"])[0].text == "x"
    assert feed(TOKENIZER.encode("aab"), ["ab"])[0].text == "a"


@pytest.mark.parametrize("seed", range(100))
def test_h1_stop_strings_against_a_search_in_the_whole_text(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("abé🙂", k=20))
    stops = ["".join(rng.choices("abé🙂", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    detokenizer, found, _ = feed(TOKENIZER.encode(text), stops)
    assert detokenizer.text == (text[: min(ends)[1]] if ends else text)
    assert (found is not None) == bool(ends)


def test_h2_a_stop_string_does_not_tear_an_added_token() -> None:
    ids = [*TOKENIZER.encode("a "), END_THINK, *TOKENIZER.encode(" b")]
    for stop in ("</th", "think", "/", "ink> b", "a </"):
        detokenizer, found, _ = feed(ids, [stop])
        assert (detokenizer.text, found) == ("a </think> b", None)
    assert feed(ids, ["</think>"])[0].text == "a "
    assert feed(ids, [" </think> b"])[0].text == "a"
    assert feed(TOKENIZER.encode("a < /th </t"), ["</th"])[0].text == "a < /th </t"


@pytest.mark.parametrize("stop", ["<|im_end|>", "a<|im_end|>", "<|im_end|>\n", "b a<|im_end|>\nx"])
def test_a3_a_stop_string_may_be_or_contain_a_special_token(stop: str) -> None:
    ids = [*TOKENIZER.encode("b a"), IM_END, *TOKENIZER.encode("\nx more")]
    detokenizer, found, _ = feed(ids, [stop])
    assert found == stop
    assert detokenizer.text == "b a"[: "b a<|im_end|>\nx more".index(stop)]
    # Without one, special tokens are still not shown, whatever is looked for.
    assert feed(ids, ["<|im_e", "im_end", "aX"])[0].text == feed(ids)[0].text == "b a\nx more"


def test_a3_a_special_token_that_only_began_a_stop_string_stays_hidden() -> None:
    ids = [*TOKENIZER.encode("a"), IM_END, *TOKENIZER.encode("xy"), IM_END, IM_END]
    detokenizer, found, pieces = feed(ids, ["<|im_end|>xz"])
    assert (detokenizer.text, found) == ("axy", None)
    assert pieces[:2] == ["a", ""]


@pytest.mark.parametrize("seed", range(200))
def test_a3_stops_against_a_search_in_all_that_was_generated(seed: int) -> None:
    rng = random.Random(seed)
    pieces = rng.choices(["a", "b", "é", "<|im_end|>", "</think>"], k=16)
    stops = ["".join(rng.choices(["a", "b", "é", "<|im_end|>", "</think>"], k=rng.randint(1, 3)))]
    ids = [i for piece in pieces for i in TOKENIZER.encode(piece)]
    whole, (stop,) = "".join(pieces), stops
    detokenizer, found, _ = feed(ids, stops)
    kept = whole[: whole.index(stop)] if stop in whole else whole
    assert (detokenizer.text, found) == (
        kept.replace("<|im_end|>", ""),
        stop if stop in whole else None,
    )


def test_h2_a_stop_string_is_not_looked_for_in_reasoning() -> None:
    ids = [*TOKENIZER.encode("one\n\ntwo"), END_THINK, *TOKENIZER.encode("\n\nx\n\ny")]
    detokenizer, found, _ = feed(ids, ["\n\n"], split_reasoning=True, in_reasoning=True)
    assert (detokenizer.reasoning, detokenizer.text, found) == ("one\n\ntwo", "x", "\n\n")


def test_k7_reasoning_that_the_template_opened() -> None:
    ids = [*TOKENIZER.encode("\nthought\n"), END_THINK, *TOKENIZER.encode("\n\nanswer")]
    detokenizer, _, _ = feed(ids, split_reasoning=True, in_reasoning=True)
    assert (detokenizer.reasoning, detokenizer.text) == ("thought", "answer")
    assert detokenizer.num_reasoning_tokens == len("\nthought\n") + 1


def test_k7_reasoning_that_the_model_opens_itself() -> None:
    ids = [THINK, *TOKENIZER.encode("\nthought"), END_THINK, *TOKENIZER.encode("\nanswer")]
    detokenizer, _, _ = feed(ids, split_reasoning=True)
    assert (detokenizer.reasoning, detokenizer.text) == ("thought", "answer")


def test_k7_unclosed_reasoning_leaves_the_answer_empty() -> None:
    detokenizer, _, _ = feed(TOKENIZER.encode("on and on"), split_reasoning=True, in_reasoning=True)
    assert (detokenizer.reasoning, detokenizer.text) == ("on and on", "")


def test_without_splitting_the_tags_are_text() -> None:
    ids = [THINK, *TOKENIZER.encode("t"), END_THINK, *TOKENIZER.encode("a")]
    detokenizer, _, _ = feed(ids)
    assert (detokenizer.reasoning, detokenizer.text) == (None, "<think>t</think>a")


def test_a_think_tag_in_the_middle_of_an_answer_is_text() -> None:
    ids = [*TOKENIZER.encode("say "), THINK, *TOKENIZER.encode(" now")]
    assert feed(ids, split_reasoning=True)[0].text == "say <think> now"


def test_reasoning_deltas_only_ever_grow() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER, split_reasoning=True, in_reasoning=True)
    shown = ""
    for token_id in [*TOKENIZER.encode(" a \n b é \n"), END_THINK, *TOKENIZER.encode("x")]:
        detokenizer.push(token_id)
        assert detokenizer.reasoning.startswith(shown)
        shown = detokenizer.reasoning
    assert shown == "a \n b é"


def test_only_a_block_that_the_template_left_open_is_reasoning() -> None:
    def opened(text: str, **kwargs: object) -> bool:
        messages = [{"role": "user", "content": text}]
        return opens_reasoning(TOKENIZER, TOKENIZER.encode_chat(messages, **kwargs))

    assert opened("hi", enable_thinking=True)
    assert not opened("hi", enable_thinking=False)
    assert not opened("hi")
    assert not opened("what is <think>")
