"""`steno ask`: the answer on stdout as it comes, everything else on stderr, exit codes."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stenolog import JSONLStore, NotStored
from stenolog.agent.turn_events import (
    Answer,
    Notice,
    Outcome,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from stenolog.catalog.message_metadata import mark_received
from stenolog.cli import main
from stenolog.cli.agents import open_agent
from stenolog.cli.ask import ControlSequenceFilter, TurnPrinter, exit_code_of
from stenolog.cli.chat_screen import StatusLine, outcome_text
from stenolog.cli.config import AgentOptions
from stenolog.errors import UnsupportedFormat
from stenolog.stores.open_store import open_store

pytestmark = pytest.mark.usefixtures("here")

PROGRAM = "from stenolog.cli import main; main(prog_name='steno')"


def ask(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(
        main, ["ask", "--model", "scripted", *arguments], input=stdin, prog_name="steno"
    )


def contents(key: str) -> list[object]:
    with open_store("workspace", read_only=True) as store:
        return [message.content for message in store.get_history(key)]


def test_only_the_answer_is_printed_to_stdout() -> None:
    ended = ask("--session", "cli:a", "what time is it?")
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert ended.stdout.startswith("The tool says: ")
    assert ended.stdout.count("\n") == 1
    assert contents("cli:a")[0] == "what time is it?"
    assert f"{contents('cli:a')[3]}\n" == ended.stdout


@pytest.mark.parametrize("kind", ["pipe", "file", "terminal"])
def test_ask_reads_stdin_only_from_a_pipe_or_file(here: Path, kind: str) -> None:
    # Of a terminal nobody can say whether something will be typed.
    (here / "log").write_bytes(b"more \xff\n")
    reader, writer = pty.openpty()[::-1] if kind == "terminal" else os.pipe()
    if kind == "file":
        os.dup2(os.open(here / "log", os.O_RDONLY), reader)
    if kind == "pipe":
        os.write(writer, b"more \xff\n")
        os.close(writer)
    command = ["ask", "--model", "scripted", "--session", "cli:a", "question"]
    subprocess.run([sys.executable, "-c", PROGRAM, *command], stdin=reader, timeout=60, check=True)
    os.close(reader)
    behind = "" if kind == "terminal" else "\n\nmore \ufffd"
    assert contents("cli:a")[0] == f"question{behind}"


def test_each_question_starts_a_new_session() -> None:
    ask("the time")
    ask("the time")
    with open_store("workspace", read_only=True) as store:
        keys = store.list_sessions()
    assert len(keys) == 2
    assert all(key.startswith("cli:") and key.endswith(":default") for key in keys)


def test_ask_json_prints_one_object() -> None:
    ended = ask("--json", "--session", "cli:a", "the time")
    assert (ended.exit_code, ended.stderr) == (0, "")
    told = json.loads(ended.stdout)
    assert told.pop("answer").startswith("The tool says: ")
    (tool,) = told.pop("tools")
    assert (tool["name"], tool["arguments"], tool["failed"]) == ("now", "{}", False)
    usage = told.pop("usage")
    assert usage["input_tokens"] > usage["output_tokens"] > 0
    assert told == {
        "key": "cli:a",
        "seq": 4,
        "outcome": "answered",
        "saved": True,
        "model": "scripted",
    }


def test_failed_answer_is_reported_on_stderr_and_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_MODELS__BAD__BASE_URL", "http://127.0.0.1:1/v1")
    monkeypatch.setenv("STENO_MODELS__BAD__MODEL", "x")
    monkeypatch.setenv("STENO_MODELS__BAD__RETRIES", "0")
    ended = ask("--json", "--session", "cli:a", "--model", "bad", "hello", "-w", "my notes")
    assert ended.stderr.endswith("try again with `steno chat cli:a -w 'my notes'`.\n")
    ended = ask("--json", "--session", "cli:a", "--model", "bad", "hello")
    assert ended.exit_code == 1
    told = json.loads(ended.stdout)
    assert (told["outcome"], told["answer"], told["saved"]) == ("failed", "", True)
    assert "127.0.0.1" in told["error"]
    assert ended.stderr.startswith("x at http://127.0.0.1:1/v1")
    kept = "Your question is saved; try again with `steno chat cli:a`.\n"
    assert ended.stderr.endswith(kept)
    assert contents("cli:a") == ["hello"]


def test_question_in_an_unwritable_workspace_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ask("--session", "cli:a", "hello").exit_code == 0

    def refuse(*_: object, **__: object) -> None:
        raise NotStored("writing 'cli:a': Permission denied")

    for name in ("add_message", "add_full_message", "add_messages", "lease"):
        monkeypatch.setattr(JSONLStore, name, refuse)
    ended = ask("--session", "cli:a", "again")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr == (
        "Writing 'cli:a': Permission denied. Your question was not saved; send it again.\n"
    )


def test_invalid_key_is_rejected_with_one_sentence() -> None:
    ended = ask("--session", "x" * 2_000, "the time")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr.startswith("Error: ")
    assert ended.stderr.count("\n") == 1


class AskProcess:
    """`steno ask --session cli:a` in a process of its own, whose answer has begun."""

    def __init__(self, question: str) -> None:
        command = ["ask", "--model", "scripted", "--session", "cli:a", question]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        assert self.process.stdout is not None
        # The answer is printed as it comes, not at its end.
        self.first = self.process.stdout.read(4).decode()

    def end(self) -> tuple[int, str, str]:
        """The exit code, the answer, and what was told on stderr."""
        answer, told = self.process.communicate(timeout=60)
        return self.process.returncode, self.first + answer.decode(), told.decode()


def test_stopped_answer_is_saved() -> None:
    asking = AskProcess("long")
    asking.process.send_signal(signal.SIGINT)
    code, answer, told = asking.end()
    assert code == 130
    assert answer.startswith("This")
    assert told == "Stopped. The answer so far is saved; continue with `steno chat cli:a`.\n"
    assert str(contents("cli:a")[1]).endswith("[interrupted]")


def test_closed_pipe_ends_the_command_silently() -> None:
    asking = AskProcess("long")
    assert asking.process.stdout is not None
    assert asking.process.stderr is not None
    with asking.process:
        asking.process.stdout.close()
        told = asking.process.stderr.read()
    assert (asking.process.returncode, told) == (141, b"")
    assert str(contents("cli:a")[1]).endswith("[interrupted]")


def test_sigterm_lets_the_answer_finish() -> None:
    asking = AskProcess("markdown")
    asking.process.send_signal(signal.SIGTERM)
    code, answer, _ = asking.end()
    assert code == 0
    assert answer.startswith("# What")
    assert answer.endswith("this page is always the same.\n")


def test_second_sigterm_stops_at_once_and_names_the_session() -> None:
    asking = AskProcess("long")
    assert asking.process.stderr is not None
    asking.process.send_signal(signal.SIGTERM)
    told = asking.process.stderr.readline().decode()
    assert told.startswith("Waiting up to 10 s for the answer to finish.")
    asking.process.send_signal(signal.SIGTERM)
    code, _, told = asking.end()
    assert code == 128 + signal.SIGTERM
    assert told.splitlines()[-1] == (
        "The answer is not finished. All messages are stored; resume with `steno chat cli:a`."
    )
    assert contents("cli:a") == ["long"]


@pytest.mark.parametrize(
    ("outcome", "seq", "saved", "code"),
    [
        ("answered", 2, True, 0),
        ("answered", None, False, 3),
        ("again", 2, True, 0),
        ("elsewhere", 2, True, 0),
        ("elsewhere", None, True, 1),
        ("failed", None, True, 1),
        ("interrupted", 2, True, 130),
    ],
)
def test_exit_code_matches_the_outcome(
    outcome: Outcome, seq: int | None, saved: bool, code: int
) -> None:
    assert exit_code_of(Answer(key="k", text="", outcome=outcome, seq=seq, saved=saved)) == code


def test_text_before_and_after_a_tool_is_separated(capsys: pytest.CaptureFixture[str]) -> None:
    printer = TurnPrinter(StatusLine("m"), verbose=True)
    for event in (
        TextDelta(text="Let me look."),
        ToolStarted(id="1", name="now", arguments="{}"),
        ToolFinished(id="1", name="now", text="noon\nsharp", failed=False, seconds=0.1),
        TextDelta(text="It is \x1b[2Jnoon."),
        Notice(text="this answer is not kept"),
    ):
        printer.print_event(event)
    printer.finish(Answer(key="k", text="It is noon.", outcome="answered", saved=False))
    said, told = capsys.readouterr()
    assert said == "Let me look.\n\nIt is noon.\n"
    assert told.splitlines() == [
        "✓ now() · 0.1 s · noon (+1 lines)",
        "this answer is not kept.",
        "m",
    ]


def test_interrupted_answer_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    printer = TurnPrinter(StatusLine("m"), verbose=False)
    printer.print_event(Notice(text="gpt-5 broke off; the text so far is kept, /retry asks again"))
    printer.finish(Answer(key="k", text="Half [interrupted]", outcome="interrupted"))
    assert capsys.readouterr().err.splitlines() == [
        "gpt-5 broke off; the text so far is kept.",
        "Continue with `steno chat k`.",
    ]


def test_scripted_model_makes_no_notes() -> None:
    async def consolidation() -> bool:
        opened = open_agent(AgentOptions(model="scripted"))
        try:
            return opened.agent.spec.consolidation
        finally:
            await opened.loop.close()

    assert not asyncio.run(consolidation())


FOREIGN_MESSAGES = {
    "anthropic": {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
    },
    "responses": {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
}


@pytest.mark.parametrize("message", FOREIGN_MESSAGES.values(), ids=FOREIGN_MESSAGES)
def test_session_in_an_unsupported_format_is_refused_before_the_question_is_stored(
    message: dict[str, object],
) -> None:
    with open_store("workspace") as store:
        store.add_messages("cli:a", [{"role": "user", "content": "hello"}, message])
    ended = ask("--session", "cli:a", "hi")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr.startswith("Error: 'cli:a': the message at seq 2 ")
    assert ended.stderr.endswith(
        " Start a new session, or continue this one in the program that stored it. "
        "Nothing was stored.\n"
    )
    assert len(contents("cli:a")) == 2


def test_session_that_can_never_be_continued_gets_no_hint_to_try_again() -> None:
    error = UnsupportedFormat("is an item", key="cli:a", seq=2)
    failed = Answer(key="cli:a", text=str(error), outcome="failed", error=error)
    for is_last in (True, False):
        text = outcome_text(failed, is_last=is_last)
        assert "again" not in text
        assert "retry" not in text
        assert "Start a new session" in text


def test_control_sequences_split_over_chunks_are_removed() -> None:
    safe = ControlSequenceFilter()
    pieces = ["a\x1b", "[3", "1mb", "\x1b]0;ti", "tle\x07c\nd", "\x9b2", "Je", "\x1b[0"]
    assert "".join([*map(safe.add, pieces), safe.end()]) == "abc\nde0"
    assert safe.add("\x1b]" + 300 * "x") == 300 * "x"
    assert safe.add("plain") == "plain"


def test_many_lines_with_sequences_in_one_chunk_are_complete() -> None:
    safe = ControlSequenceFilter()
    assert safe.add("\x1b[31mred\x1b[0m\n" * 5_000 + "end\x1b[") == "red\n" * 5_000 + "end"
    assert safe.add("1m.") + safe.end() == "."


def test_configured_agent_has_its_own_sessions_and_prompt(here: Path) -> None:
    Path("mine.toml").write_text('[agents.ada]\nmodel = "scripted"\nsystem = "You are Ada."\n')
    options = ["--agent", "ada", "--config", "mine.toml"]
    ended = CliRunner().invoke(main, ["ask", "--session", "cli:a", "the time", *options])
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert not (here / "workspace" / "sessions").exists()
    assert list((here / "workspace").rglob("cli%3Aa.jsonl"))


def test_session_model_is_used_if_no_model_is_found() -> None:
    with open_store("workspace") as store:
        store.add_message("cli:a:default", "user", "hello")
        store.add_message("cli:a:default", "assistant", "Hello.")
        store.set_meta("cli:a:default", chat_model="scripted")
    command = ["ask", "--session", "cli:a:default", "the time"]
    ended = CliRunner().invoke(main, command, prog_name="steno")
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert ended.stdout.startswith("The tool says: ")


@pytest.mark.parametrize("chosen", [None, "opnai/x"])
def test_session_without_any_model_is_not_continued(chosen: str | None) -> None:
    with open_store("workspace") as store:
        store.add_message("cli:a:default", "user", "hello")
        store.set_meta("cli:a:default", chat_model=chosen)
    command = ["ask", "--session", "cli:a:default", "the time"]
    ended = CliRunner().invoke(main, command, prog_name="steno")
    assert ended.exit_code == 1
    assert "No model was found. Set an API key" in ended.stderr
    assert ("Unknown model 'opnai/x'; use one of" in ended.stderr) == (chosen is not None)
    assert contents("cli:a:default") == ["hello"]


def test_an_interrupted_turn_is_answered_with_the_next_question() -> None:
    with open_store("workspace") as store:
        store.add_message("cli:a", "user", "hello")
        store.add_message("cli:a", "assistant", "Hello.")
        store.add_full_message("cli:a", mark_received({"role": "user", "content": "unanswered"}))
    assert ask("--session", "cli:a", "the time").exit_code == 0
    assert contents("cli:a")[2:4] == ["unanswered", "the time"]
    assert len(contents("cli:a")) == 7
