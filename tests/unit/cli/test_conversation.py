"""A conversation behind the line of a terminal: a real loop and store, keys from a pipe."""

import asyncio
import io
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input.base import PipeInput
from prompt_toolkit.input.defaults import create_pipe_input
from prompt_toolkit.output.vt100 import Vt100_Output

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.spec import AgentSpec
from stenolog.catalog.message_metadata import mark_received
from stenolog.cli.agents import OpenAgent, Signals, close_agent
from stenolog.cli.chat import ChatStart, TerminalChat
from stenolog.providers.chat_model import Delta
from stenolog.settings.values import Settings
from stenolog.stores.open_store import open_store
from support.terminal import Terminal

KEY = "cli:one:default"

pytestmark = pytest.mark.usefixtures("here")


class Gated:
    """A model that says a word and then waits until it may go on."""

    name = "gated"

    def __init__(self, *, open_: bool = False) -> None:
        self.gate = asyncio.Event()
        self.asked: list[list[Mapping[str, Any]]] = []
        if open_:
            self.gate.set()

    async def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> AsyncGenerator[Delta, None]:
        del tools, schema, max_tokens
        self.asked.append(list(messages))
        last = next(one["content"] for one in reversed(messages) if one["role"] == "user")
        yield Delta(text=f"To {last}: ")
        await self.gate.wait()
        yield Delta(text="done.", finish="stop")

    async def close(self) -> None:
        pass


