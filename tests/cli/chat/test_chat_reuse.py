"""What the prefix cache does for a chat: each turn computes what is new, and says so when it is more."""

import re
from types import SimpleNamespace

import pytest

from cli.chat.program import Chat as ChatProgram
from cli.program import REAL
from minivllm_cli.chat.session import Chat, StopFlag
from minivllm_cli.chat.statistics import explanation, recompute_text, shortfall
from minivllm_cli.config.settings import resolve_settings
from minivllm_engine import LLM
from minivllm_engine.core.outputs import Divergence, Usage
from minivllm_engine.core.snapshot_interval import snapshot_interval

GRID = 64
SYSTEM = "You are a dictionary. " + "Answer briefly and precisely, as a good dictionary does. " * 8
QUESTIONS = [
    "Define aardvark.",
    "Give another word for car, if you know one. If there is none, then say so, but do not guess.",
    "Define trumpet.",
    "What kind of thing is a hawk?",
    "Tell me what 'kettle' means, in as few words as you can, and leave out where the word is from.",
    "Define river.",
]


def _open(llm: LLM, *assignments: str) -> Chat:
    settings = resolve_settings(
        assignments=["sampling.temperature=0", "sampling.max_tokens=40", *assignments], environ={}
    )
    chat = Chat(llm, {"name": "demo", "hash": ""}, settings, settings)
    chat.transcript = chat.transcript.with_system(SYSTEM)
    return chat


def _ask(chat: Chat, question: str, history=None):
    listener = SimpleNamespace(show=lambda output: None)
    history = chat.transcript if history is None else history
    return chat.ask(history, question, listener, StopFlag())


@pytest.fixture
def llm():
    with LLM("demo", engine={"max_num_seqs": 1}) as llm:
        yield llm
        llm.check_integrity()


@pytest.fixture(scope="module")
def cold_texts() -> list[str]:
    with LLM("demo", engine={"max_num_seqs": 1}, cache={"prefix_cache": False}) as llm:
        chat = _open(llm)
        outputs = [_ask(chat, question) for question in QUESTIONS]
        assert {out.usage.miss_reason for out in outputs} == {"disabled"}
        return [out.text for out in outputs]


def test_k12_c11_six_turns_compute_about_what_is_new(llm, cold_texts) -> None:
    chat = _open(llm)
    before = 0
    for question, expected in zip(QUESTIONS, cold_texts, strict=True):
        out = _ask(chat, question)
        assert out.text == expected
        usage = out.usage
        new = usage.prompt_tokens - before
        computed = usage.prompt_tokens - usage.cached_tokens
        assert computed <= new + GRID, usage
        assert usage.miss_reason in (None, "new_prefix")
        before = usage.prompt_tokens + usage.completion_tokens
    assert before > 5 * GRID, "a chat that is long enough for the bound to mean something"
    assert chat.totals.cached_tokens == llm.stats().cached_tokens > 0.7 * chat.totals.prompt_tokens


def _last_boundary(usage: Usage) -> int:
    return (usage.prompt_tokens - 1) // GRID * GRID


def test_an_answer_made_again_starts_from_the_last_boundary_of_its_prompt(llm) -> None:
    chat = _open(llm)
    for question in QUESTIONS[:3]:
        first = _ask(chat, question)
    again = _ask(chat, QUESTIONS[2], chat.transcript.without_turns(1))
    assert again.usage.cached_tokens == again.usage.state_at == _last_boundary(first.usage)
    assert (again.usage.miss_reason, again.text) == (None, first.text)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_what_undo_says_is_what_the_next_turn_computes(llm, turns) -> None:
    chat = _open(llm)
    for question in QUESTIONS[:4]:
        _ask(chat, question)
    history = chat.transcript.without_turns(turns)
    text = chat.cost_of_history(history)
    found = re.fullmatch(r"snapshot at ([\d,]+), (\d+) tokens to recompute", text)
    state_at, left = int(found[1].replace(",", "")), int(found[2])
    total = chat.template.cost_of_history(history)
    assert state_at + left == total
    assert left <= 2 * GRID
    out = _ask(chat, "Define sofa.", history)
    assert out.usage.state_at == state_at
    assert chat.cost_of_history(history.cleared().with_system(None)) == "0 tokens to recompute"


