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
from stenolog.cli import main
from stenolog.cli.agents import open_agent
from stenolog.cli.chat_pipe import TurnPrinter, exit_code_of
from stenolog.cli.chat_screen import StatusLine, outcome_text
from stenolog.cli.config import AgentOptions
from stenolog.errors import UnsupportedFormat
from stenolog.stores.open_store import open_store

PROGRAM = "from stenolog.cli import main; main(prog_name='steno')"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a home of its own and no keys in the environment."""
    for name in list(os.environ):
        if name.endswith("_API_KEY") or name.startswith(("STENO_", "OLLAMA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


@pytest.mark.parametrize("arguments", [["-"], []], ids=["dash", "nothing"])
def test_question_can_come_from_stdin(arguments: list[str]) -> None:
    ended = ask("--session", "cli:a", *arguments, stdin="what\ntime is it?\n")
    assert ended.exit_code == 0
    assert contents("cli:a")[0] == "what\ntime is it?"


def test_ask_appends_piped_text_to_the_question() -> None:
    ended = ask("--session", "cli:a", "what is wrong?", stdin="line one\nline two\n")
    assert ended.exit_code == 0
    assert contents("cli:a")[0] == "what is wrong?\n\nline one\nline two"


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


@pytest.mark.parametrize("stdin", ["", " \n"])
def test_no_question_is_wrong_usage(stdin: str) -> None:
    ended = ask(stdin=stdin)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert "The question is empty." in ended.stderr
    assert not Path("workspace").exists()


def test_each_question_starts_a_new_session() -> None:
    ask("the time")
    ask("the time")
    with open_store("workspace", read_only=True) as store:
        keys = store.list_sessions()
    assert len(keys) == 2
    assert all(key.startswith("cli:") and key.endswith(":default") for key in keys)


def test_question_is_never_parsed_as_a_command() -> None:
    ended = ask("--session", "cli:a", "/clear the time")
    assert ended.exit_code == 0
    assert contents("cli:a")[0] == "/clear the time"


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


def test_stopped_answer_is_saved() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "ask", "--model", "scripted", "--session", "cli:a", "long"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        # It is printed as it comes, not at its end.
        assert process.stdout.read(4) == b"This"
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        told = process.stderr.read().decode()
    assert process.returncode == 130
    assert told == "Stopped. The answer so far is saved; continue with `steno chat cli:a`.\n"
    assert str(contents("cli:a")[1]).endswith("[interrupted]")


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
    for is_last, told in (
        (False, ["gpt-5 broke off; the text so far is kept, /retry asks again."]),
        (True, ["gpt-5 broke off; the text so far is kept.", "Continue with `steno chat k`."]),
    ):
        printer = TurnPrinter(StatusLine("m"), verbose=False, is_last=is_last)
        printer.print_event(
            Notice(text="gpt-5 broke off; the text so far is kept, /retry asks again")
        )
        printer.finish(Answer(key="k", text="Half [interrupted]", outcome="interrupted"))
        assert capsys.readouterr().err.splitlines() == told


def test_scripted_model_makes_no_notes() -> None:
    async def consolidation() -> bool:
        opened = open_agent(AgentOptions(model="scripted"))
        try:
            return opened.agent.spec.consolidation
        finally:
            await opened.loop.close()

    assert not asyncio.run(consolidation())


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [
        ("opnai/gpt-5", "openai/gpt-5"),
        ("Scripted", "scripted"),
        ("OLLAMA/x", "ollama/x"),
        ("mien", "Mine"),
    ],
)
def test_misspelt_model_gets_a_suggestion(here: Path, wanted: str, meant: str) -> None:
    (here / "steno.toml").write_text('[models.Mine]\nmodel = "openai/x"\n')
    ended = ask("--config", "steno.toml", "--model", wanted, "hello")
    assert ended.exit_code == 1
    assert ended.stderr == f"Error: There is no model {wanted!r}; did you mean {meant!r}?\n"


def test_unknown_model_gets_the_list_of_models() -> None:
    ended = ask("--model", "zzzz/gpt", "hello")
    assert "Unknown model 'zzzz/gpt'; use one of" in ended.stderr


FOREIGN_MESSAGES = {
    "anthropic": {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
    },
    "responses": {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
}


@pytest.mark.parametrize("message", FOREIGN_MESSAGES.values(), ids=FOREIGN_MESSAGES)
@pytest.mark.parametrize("command", ["ask", "chat"])
def test_session_in_an_unsupported_format_is_refused_before_the_question_is_stored(
    command: str, message: dict[str, object]
) -> None:
    with open_store("workspace") as store:
        store.add_messages("cli:a", [{"role": "user", "content": "hello"}, message])
    arguments = ["ask", "--session", "cli:a", "hi"] if command == "ask" else ["chat", "cli:a"]
    ended = CliRunner().invoke(main, [*arguments, "--model", "scripted"], input="hi\n")
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
