"""Messages of programs, each described in one line."""

from typing import Any

import pytest

from stenolog.catalog.message_metadata import FIELD
from stenolog.transfer.transcripts.program_messages import (
    KIND,
    is_in_place,
    is_prompt,
    kind_of,
    program_line,
)
from stenolog.transfer.transcripts.programs import PROGRAMS
from support.transcripts import SAMPLES

_COMMAND = """<command-name>/compact</command-name>
            <command-message>compact</command-message>
            <command-args>keep the tide table</command-args>"""
_NOTIFICATION = (
    '<task-notification>\n<task-id>a7</task-id>\n<summary>Agent "Count the boats" finished'
    "</summary>\n<note>It fires each time.</note>\n<result>There are\n3 boats.</result>\n"
    "</task-notification>"
)


def _body(text: Any, kind: str = "injected", role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text, FIELD: {KIND: kind}}


@pytest.mark.parametrize(
    ("kind", "text", "line"),
    [
        ("command", _COMMAND, "/compact keep the tide table"),
        ("command", "<command-name>/clear</command-name>\n<command-args></command-args>", "/clear"),
        ("command", "<bash-input> ls -l\n</bash-input>", "! ls -l"),
        ("command", "<bash-stdout>a\nb</bash-stdout><bash-stderr></bash-stderr>", "Output: a b"),
        ("command", "<local-command-stdout></local-command-stdout>", "Output"),
        ("notification", _NOTIFICATION, 'Agent "Count the boats" finished: There are 3 boats.'),
        ("injected", "<system-reminder>\nThe user named it.\n</system-reminder>", "Reminder"),
        (
            "injected",
            "<local-command-caveat>x</local-command-caveat>",
            "Note about commands",
        ),
        ("injected", "<environment_context>\n  <cwd>/x</cwd>", "Environment"),
        ("injected", "<session_context>\nThis is the Gemini CLI.", "Environment"),
        ("injected", "<user_instructions>\nBe brief.", "Instructions"),
        (
            "injected",
            "# AGENTS.md instructions for /x\n\n<I>",
            "Instructions: AGENTS.md",
        ),
        ("injected", "<skill>\n<name>tides</name>\n<path>/x</path>", "Skill: tides"),
        ("injected", "Base directory for this skill: /x/skills/tides\n\n# Tides", "Skill: tides"),
        ("injected", "<never_seen-before>x", "Never seen before"),
        ("injected", "[file: /x/page.md]", "File: /x/page.md"),
        ("injected", "Plain\ntext", "Plain text"),
        ("interruption", "[Request interrupted by user]", "Interrupted"),
        ("interruption", "<turn_aborted>\nOn purpose.", "Interrupted"),
        (
            "summary",
            "This session is continued.",
            "Compaction: summary of the earlier messages",
        ),
        ("compaction", "", ""),
    ],
)
def test_message_of_a_program_is_described_in_one_line(kind: str, text: str, line: str) -> None:
    assert program_line(_body(text, kind)) == line
    assert not is_prompt(_body(text, kind))


def test_parts_are_described_together_and_other_content_by_a_word() -> None:
    texts = ["<skills_instructions>\nx", "<permissions instructions>\ny", "<skills_instructions>z"]
    parts = [{"type": "text", "text": text} for text in texts]
    assert program_line(_body(parts, role="system")) == "Skills, Permissions"
    assert program_line(_body("You are a harbour master.", role="system")) == "Instructions"
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}
    assert program_line(_body([picture])) == "Attachment"


def test_prompts_and_answers_have_no_line() -> None:
    prompt = {"role": "user", "content": "<system-reminder> is a tag. What does it do?"}
    assert is_prompt(prompt)
    assert [program_line(prompt), kind_of(prompt)] == ["", ""]
    assert program_line({"role": "assistant", "content": "x", FIELD: "broken"}) == ""


@pytest.mark.parametrize("program", ["claude-code", "codex", "gemini-cli"])
def test_no_prompt_of_the_samples_is_markup(program: str) -> None:
    reader = PROGRAMS[program]()
    for file in reader.find(SAMPLES / program):
        for message in reader.read(file).messages:
            content = message.body["content"]
            if is_prompt(message.body) and isinstance(content, str):
                assert not content.lstrip().startswith(("<", "["))
            assert "<" not in program_line(message.body)


def test_hidden_messages_are_shown_in_place_only_in_sessions_of_other_programs() -> None:
    from stenolog.stores.in_memory import InMemoryStore

    with InMemoryStore() as store:
        store.add_message("own", "user", "x")
        assert not is_in_place(store.info("own"))