def test_an_edited_question_and_a_branch_start_where_they_part(llm) -> None:
    chat = _open(llm)
    for question in QUESTIONS[:4]:
        _ask(chat, question)
    kept = chat.transcript
    history = kept.without_turns(2)
    boundary = chat.template.cost_of_history(history) // GRID * GRID
    edited = _ask(chat, "Define violin.", history)
    assert edited.usage.cached_tokens >= boundary - GRID
    assert edited.usage.cached_tokens > 0
    back = _ask(chat, QUESTIONS[4], kept)
    assert back.usage.cached_tokens >= chat.template.cost_of_history(kept) // GRID * GRID - GRID


def test_template_divergence_names_the_token(llm) -> None:
    chat = _open(llm)
    chat.think = True
    out = _ask(chat, QUESTIONS[0])
    assert not chat.drops_thinking
    # Where an answer ends within the block it begins in, there was nothing to reuse after it anyway.
    for question in QUESTIONS[1:]:
        if out.usage.miss_reason != "template_divergence":
            out = _ask(chat, question)
    assert out.usage.miss_reason == "template_divergence"
    assert chat.drops_thinking
    text = shortfall(out.usage, llm.tokenizer, thinking_dropped=chat.drops_thinking)
    earlier = chat.transcript.without_turns(1).without_answer()
    position = chat.template.count(earlier) - 2  # its prompt ended with "<think>" and a line break
    assert text.startswith(
        f"reuse stopped at {out.usage.cached_tokens:,}: history changed at token {position:,} "
        '("<think>" → "'
    )
    assert text.endswith('"; thinking was removed by the template). /think keep avoids it.')
    kept = _open(llm)
    kept.think, kept.thinking_in_history = True, "reasoning_content"
    kept.keep_kwargs = {"preserve_thinking": True}
    for question in QUESTIONS:
        out = _ask(kept, question)
        assert out.usage.miss_reason in (None, "new_prefix"), "as it promises"


def test_tokens_that_fill_no_unit_are_not_called_new(llm) -> None:
    chat = _open(llm)
    chat.transcript = chat.transcript.with_system(None)
    first = _ask(chat, QUESTIONS[0])
    assert first.usage.prompt_tokens + first.usage.completion_tokens < GRID
    second = _ask(chat, QUESTIONS[1]).usage
    assert (second.miss_reason, second.cached_tokens) == ("new_prefix", 0), second
    text = explanation(second, llm.tokenizer, thinking_dropped=False, block_size=64)
    assert text.startswith("reuse stopped at 0: it comes in units of 64 tokens, and nothing ")
    assert "not seen" not in text, "the first turn was seen"


class _Texts:
    think_ids = (1, 2)

    def token_text(self, token_id):
        return {1: "<think>", 5: "OK", 6: "no\n"}[token_id]


def _usage(reason, cached=64, matched=64, divergence=None) -> Usage:
    return Usage(500, 5, 0, cached, matched, cached, reason, divergence)


