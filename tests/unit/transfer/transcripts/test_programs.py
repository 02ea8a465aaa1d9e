"""Which program wrote a file or folder."""

from pathlib import Path

import pytest

from stenolog.transfer.transcripts.programs import PROGRAMS, detect_program
from support.transcripts import SAMPLES

PLACES = {
    "claude-code": "claude-code",
    "claude-code/projects": "claude-code",
    "claude-code/simonw-sample_session.jsonl": "claude-code",
    "codex": "codex",
    "codex/oldest": "codex",
    "chatgpt-export": "chatgpt",
    "chatgpt-export/conversations.json": "chatgpt",
    "llm-logs": "llm",
    "llm-logs/logs.db": "llm",
    "gemini-cli": "gemini-cli",
    "opencode": "opencode",
    "opencode/opencode.db": "opencode",
    "claude-ai-export": "claude-ai",
    "open-webui": "open-webui",
}


@pytest.mark.parametrize("place", PLACES)
def test_the_program_of_each_sample_is_recognized(place: str) -> None:
    assert detect_program(SAMPLES / place) == PLACES[place]


def test_every_program_has_a_sample() -> None:
    assert set(PLACES.values()) == set(PROGRAMS)


@pytest.mark.parametrize("text", ["", "hello\n", '{"role": "user", "content": "x"}\n', "[1, 2]"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_other_files_are_unknown(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert detect_program(tmp_path / name) is None
    assert detect_program(tmp_path) is None


def test_names_alone_do_not_make_transcripts(tmp_path: Path) -> None:
    (tmp_path / "logs.db").touch()
    (tmp_path / "sub" / "deeper").mkdir(parents=True)
    (tmp_path / "sub" / "deeper" / "rollout-1.jsonl").touch()
    assert detect_program(tmp_path) is None


@pytest.mark.parametrize("name", ["picoclaw", "picoclaw-legacy", "zeroclaw"])
def test_sessions_of_other_programs_are_not_taken_for_transcripts(name: str) -> None:
    assert detect_program(SAMPLES.parent / name) is None
