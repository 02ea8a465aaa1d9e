"""`steno ask`: the answer on stdout as it comes, everything else on stderr, exit codes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stenolog.agent.events import Answer, NotSaved, Outcome, Said, ToolBegan, ToolEnded
from stenolog.cli import main
from stenolog.cli.chat_lines import Teller
from stenolog.cli.chat_pipe import code_of
from stenolog.cli.chat_screen import Meter
from stenolog.stores.opening import open_store

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


def test_the_answer_goes_to_stdout_and_nothing_else() -> None:
    ended = ask("--session", "cli:a", "what time is it?")
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert ended.stdout.startswith("The tool says: ")
    assert ended.stdout.count("\n") == 1
    assert contents("cli:a")[0] == "what time is it?"
    assert f"{contents('cli:a')[3]}\n" == ended.stdout


@pytest.mark.parametrize("arguments", [["-"], []], ids=["dash", "nothing"])
def test_the_question_may_come_from_stdin(arguments: list[str]) -> None:
    ended = ask("--session", "cli:a", *arguments, stdin="what\ntime is it?\n")
    assert ended.exit_code == 0
    assert contents("cli:a")[0] == "what\ntime is it?"


@pytest.mark.parametrize("stdin", ["", " \n"])
def test_no_question_is_wrong_usage(stdin: str) -> None:
    ended = ask(stdin=stdin)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert "The question is empty." in ended.stderr
    assert not Path("workspace").exists()


def test_each_question_has_a_session_of_its_own() -> None:
    ask("the time")
    ask("the time")
    with open_store("workspace", read_only=True) as store:
        keys = store.list_sessions()
    assert len(keys) == 2
    assert all(key.startswith("cli:") and key.endswith(":default") for key in keys)


def test_a_question_is_no_command() -> None:
    ended = ask("--session", "cli:a", "/clear the time")
    assert ended.exit_code == 0
    assert contents("cli:a")[0] == "/clear the time"


def test_as_json_it_is_one_object() -> None:
    ended = ask("--json", "--session", "cli:a", "the time")
    assert (ended.exit_code, ended.stderr) == (0, "")
    told = json.loads(ended.stdout)
    assert told.pop("answer").startswith("The tool says: ")
    (tool,) = told.pop("tools")
    assert (tool["name"], tool["arguments"], tool["failed"]) == ("now", "{}", False)
    usage = told.pop("usage")
    assert usage["sent"] > usage["answered"] > 0
    assert told == {
        "key": "cli:a",
        "seq": 4,
        "outcome": "answered",
        "saved": True,
        "model": "scripted",
    }


def test_what_failed_is_told_on_stderr_and_in_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_MODELS__BAD__BASE_URL", "http://127.0.0.1:1/v1")
    monkeypatch.setenv("STENO_MODELS__BAD__MODEL", "x")
    monkeypatch.setenv("STENO_MODELS__BAD__RETRIES", "0")
    ended = ask("--json", "--session", "cli:a", "--model", "bad", "hello")
    assert ended.exit_code == 1
    told = json.loads(ended.stdout)
    assert (told["outcome"], told["answer"], told["saved"]) == ("failed", "", True)
    assert "127.0.0.1" in told["error"]
    assert "Your message is kept" in ended.stderr
    assert contents("cli:a") == ["hello"]


def test_a_key_that_cannot_be_one_is_refused_in_a_sentence() -> None:
    ended = ask("--session", "x" * 2_000, "the time")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr.startswith("Error: ")
    assert ended.stderr.count("\n") == 1


def test_stopped_it_keeps_what_was_said() -> None:
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
    assert told == "Stopped. What was said is kept; /retry asks for another answer.\n"
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
def test_the_exit_code_tells_what_came_of_it(
    outcome: Outcome, seq: int | None, saved: bool, code: int
) -> None:
    assert code_of(Answer(key="k", text="", outcome=outcome, seq=seq, saved=saved)) == code


def test_words_before_and_after_a_tool_stand_apart(capsys: pytest.CaptureFixture[str]) -> None:
    teller = Teller(Meter("m"), talkative=True)
    for event in (
        Said(text="Let me look."),
        ToolBegan(id="1", name="now", arguments="{}"),
        ToolEnded(id="1", name="now", text="noon\nsharp", failed=False, seconds=0.1),
        Said(text="It is \x1b[2Jnoon."),
        NotSaved(count=1, words="the disk is full"),
    ):
        teller.tell(event)
    teller.finish(Answer(key="k", text="It is noon.", outcome="answered", saved=False))
    said, told = capsys.readouterr()
    assert said == "Let me look.\n\nIt is noon.\n"
    assert told.splitlines() == [
        "✓ now() · 0.1 s · noon (+1 lines)",
        "Not saved: 1 message is in memory only. The disk is full.",
        "m",
    ]