@pytest.mark.parametrize(
    ("usage", "line"),
    [
        (_usage(None), None),
        (_usage("new_prefix"), None),
        (_usage("below_granularity", 0, 0), None),
        (_usage("disabled", 0, 0), None),
        (
            _usage("no_snapshot", 64, 1984),
            "reuse stopped at 64: KV goes on to 1,984, but no state was kept there.",
        ),
        (
            _usage("evicted"),
            "reuse stopped at 64: what comes after it had to make room. A larger "
            "--set cache.snapshot_memory or cache.num_blocks keeps more.",
        ),
        (
            _usage("template_divergence", 1152, 1152, Divergence(1184, 6, 5)),
            'reuse stopped at 1,152: history changed at token 1,184 ("no\\n" → "OK").',
        ),
        (
            _usage("template_divergence", 1152, 1152, Divergence(1184, 1, 5)),
            'reuse stopped at 1,152: history changed at token 1,184 ("<think>" → "OK"; '
            "thinking was removed by the template).",
        ),
    ],
)
def test_the_line_appears_only_where_more_could_have_been_reused(usage, line) -> None:
    assert shortfall(usage, _Texts(), thinking_dropped=False) == line
    told = explanation(usage, _Texts(), thinking_dropped=False, block_size=64)
    assert told == line if line else told


def test_every_reason_is_explained() -> None:
    def told(usage: Usage) -> str:
        return explanation(usage, _Texts(), thinking_dropped=False, block_size=48)

    assert told(_usage(None, 384)) == (
        "all that could be reused was: 384 of 500 tokens, in units of 192"
    )
    assert told(_usage("new_prefix")) == (
        "reuse stopped at 64: it comes in units of 192 tokens, "
        "and nothing in the cache is the same for the whole of the next one"
    )
    assert "the prompt has 500 tokens, and reuse comes in units of 192" in (
        told(_usage("below_granularity", 0, 0))
    )
    assert "the prefix cache is off" in told(_usage("disabled", 0, 0))
    assert (snapshot_interval(16), snapshot_interval(64), snapshot_interval(128)) == (64, 64, 128)
    assert recompute_text(1204, 1152) == "snapshot at 1,152, 52 tokens to recompute"
    assert recompute_text(52, 0) == "52 tokens to recompute"


def test_the_screen_says_what_was_reused(tmp_path) -> None:
    program = ChatProgram(tmp_path, "demo", REAL)
    args = ("--max-tokens", "40", "--temperature", "0", "--think")
    with program.talk("--system", SYSTEM, *args) as talk:
        assert "nothing has been asked yet" in talk.ask("/why")
        talk.ask(QUESTIONS[0])
        answers = [talk.ask(question) for question in QUESTIONS[1:5]]
        why = talk.ask("/why")
        undone = talk.ask("/undo")
        cache = talk.ask("/cache")
        stats = talk.ask("/show stats")
        memory = talk.ask("/show memory")
    told = [answer for answer in answers if "history changed at token " in answer]
    assert len(told) == 1, "once is enough"
    reused = re.search(r"prompt (\d+) = (\d+) reused \+ (\d+) new", told[0])
    assert int(reused[1]) == int(reused[2]) + int(reused[3]) and int(reused[2]) >= GRID
    assert f"reuse stopped at {reused[2]}: history changed at token " in told[0]
    assert '("<think>" → "' in told[0]
    flat = " ".join(told[0].split())
    assert "thinking was removed by the template). /think keep avoids it." in flat
    assert re.match(r"prompt [\d,]+ = [\d,]+ reused \+ [\d,]+ new\n", why)
    assert re.fullmatch(r"undone 1 turn \(snapshot at \d+, \d+ tokens to recompute\)", undone)
    assert re.search(r"^snapshots +[1-9]\d*/\d+ used +at most \d+ so far$", cache, re.M)
    assert "reuse comes in units of 64." in cache
    assert re.search(r"prompt tokens +[\d,]+ = [\d,]+ reused \+ [\d,]+ new", stats)
    assert re.search(r"^snapshots +\d+ × ", memory, re.M)


def test_without_a_cache_the_screen_says_so(tmp_path) -> None:
    program = ChatProgram(tmp_path, "demo", REAL)
    with program.talk("--max-tokens", "5", "--set", "cache.prefix_cache=false") as talk:
        talk.ask(QUESTIONS[0])
        assert "each turn computes the whole chat again" in talk.ask("/show cache")
        assert "the prefix cache is off" in talk.ask("/why")
