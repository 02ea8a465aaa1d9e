"""`steno ask`: one question, one answer, for scripts."""

import asyncio
import os
import signal
import stat
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

import click

from stenolog.cli.config import Options, agent_options
from stenolog.cli.output import json_text, printable, sentence
from stenolog.sessions.keys import cli_sender

if TYPE_CHECKING:
    from stenolog.agent.turn_events import Answer, InboundMessage
    from stenolog.cli.agents import Opened
    from stenolog.cli.chat_pipe import Teller
    from stenolog.cli.chat_screen import Meter


@click.command("ask")
@click.argument("question", required=False)
@click.option(
    "--session", "key", metavar="KEY", help="Ask in this session.  [default: a new session]"
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@agent_options
@click.pass_context
def ask_command(
    ctx: click.Context, question: str | None, key: str | None, as_json: bool, options: Options
) -> None:
    """Ask an agent one question and print the answer.

    Without QUESTION, or with -, the question is read from stdin. With QUESTION, piped text is
    appended to it. The answer goes to stdout while it is written, everything else to stderr. Both
    are stored, so `steno chat -c` continues the conversation.

    Example: steno ask 'What is wrong here?' < error.log

    With --json the answer is printed exactly, with key, seq, outcome, saved, model, usage and
    tools; otherwise control characters are removed. In a shell loop that reads lines itself, add
    `< /dev/null`.

    Exit codes: 0 answered, 1 not answered, 2 wrong usage, 3 answered but not saved, 130 stopped
    with Ctrl-C.
    """
    asked = _question(question)
    ctx.exit(asyncio.run(_ask(options, asked, key=key, as_json=as_json)))


def _question(given: str | None) -> str:
    if given is not None and given != "-":
        piped = _piped()
        text = f"{given}\n\n{piped}" if piped.strip() else given
    elif sys.stdin is None or (given is None and sys.stdin.isatty()):
        raise click.UsageError("The question is missing. Example: steno ask 'How tall is K2?'")
    else:
        text = _read()
    if not text.strip():
        raise click.UsageError("The question is empty.")
    return text.strip()


def _piped() -> str:
    """Return piped input that accompanies a question. Never waits for a terminal."""
    if sys.stdin is None:
        return ""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except OSError:
        return _read()  # stdin was replaced by an object without a file descriptor
    return _read() if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else ""


def _read() -> str:
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    return sys.stdin.read()


async def _ask(options: Options, question: str, *, key: str | None, as_json: bool) -> int:
    # Imported late: slow, and not needed for --help.
    from stenolog.agent.commands import new_key, parse_command
    from stenolog.agent.turn_events import InboundMessage
    from stenolog.cli.agents import (
        CHANNEL,
        NOT_SAVED,
        SENDER,
        Signals,
        close_agent,
        open_agent,
        session_model,
    )
    from stenolog.cli.chat_pipe import Teller, code_of
    from stenolog.cli.chat_screen import Meter

    opened = open_agent(options, model_of_session=key is not None)
    signals = Signals()
    wanted = key or new_key(CHANNEL, SENDER)
    try:
        model = session_model(opened, wanted)
    except BaseException:
        await close_agent(opened, signals, _say)
        raise
    meter = Meter(model.name)
    for problem in opened.agent.problems:
        _say(sentence(problem))
    # A question is never a command, whatever it starts with.
    content = question if parse_command(question) is None else f"/{question}"
    inbound = InboundMessage(key=wanted, content=content, sender=cli_sender(wanted))
    asking = _Asking(opened, inbound)
    teller = Teller(
        meter, talkative=sys.stderr.isatty(), quiet=as_json, once=True, unread=asking.stop
    )
    hearing = asyncio.create_task(asking.answered(teller))
    ending = asyncio.create_task(signals.asked.wait())
    try:
        await asyncio.wait({hearing, ending}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        code = await close_agent(opened, signals, _say)
        ending.cancel()
    answer = await hearing
    if as_json:
        click.echo(json_text(_fields(answer, teller, meter)))
    # The outcome of the question takes precedence over NOT_SAVED.
    return (code_of(answer) or code) if code == NOT_SAVED else (code or code_of(answer))


class _Asking:
    """A question in progress. Ctrl-C or a closed stdout stops the answer."""

    def __init__(self, opened: "Opened", inbound: "InboundMessage") -> None:
        self._opened = opened
        self._inbound = inbound
        self._stopping: asyncio.Task[bool] | None = None

    def stop(self) -> None:
        stopping = self._opened.loop.stop(self._inbound.key, agent=self._opened.agent.id)
        self._stopping = asyncio.create_task(stopping)

    async def answered(self, teller: "Teller") -> "Answer":
        """Stream the answer to stdout and return it. Raises UsageError, and OSError of stdout."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.stop)
        try:
            answer = await self._opened.loop.handle(
                self._inbound, on_event=teller.tell, agent=self._opened.agent.id
            )
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        teller.finish(answer)
        return answer


def _fields(answer: "Answer", teller: "Teller", meter: "Meter") -> dict[str, Any]:
    failed = answer.outcome == "failed"
    fields = {
        "key": answer.key,
        "answer": "" if failed else answer.text,
        "seq": answer.seq,
        "outcome": answer.outcome,
        "saved": answer.saved,
        "model": meter.model,
        "usage": {
            "input_tokens": meter.input_tokens,
            "output_tokens": meter.output_tokens,
            "cached_tokens": meter.cached_tokens,
        },
        "tools": teller.tools,
    }
    return {**fields, "error": answer.text} if failed else fields


def _say(words: str) -> None:
    click.echo(printable(words), err=True)
