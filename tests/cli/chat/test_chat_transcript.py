"""The transcript as a value: turns added and dropped, and what the template is given."""

from minivllm_cli.chat.transcript import Message, Transcript


def _chat(turns: int, system: str | None = None) -> Transcript:
    transcript = Transcript(system)
    for i in range(turns):
        transcript = transcript.asked(f"q{i}").answered(Message("assistant", f"a{i}"))
    return transcript


def test_turns_are_added_without_changing_the_old_value():
    old = _chat(1)
    new = old.asked("more")
    assert (old.num_turns, new.num_turns) == (1, 2)
    assert old.last_answer is not None
    assert new.last_answer is None
    assert new.last_question == "more"


def test_dropping_turns_goes_back_to_an_equal_transcript():
    assert _chat(3).without_turns(2) == _chat(1)
    assert _chat(3).without_turns(0) == _chat(3)
    assert _chat(2).without_turns(2) == Transcript()


def test_clearing_keeps_the_system_text():
    assert _chat(2, "Be brief.").cleared() == Transcript("Be brief.")


def test_a_second_system_text_replaces_the_first():
    rows = _chat(1, "one").with_system("two").for_engine()
    assert rows[0] == {"role": "system", "content": "two"}
    assert [row["role"] for row in rows] == ["system", "user", "assistant"]


def test_common_beginning():
    assert _chat(3).num_common(_chat(2)) == 4
    assert _chat(2).num_common(_chat(3)) == 4
    edited = _chat(1).without_answer().answered(Message("assistant", "other"))
    assert _chat(2).num_common(edited) == 1


def test_thinking_is_left_out_unless_it_is_kept():
    answer = Message("assistant", "yes", reasoning="hm")
    transcript = Transcript().asked("q").answered(answer)
    assert transcript.for_engine()[1] == {"role": "assistant", "content": "yes"}
    assert transcript.for_engine("reasoning_content")[1] == {
        "role": "assistant",
        "content": "yes",
        "reasoning_content": "hm",
    }
    assert transcript.for_engine("inline")[1] == {
        "role": "assistant",
        "content": "<think>\nhm\n</think>\n\nyes",
    }
