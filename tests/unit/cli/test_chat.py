"""`steno chat` without a terminal, and which session a chat begins in."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stenolog.catalog.message_metadata import mark_received
from stenolog.cli import main
from stenolog.cli.agents import open_agent
from stenolog.cli.chat_input import InputHistory
from stenolog.cli.chat_pipe import ControlSequenceFilter
from stenolog.cli.config import AgentOptions
from stenolog.cli.picker import find_start
from stenolog.stores.open_store import open_store

Steno = Callable[..., Result]
PROGRAM = "from stenolog.cli import main; main(prog_name='steno')"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a home of its own and no keys in the environment."""
    for name in list(os.environ):
        if name.endswith("_API_KEY") or name.startswith(("STENO_", "OLLAMA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    # No Ollama of this machine: a port that nobody listens on.
    monkeypatch.setenv("OLLAMA_HOST", "http://127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chat(*arguments: str, typed: str = "", model: str | None = "scripted") -> Result:
    """`steno chat` with these lines on its stdin."""
    chosen = [] if model is None else ["--model", model]
    return CliRunner().invoke(main, ["chat", *chosen, *arguments], input=typed, prog_name="steno")


class Chat:
    """`steno chat cli:a` in a process of its own, with pipes; its answer is read as it comes."""

    def __init__(self, typed: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "chat", "cli:a", "--model", "scripted"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(typed.encode())
        assert self.process.stdout is not None
        self.first = self.process.stdout.read(4).decode()

    def told(self) -> str:
        """The next line on stderr."""
        assert self.process.stderr is not None
        return self.process.stderr.readline().decode()

    def end(self, typed: str = "") -> tuple[int, str, str]:
        """The exit code, and all that was said and told."""
        said, told = self.process.communicate(typed.encode(), timeout=60)
        return self.process.returncode, self.first + said.decode(), told.decode()


def contents(key: str) -> list[object]:
    with open_store("workspace", read_only=True) as store:
        return [message.content for message in store.get_history(key)]


def only_key() -> str:
    with open_store("workspace", read_only=True) as store:
        (key,) = store.list_sessions()
    return key


# --- through a pipe --------------------------------------------------------------------------


def test_each_line_is_a_message_and_only_answers_go_to_stdout() -> None:
    ended = chat(typed="what time is it?\n\nhello\\\nworld")
    assert (ended.exit_code, ended.stderr) == (0, "")
    said = ended.stdout.splitlines()
    assert said[0].startswith("The tool says: ")
    assert said[1:3] == ["You said: hello", "world"]
    assert contents(only_key())[0] == "what time is it?"
    assert "hello\nworld" in contents(only_key())


@pytest.mark.parametrize("file", ["lines", os.devnull])
def test_stdin_can_be_a_file_or_dev_null(file: str) -> None:
    Path("lines").write_text("the time\n/quit\nnever\n")
    with Path(file).open() as lines:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, "chat", "cli:a", "--model", "scripted"],
            stdin=lines,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(contents("cli:a")) == (4 if file == "lines" else 0)


def test_empty_input_exits_with_0() -> None:
    ended = chat(typed="")
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "", "")


def test_commands_run_and_switch_sessions() -> None:
    ended = chat("cli:a", typed="the time\n/new\nwhat time\n/nonsense\n")
    assert ended.exit_code == 0
    assert "Started a new session." in ended.stdout
    assert "Unknown command /nonsense" in ended.stdout
    with open_store("workspace", read_only=True) as store:
        new = [key for key in store.list_sessions() if key != "cli:a"]
        assert [store.get_history(key)[0].content for key in ("cli:a", *new)] == [
            "the time",
            "what time",
        ]


def test_failed_turn_is_reported_and_sets_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STENO_MODELS__BAD__BASE_URL", "http://127.0.0.1:1/v1")
    monkeypatch.setenv("STENO_MODELS__BAD__MODEL", "x")
    monkeypatch.setenv("STENO_MODELS__BAD__RETRIES", "0")
    ended = chat("cli:a", typed="hello\n/context\n", model="bad")
    assert ended.exit_code == 1
    assert "Your message is saved; use /retry to try again." in ended.stderr
    # It goes on with what is left of the input.
    assert "Next request to" in ended.stdout
    assert contents("cli:a") == ["hello"]


def test_closed_pipe_ends_the_command_silently() -> None:
    chat = Chat("long\nsecond\n")
    assert chat.process.stdout is not None
    assert chat.process.stderr is not None
    with chat.process:
        chat.process.stdout.close()
        said = chat.process.stderr.read()
    assert (chat.process.returncode, said) == (141, b"")
    assert "second" not in contents("cli:a")


def test_sigterm_lets_the_answer_finish() -> None:
    chat = Chat("markdown\n")
    chat.process.send_signal(signal.SIGTERM)
    code, said, _ = chat.end()
    assert code == 0
    assert said.startswith("# What")
    assert said.endswith("this page is always the same.\n")


def test_second_sigterm_stops_at_once_and_names_the_session() -> None:
    chat = Chat("long\n")
    chat.process.send_signal(signal.SIGTERM)
    assert chat.told().startswith("Waiting up to 10 s for the answer to finish.")
    chat.process.send_signal(signal.SIGTERM)
    code, _, told = chat.end()
    assert code == 128 + signal.SIGTERM
    assert told.splitlines()[-1] == (
        "The answer is not finished. All messages are stored; resume with `steno chat cli:a`."
    )
    assert contents("cli:a") == ["long"]


def test_ctrl_c_stops_the_answer_but_not_the_program() -> None:
    chat = Chat("long\n")
    chat.process.send_signal(signal.SIGINT)
    code, said, told = chat.end("the time\n")
    assert "The tool says: " in said
    assert told == "Stopped. The answer so far is saved; /retry asks for another answer.\n"
    assert code == 130
    assert str(contents("cli:a")[1]).endswith("[interrupted]")


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


# --- without a model, and wrong options ------------------------------------------------------


def test_chat_without_a_model_prints_three_lines_of_advice() -> None:
    ended = chat(typed="hello\n", model=None)
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert len(ended.stderr.splitlines()) == 3
    assert ended.stderr.startswith("Error: No model was found.")
    assert "--model scripted" in ended.stderr
    assert not Path("workspace").exists()


@pytest.mark.parametrize(
    "arguments", [["k", "-c"], ["k", "-r", "x"], ["-c", "-r"]], ids=lambda given: " ".join(given)
)
def test_selecting_the_session_twice_is_wrong_usage(steno: Steno, arguments: list[str]) -> None:
    result = steno("chat", *arguments)
    assert result.exit_code == 2
    assert "Select the session only once: with KEY, -c or -r." in result.stderr


def test_unknown_agent_is_rejected_by_name() -> None:
    ended = chat("--agent", "ada", typed="x\n")
    assert ended.exit_code == 1
    assert "There is no agent 'ada'" in ended.stderr


def test_configured_agent_has_its_own_sessions_and_prompt(here: Path) -> None:
    Path("mine.toml").write_text('[agents.ada]\nmodel = "scripted"\nsystem = "You are Ada."\n')
    ended = chat("cli:a", "--agent", "ada", "--config", "mine.toml", typed="the time\n", model=None)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert not (here / "workspace" / "sessions").exists()
    assert list((here / "workspace").rglob("cli%3Aa.jsonl"))


def test_default_agent_can_be_selected_by_name() -> None:
    assert chat("cli:a", "--agent", "main", typed="the time\n").exit_code == 0
    assert contents("cli:a")[0] == "the time"


def test_help_does_not_import_the_chat() -> None:
    program = (
        "import sys; from stenolog.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "slow = {'rich', 'prompt_toolkit', 'markdown_it', 'httpx2'}\n"
        "print('imported:', *slow & {name.partition('.')[0] for name in sys.modules})\n"
        "print('imported:', *{'stenolog.agent.loop'} & set(sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.splitlines()[-2:] == ["imported:", "imported:"]


# --- which session ---------------------------------------------------------------------------


@pytest.fixture
def talks() -> None:
    """Three sessions: two of a terminal, one of a chat app, which changed last."""
    with open_store("workspace") as store:
        for key, question in (
            ("cli:1:default", "About mountains"),
            ("cli:2:default", "About rivers"),
            ("telegram:7", "About rivers too"),
        ):
            store.add_message(key, "user", question)
            store.add_message(key, "assistant", "Yes, about the sea.")


@pytest.mark.usefixtures("talks")
def test_chat_starts_a_new_session() -> None:
    chat(typed="the time\n")
    with open_store("workspace", read_only=True) as store:
        assert len(store.list_sessions()) == 4
        (key,) = set(store.list_sessions()) - {"cli:1:default", "cli:2:default", "telegram:7"}
    assert key.startswith("cli:")
    assert key.endswith(":default")


@pytest.mark.usefixtures("talks")
def test_continue_selects_the_last_cli_session() -> None:
    assert chat("-c", typed="the time\n").exit_code == 0
    assert contents("cli:2:default")[2] == "the time"


def test_continue_without_sessions_starts_a_new_one() -> None:
    assert chat("-c", typed="the time\n").exit_code == 0
    assert contents(only_key())[0] == "the time"


@pytest.mark.usefixtures("talks")
def test_resume_selects_the_only_match() -> None:
    assert chat("-r", "mountains", typed="the time\n").exit_code == 0
    assert contents("cli:1:default")[2] == "the time"


@pytest.mark.usefixtures("talks")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "rivers",
            "Error: 2 sessions match 'rivers'. Choose one by its key: steno chat KEY\n"
            "  telegram:7  About rivers too\n"
            "  cli:2:default  About rivers\n",
        ),
        ("sea", "Error: 3 sessions match 'sea'"),
        ("zebra", "Error: No session matches 'zebra'. `steno list` lists all sessions.\n"),
        ("", "Error: Which session? Choose one by its key"),
    ],
)
def test_ambiguous_resume_without_a_terminal_lists_matches(text: str, words: str) -> None:
    ended = chat("-r", text, typed="the time\n") if text else chat("-r", typed="the time\n")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr.startswith(words)


