"""What is accepted is honoured: system texts, arguments of commands, settings that go back."""

import shutil

import pytest

from cli.chat.program import Chat


def _with_template(tmp_path, scripted_model, change) -> Chat:
    model = tmp_path / "model"
    shutil.copytree(scripted_model, model)
    template = model / "chat_template.jinja"
    template.write_text(change(template.read_text()))
    return Chat(tmp_path, model)


def test_a8_the_system_text_comes_from_a_file(chat):
    (chat.home / "sys.txt").write_text("Be brief.\n\nAnd kind.\n")
    assert chat.pipe("--system", "@sys.txt", stdin=b"echo one").code == 0
    (chat.home / "c.yaml").write_text('chat:\n  system: "@sys.txt"\n')
    assert chat.pipe("--config", "c.yaml", stdin=b"echo two").code == 0
    with chat.talk("--system", "@sys.txt", "--transcript", "t.jsonl") as talk:
        assert talk.ask("/system") == "Be brief.\n\nAnd kind."
        talk.ask("echo three")
        assert talk.ask("/system @sys.txt").startswith("system text replaced")
        talk.ask("echo four")
        assert talk.ask("/system @@home").startswith("system text replaced")
        assert talk.ask("/system") == "@home"
    begin = "<|im_start|>system\nBe brief.\n\nAnd kind.<|im_end|>\n"
    assert [prompt.startswith(begin) for prompt in chat.prompts] == [True] * 4


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("@no.txt", "error: --system @no.txt: cannot read no.txt: No such file or directory"),
        ("-", "error: --system: the system text cannot come from stdin, which is the conversation"),
        ("@latin.txt", "error: --system: latin.txt is not UTF-8 (byte 0xe9 at 3)"),
    ],
)
def test_a8_a_system_text_that_cannot_be_read_is_an_error(chat, text, problem):
    (chat.home / "latin.txt").write_bytes(b"caf\xe9")
    run = chat.pipe("--system", text, stdin=b"echo one", FAKE_LOAD_SECONDS="6000")
    assert (run.code, run.stdout, run.err_lines[0]) == (2, b"", problem)


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        (
            "{{ raise_exception('no system here') }}",
            "TemplateError: no system here",
        ),
        ("", "the prompt is the same without it"),
    ],
)
def test_c7_a_template_without_system_texts_says_so_and_nothing_changes(
    tmp_path, scripted_model, statement, why
):
    def change(template):
        begin = "{% for m in messages %}"
        assert begin in template
        skip = f"{{% if m.role == 'system' %}}{statement}{{% else %}}"
        return template.replace(begin, begin + skip).replace(
            "{% endfor %}", "{% endif %}{% endfor %}"
        )

    chat = _with_template(tmp_path, scripted_model, change)
    what = "this model's chat template takes no system text"
    run = chat.pipe("--system", "Be brief.", stdin=b"echo one", FAKE_LOAD_SECONDS="6000")
    assert (run.code, run.stdout) == (2, b"")
    assert run.err_lines == [
        f"error: --system: {what}",
        f"why: {why}",
        "try: say it in the first message",
    ]
    with chat.talk() as talk:
        talk.ask("echo one")
        assert talk.ask("/system Be brief.").startswith(f"error: {what}\nwhy: {why}\n")
        assert talk.ask("/system") == "no system text"
        assert talk.ask("echo two").startswith("two\n"), "the chat goes on"
        (tmp_path / "a.jsonl").write_text(
            '{"schema_version":1,"kind":"chat","settings":{"top_k":7}}\n'
            '{"role":"system","content":"Be brief."}\n'
        )
        assert what in talk.ask("/load a.jsonl")
        assert talk.repl.chat.transcript.num_turns == 2
        assert talk.ask("/set top_k") == "top_k  -1  default", "nothing of it is in force"


def test_commands_alone_tell_what_is_set(chat):
    with chat.talk("--temperature", "0.5", "--seed", "3") as talk:
        assert talk.ask("/think") == (
            "thinking: the template's default, fold, not kept in the history"
        )
        talk.ask("echo one")
        assert "answer tokens      4\n" in talk.ask("/stats")
        assert talk.ask("/stats").endswith("after each answer  shown")
        assert "/show memory" in talk.ask("/show")
        assert talk.ask("/seed") == "seed  3  --seed (default 0)"
        assert talk.ask("/set temperature") == "temperature  0.5  --temperature (default 1.0)"
        assert talk.ask("/set").split("\n")[0].split() == [
            *("temperature", "0.5", "--temperature", "(default", "1.0)")
        ]
        assert talk.ask("/history") == str(chat.history)
        assert talk.ask("/memory").endswith("try: /show memory, or //memory to say it to the model")
    assert len(chat.requests) == 1


def test_null_goes_back_to_what_the_chat_was_started_with(chat):
    with chat.talk("--temperature", "0.5", "--seed", "3") as talk:
        talk.ask("echo one")
        talk.ask("/save plain.json")
        talk.ask("/set temperature 0.25")
        talk.ask("/seed 9")
        assert talk.ask("/set temperature null") == "temperature 0.5"
        assert talk.ask("/set seed null") == "seed 3"
    with chat.talk("--top-p", "0.5") as talk:
        talk.ask("/set top_p 0.75")
        talk.ask("/load plain.json")
        assert talk.ask("/set top_p") == "top_p  0.5  --top-p (default 1.0)"


def test_arguments_that_mean_nothing_are_refused(chat):
    with chat.talk() as talk:
        talk.ask("echo one")
        for line in (
            *("/help set", "/clear all", "/edit it", "/edit-reply it", "/continue 3", "/multi on"),
            *("/cache all", "/why not", "/tokens 1", "/exit now", "/undo 1 2", "/undo 0"),
            *(
                "/regen x",
                "/regen -1",
                "/seed 1 2",
                "/seed 1.5",
                "/set stop # none",
                "/set temperature 1 2",
            ),
            *("/set top_k 1.5", "/set seed -1", "/seed -1", "/set ignore_eos yes", "/set top_p 2"),
            *("/think on off", "/stats on off", "/show stats cache", "/history clear all"),
            *("/branches no", "/save", "/load"),
        ):
            assert talk.ask(line).startswith("error: "), line
        assert talk.repl.chat.transcript.num_turns == 1
    run = chat.pipe("--seed", "-1", stdin=b"echo one")
    assert (run.code, run.stdout) == (2, b"")
    assert run.err_lines == [
        "error: --seed: a seed is not negative",
        "try: leave it out, or null: one is drawn",
    ]
