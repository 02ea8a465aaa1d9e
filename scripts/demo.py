"""An agent from end to end, without a key or a network: killed, restarted, compacted, remembering.

What each step claims is read from the store, not believed; it exits with 1 and says what did not
hold. KEEP=1 leaves the files, and MODEL=local talks to a small language model on this machine.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import demo_model
from demo_stage import Agent, Failed, expect, heading, history, info, shell, tell, wait_for

from stenolog.agent.standing import answer_to, standing
from stenolog.agent.turn import CUT_OFF
from stenolog.providers.local import find_weights, is_installed
from stenolog.providers.model_server import ModelServer

# Two sessions of one user; the part in the middle tells them apart.
MONDAY = "cli:monday:default"
TUESDAY = "cli:tuesday:default"
LOG = "workspace/sessions/cli%3Amonday%3Adefault.jsonl"

ORDER = "Please order a chocolate cake, and what are candles?"
DIARY = "it rained, I baked, the oven was too hot, a neighbour came by and stayed for tea, " * 6
TOKENS = 2_000
"""The model's server refuses requests that are longer."""
SECONDS = 85
"""It never takes longer."""


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

    def talk(self) -> None:
        heading("1. A conversation with tools, in a process of its own")
        with Agent(MONDAY, self._model) as agent:
            agent.say("Hello! I am Ada, and I am allergic to hazelnuts.", id="m1")
            agent.say("What do cake and coffee cost?", id="m2")
        roles = [message.role for message in history(MONDAY)]
        expect(roles.count("user") == 2, "both messages are in the log")
        expect(not standing(history(MONDAY)).unfinished, "and both are answered")
        if self._scripted:
            calls = ["user", "assistant", "tool", "tool", "assistant"]
            expect(roles[-5:] == calls, "with the calls of the tools and what they said")
        tell("  The log is plain text, one line for each message:")
        shell(f"grep -c '\"kind\":\"message\"' {LOG}")
        shell(f"grep hazelnuts {LOG} | head -n 1")

    def kill(self) -> None:
        heading("2. kill -9 in the middle of a turn")
        with Agent(MONDAY, self._model) as agent:
            agent.send(ORDER, id="m3")
            agent.until("tool" if self._scripted else "asked", "order" if self._scripted else "")
            if self._scripted:
                wait_for(lambda: len(_orders()) == 1, "the order goes out to the shop")
            agent.kill()
        tell("  Killed. The order had just gone out, and the shop had not confirmed it yet.")
        left = standing(history(MONDAY))
        expect(_times_said(ORDER) == 1, "the message is in the log: it was, before the model knew")
        expect(left.unfinished, "the log says that its turn is not over")
        if self._scripted:
            calls = [call.name for call in left.open_calls]
            expect(calls[-1:] == ["order"], "it has the call of the tool, and no result")
        tell("  What there is to see of it:")
        shell(f"tail -n 2 {LOG}")
        shell("steno list")

    def restart(self) -> None:
        heading("3. A new process goes on with that turn")
        with Agent(MONDAY, self._model) as agent:
            tell("  The same message is delivered again, as chat apps do that heard of no answer:")
            outcome, words = agent.say(ORDER, id="m3")
        after = history(MONDAY)
        [asked] = [message for message in after if message.content == ORDER]
        answer = answer_to(after, asked.seq)
        expect(not standing(after).unfinished, "the turn has come to its end")
        expect(outcome == "again", "delivered again, the message was not answered twice")
        expect(answer is not None and _words(answer.content) == words, "it was told that answer")
        if self._scripted:
            results = {body.get("tool_call_id"): body.get("content") for body in _bodies(after)}
            expect(results["call_3"] == "4 euros", "the price, which may be asked twice, was")
            expect(results["call_4"] == CUT_OFF, "the order, which must not, has a mark instead")
            expect(len(_orders()) == 1, "and the shop has one order")

    def overflow(self) -> None:
        heading("4. The conversation grows too long for the model")
        tell(f"  Ada reads out her diary, until a request has more than {TOKENS:,} tokens.")
        with Agent(MONDAY, self._model, shown=False) as agent:
            page = 0
            while not agent.heard("compacted"):
                page += 1
                expect_quietly(page < 30, "a compaction")
                agent.say(f"Page {page}: {DIARY}", id=f"p{page}")
            tell(f"  After page {page}: {agent.heard('compacted')[-1]}.")
        shown, everything = history(MONDAY), history(MONDAY, full=True)