class Written(io.StringIO):
    """A stream that a terminal shows."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal

    def write(self, text: str) -> int:
        self._terminal.feed(text)
        return len(text)


class Talk:
    """A conversation that is going on, and its terminal."""

    def __init__(self, source: PipeInput, terminal: Terminal, *, open_: bool, place: str) -> None:
        self.model = Gated(open_=open_)
        self.agent = AgentInstance.open(
            AgentSpec(sessions=place, consolidation=False), model=self.model
        )
        self.opened = OpenAgent(
            loop=AgentLoop(AgentRegistry([self.agent])), agent=self.agent, settings=Settings()
        )
        self.signals = Signals()
        self.source = source
        self.terminal = terminal
        self.told: list[str] = []
        self.talk = TerminalChat(self.opened, KEY)

    def type(self, text: str) -> None:
        self.source.send_text(text)

    @property
    def shown(self) -> str:
        """What is on the screen, and what scrolled away."""
        return self.terminal.all

    @staticmethod
    def history(key: str = KEY) -> list[object]:
        with open_store("workspace", read_only=True) as store:
            return [message.content for message in store.get_history(key)]

    async def until(self, there: Callable[[], object]) -> None:
        try:
            async with asyncio.timeout(20):
                while not there():  # noqa: ASYNC110 - what is written to a terminal has no event
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pytest.fail(f"waited in vain; this is shown:\n{self.shown[-2000:]}")


Act = Callable[[Talk], Awaitable[None]]


@pytest.fixture
def source() -> Iterator[PipeInput]:
    with create_pipe_input() as opened:
        yield opened


def talk(
    source: PipeInput,
    act: Act,
    *,
    start: ChatStart | None = None,
    open_: bool = False,
    place: str = "workspace",
) -> Talk:
    """Have this conversation until it has been left, and close it."""
    terminal = Terminal(rows=30, columns=80)
    size = Size(rows=30, columns=80)
    output = Vt100_Output(Written(terminal), lambda: size, term="xterm", enable_cpr=False)

    async def main() -> Talk:
        one = Talk(source, terminal, open_=open_, place=place)
        if start is not None:
            one.talk.greet(start)
        running = asyncio.create_task(one.talk.run(one.signals))
        acting = asyncio.ensure_future(act(one))
        try:
            await asyncio.wait({running, acting}, return_when=asyncio.FIRST_COMPLETED)
            await acting
            one.type("\x04")
            await asyncio.wait_for(running, 30)
        finally:
            running.cancel()
            await close_agent(one.opened, one.signals, one.told.append)
            await one.talk.wait_for_turns()
        return one

    with create_app_session(input=source, output=output):
        return asyncio.run(main())


def test_message_is_shown_answered_and_counted(source: PipeInput) -> None:
    async def act(one: Talk) -> None:
        one.type("hello\r")
        await one.until(lambda: "gated · context" in one.shown and not one.talk.is_busy)

    one = talk(source, act, open_=True)
    assert one.history() == ["hello", "To hello: done."]
    status = "gated · context 1% (≈196 of 27,904) · 0.0 s"
    assert re.sub(r"\d+\.\d s", "0.0 s", one.shown).splitlines() == [
        "> hello",
        "",
        "To hello: done.",
        "",
        status,
        "",
        f"Resume with: steno chat {KEY}",
    ]
    assert one.told == []


def test_input_during_an_answer_is_stored_at_once_and_answered_next(source: PipeInput) -> None:
    async def act(one: Talk) -> None:
        one.type("first\r")
        await one.until(lambda: "To first:" in one.shown)
        one.type("second\r")
        await one.until(lambda: "waiting: second" in one.shown)
        await one.until(lambda: one.history() == ["first", "second"])
        assert "> second" not in one.shown
        one.model.gate.set()
        await one.until(lambda: not one.talk.is_busy)

    one = talk(source, act)
    assert one.history() == ["first", "second", "To first: done.", "To second: done."]
    done = one.shown.index("To first: done.")
    assert done < one.shown.index("\n> second\n") < one.shown.index("To second: done.")


def test_ctrl_c_stops_the_answer_and_leaves_if_pressed_twice(
    source: PipeInput,
) -> None:
    async def act(one: Talk) -> None:
        one.type("first\r")
        await one.until(lambda: "To first:" in one.shown)
        one.type("\x03")
        await one.until(lambda: not one.talk.is_busy)
        one.type("half")
        await one.until(lambda: "> half" in one.shown)
        one.type("\x03")
        await one.until(lambda: "> half" not in one.shown)
        one.type("\x03")
        await one.until(lambda: "Press Ctrl-C again to leave" in one.shown)
        one.type("\x03")

    one = talk(source, act)
    assert one.history() == ["first", "To first: [interrupted]"]
    assert "Stopped. The answer so far is saved; /retry asks for another answer." in one.shown


def test_waiting_message_is_answered_after_a_stop(source: PipeInput) -> None:
    async def act(one: Talk) -> None:
        one.type("first\r")
        await one.until(lambda: "To first:" in one.shown)
        one.type("second\r")
        await one.until(lambda: one.history() == ["first", "second"])
        one.type("\x03")
        await one.until(lambda: "To second:" in one.shown)
        one.model.gate.set()
        await one.until(lambda: not one.talk.is_busy)

    assert talk(source, act).history()[-1] == "To second: done."


def test_what_waits_behind_a_command_is_reported_when_the_user_leaves(source: PipeInput) -> None:
    async def act(one: Talk) -> None:
        one.type("first\r")
        await one.until(lambda: "To first:" in one.shown)
        one.type("/context\rsecond\r")
        await one.until(lambda: "waiting: second" in one.shown)

    one = talk(source, act)
    assert one.history() == ["first", "To first: [interrupted]"]
    assert "Not sent: /context\nNot sent: second" in one.shown
    assert "Next request to" not in one.shown
    assert one.talk.exit_code == 3


def test_leaving_does_not_wait_for_an_answer(source: PipeInput) -> None:
    async def act(one: Talk) -> None:
        one.type("first\r")
        await one.until(lambda: "To first:" in one.shown)
        one.type("second\r")
        await one.until(lambda: one.history() == ["first", "second"])

    one = talk(source, act)
    assert one.history() == ["first", "second", "To first: [interrupted]"]
    assert "Saved, not answered yet." in one.shown
    assert one.told == []


def test_commands_that_change_the_context_reset_the_status_line(source: PipeInput) -> None:
    async def act(one: Talk) -> None:
        one.type("hello\r")
        await one.until(lambda: "context 1%" in one.talk.status.text() and not one.talk.is_busy)
        one.type("/clear\r")
        await one.until(lambda: "are hidden" in one.shown and not one.talk.is_busy)
        assert one.talk.status.text() == "gated"
        one.type("again\r")
        await one.until(lambda: "context 1%" in one.talk.status.text() and not one.talk.is_busy)
        one.type("/undo\r")
        await one.until(lambda: "Undid" in one.shown and not one.talk.is_busy)
        assert one.talk.status.text() == "gated"

    talk(source, act, open_=True)


def test_stop_without_an_answer_is_reported(source: PipeInput) -> None:
    async def act(one: Talk) -> None:
        one.type("/stop\r")
        await one.until(lambda: "No answer is being written." in one.shown)

    talk(source, act)


def test_history_search_shows_the_query(source: PipeInput) -> None:
    async def act(one: Talk) -> None:
        one.type("remember\r")
        await one.until(lambda: one.history()[1:] and not one.talk.is_busy)
        one.type("\x12mem")
        await one.until(lambda: "> remember" in one.terminal.screen.splitlines()[-3])
        one.type("\r\x03")

    talk(source, act, open_=True)


def test_message_after_a_command_goes_to_the_new_session(source: PipeInput) -> None:
    async def act(one: Talk) -> None:
        one.type("first\r")
        await one.until(lambda: "To first:" in one.shown)
        one.type("/new\rsecond\r")
        await one.until(lambda: "waiting: second" in one.shown)
        one.model.gate.set()
        await one.until(lambda: not one.talk.is_busy)

    one = talk(source, act)
    assert one.talk.key != KEY
    assert one.history() == ["first", "To first: done."]
    assert one.history(one.talk.key)[0] == "second"


def test_backslash_and_alt_enter_start_a_new_line(source: PipeInput) -> None:
    async def act(one: Talk) -> None:
        one.type("one\\\rtwo\x1b\rthree\nfour\r")
        await one.until(lambda: one.history()[1:])

    assert talk(source, act, open_=True).history()[0] == "one\ntwo\nthree\nfour"


def test_pasted_lines_are_one_message(source: PipeInput) -> None:
    async def act(one: Talk) -> None:
        one.type("\x1b[200~one\rtwo\x1b[201~\r")
        await one.until(lambda: one.history()[1:])

    assert talk(source, act, open_=True).history()[0] == "one\ntwo"


def test_arrow_key_recalls_earlier_input(source: PipeInput, here: Path) -> None:
    async def act(one: Talk) -> None:
        one.type("remember\r")
        await one.until(lambda: one.history()[1:] and not one.talk.is_busy)
        one.type("\x1b[A\r")
        await one.until(lambda: len(one.history()) == 4)

    assert talk(source, act, open_=True).history()[2] == "remember"
    (file,) = (here / "state").rglob("chat-history")
    assert file.read_text().endswith("\n+remember\n")


def test_commands_are_completed(source: PipeInput) -> None:
    async def act(one: Talk) -> None:
        one.type("/con")
        await one.until(lambda: "show what is sent" in one.shown)
        one.type("\t\r\r")
        await one.until(lambda: "Next request to" in one.shown)

    talk(source, act, open_=True)


def test_help_lists_the_keys(source: PipeInput) -> None:
    async def act(one: Talk) -> None:
        one.type("/help\r")
        await one.until(lambda: "Alt-Enter" in one.shown)

    assert "/compact" in talk(source, act).shown


@pytest.mark.parametrize("words", ["/quit", "/exit"])
def test_quit_leaves_during_an_answer(source: PipeInput, words: str) -> None:
    async def act(one: Talk) -> None:
        one.type("first\r")
        await one.until(lambda: "To first:" in one.shown)
        one.type(f"{words}\r")

    assert talk(source, act).history() == ["first", "To first: [interrupted]"]


def test_resumed_session_shows_last_turns_and_resumes_an_interrupted_turn(
    source: PipeInput,
) -> None:
    with open_store("workspace") as store:
        for number in range(6):
            store.add_message(KEY, "user", f"question {number}")
            store.add_message(KEY, "assistant", f"**answer** {number}\n" + "more\n" * 9)
        store.add_full_message(KEY, mark_received({"role": "user", "content": "unanswered"}))

    async def act(one: Talk) -> None:
        await one.until(lambda: not one.talk.is_busy)

    start = ChatStart(key=KEY, description="About questions (13 messages)", resumes=True)
    one = talk(source, act, start=start, open_=True)
    assert one.history()[-2:] == ["unanswered", "To unanswered: done."]
    shown = one.shown
    assert "About questions (13 messages)" in shown
    assert "question 5" in shown
    assert "answer 5" in shown, "laid out, as it was when it was said"
    assert "question 2" not in shown
    assert "more lines" in shown
    assert shown.index("Resuming it") < shown.index("To unanswered: done.")


def test_turn_copied_by_a_fork_is_not_resumed(source: PipeInput) -> None:
    with open_store("workspace") as store:
        store.add_full_message(
            "cli:source", mark_received({"role": "user", "content": "unanswered"})
        )
        store.fork("cli:source", KEY)

    async def act(one: Talk) -> None:
        one.type("hello\r")
        await one.until(lambda: "hello: done." in one.shown and not one.talk.is_busy)

    one = talk(source, act, start=ChatStart(key=KEY, description="", resumes=True), open_=True)
    assert "Resuming it" not in one.shown


def test_another_session_is_chosen_from_the_list(source: PipeInput) -> None:
    with open_store("workspace") as store:
        for key, words in (("cli:a:default", "mountains"), ("cli:b:default", "mountain lakes")):
            store.add_message(key, "user", words)
            store.add_message(key, "assistant", f"Yes, {words}.")

    async def act(one: Talk) -> None:
        one.type("/resume mountain\r")
        await one.until(lambda: "Resume a session" in one.shown)
        one.type(" lak\r")
        await one.until(lambda: one.talk.key == "cli:b:default")
        one.type("more\r")
        await one.until(lambda: len(one.history("cli:b:default")) == 4)

    one = talk(source, act, open_=True)
    assert "Yes, mountain lakes." in one.shown


def test_only_matching_session_is_resumed_at_once(source: PipeInput) -> None:
    with open_store("workspace") as store:
        store.add_message("cli:a:default", "user", "mountains")
        store.add_message("cli:a:default", "assistant", "Yes.")

    async def act(one: Talk) -> None:
        one.type("/resume mount\r")
        await one.until(lambda: one.talk.key == "cli:a:default")

    assert "Resume a session" not in talk(source, act, open_=True).shown


def test_in_memory_sessions_write_no_input_history(source: PipeInput, here: Path) -> None:
    async def act(one: Talk) -> None:
        one.type("secret\r")
        await one.until(lambda: "To secret: done." in one.shown)

    talk(source, act, open_=True, place="memory:")
    assert list(here.iterdir()) == []