@pytest.mark.usefixtures("talks")
def test_an_interrupted_turn_is_answered_with_the_next_message() -> None:
    with open_store("workspace") as store:
        store.add_full_message(
            "cli:1:default", mark_received({"role": "user", "content": "unanswered"})
        )
    assert chat("cli:1:default", typed="the time\n").exit_code == 0
    said = contents("cli:1:default")
    assert said[2:4] == ["unanswered", "the time"]
    assert len(said) == 7


# --- what was typed --------------------------------------------------------------------------


def test_input_history_is_private_and_newest_first(tmp_path: Path) -> None:
    file = tmp_path / "state" / "typed"
    history = InputHistory(file)
    history.store_string("one\ntwo")
    history.store_string("three")
    assert list(InputHistory(file).load_history_strings()) == ["three", "one\ntwo"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_long_input_history_keeps_the_newer_half(tmp_path: Path) -> None:
    file = tmp_path / "typed"
    history = InputHistory(file)
    for number in range(300):
        history.store_string(f"{number} {5_000 * 'x'}")
    found = list(InputHistory(file).load_history_strings())
    assert found[0].startswith("299 ")
    assert len(found) < 150
    assert file.stat().st_mode & 0o777 == 0o600


def test_chat_works_if_the_input_history_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = InputHistory(tmp_path / "file" / "typed")
    history.store_string("x")
    assert list(history.load_history_strings()) == []
    (tmp_path / "damaged").write_bytes(b'\xff\n"one"\nnot json\n3\n')
    assert list(InputHistory(tmp_path / "damaged").load_history_strings()) == []


def test_session_model_is_used_if_no_model_is_found() -> None:
    with open_store("workspace") as store:
        store.add_message("cli:a:default", "user", "hello")
        store.add_message("cli:a:default", "assistant", "Hello.")
        store.set_meta("cli:a:default", chat_model="scripted")
        store.add_message("cli:b:default", "user", "bees")
        store.add_message("cli:b:default", "assistant", "Yes.")
    for arguments in (["cli:a:default"], ["-r", "hello"]):
        ended = chat(*arguments, typed="the time\n", model=None)
        assert (ended.exit_code, ended.stderr) == (0, "")
        assert ended.stdout.startswith("The tool says: ")
    ended = chat("-c", typed="/new\nthe time\n", model=None)
    assert ended.exit_code == 1
    assert "No model was found; choose one for this session with /model NAME." in ended.stderr


@pytest.mark.parametrize("chosen", [None, "opnai/x"])
def test_session_without_any_model_is_not_started(chosen: str | None) -> None:
    with open_store("workspace") as store:
        store.add_message("cli:a:default", "user", "hello")
        store.set_meta("cli:a:default", chat_model=chosen)
    ended = chat("-c", typed="the time\n", model=None)
    assert ended.exit_code == 1
    assert "No model was found. Set an API key" in ended.stderr
    assert ("did you mean 'openai/x'?" in ended.stderr) == (chosen is not None)
    assert contents("cli:a:default") == ["hello"]


def test_commands_print_plain_text_through_a_pipe() -> None:
    ended = chat("cli:a", typed="/context\n/help\n")
    assert "Next request to" in ended.stdout
    assert "- /undo undo the last" in ended.stdout
    assert "`" not in ended.stdout


def test_chat_with_a_part_of_a_key_names_the_session_that_has_the_whole_key() -> None:
    async def words(key: str) -> str:
        opened = open_agent(AgentOptions(model="scripted"))
        try:
            start = await find_start(opened, key=key)
        finally:
            await opened.loop.close()
        assert start is not None
        assert start.key == key
        return start.description

    with open_store("workspace") as store:
        store.add_message("codex:20c7a18b-7d9d", "user", "hello")
    assert asyncio.run(words("20c7a18b")) == (
        "New session with this key. To continue codex:20c7a18b-7d9d, use the whole key."
    )
    assert asyncio.run(words("cli:b")) == "New session with this key."
    assert asyncio.run(words("codex:20c7a18b-7d9d")) == ""


def test_new_chat_mentions_an_interrupted_session() -> None:
    async def words() -> str:
        opened = open_agent(AgentOptions(model="scripted"))
        try:
            start = await find_start(opened)
        finally:
            await opened.loop.close()
        assert start is not None
        return start.description

    with open_store("workspace") as store:
        store.add_message("cli:a:default", "user", "hello")
    assert asyncio.run(words()) == (
        "New session. The last one was interrupted; `steno chat -c` finishes the answer: hello"
    )
    with open_store("workspace") as store:
        store.add_message("cli:a:default", "assistant", "Hello.")
    told = "New session. `steno chat -c` continues the last one: hello"
    assert asyncio.run(words()) == told
