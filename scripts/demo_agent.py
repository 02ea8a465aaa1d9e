"""Agent process of the demo, with two tools, a model and a workspace.

The process first resumes a turn that a killed process left unfinished. Then the process answers
each line of its input (an id, a tab, a text) and prints one line for each event.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import Annotated

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.spec import AgentSpec
from stenolog.agent.tools import tool
from stenolog.agent.turn_events import (
    Answer,
    Event,
    InboundMessage,
    ModelCalled,
    SummaryCreated,
    ToolFinished,
    ToolStarted,
)
from stenolog.context.window import Limits
from stenolog.providers.chat_model import ChatModel
from stenolog.providers.local_model import LocalModel, find_weights
from stenolog.providers.openai_chat import OpenAIChat

PRICES = {"cake": "32 euros", "coffee": "3 euros", "candles": "4 euros"}
ORDERS = Path("orders.txt")
SENDER = "cli:default"
"""The user who writes. Sessions of one sender share a memory."""


@tool(repeatable=True)
async def price(item: Annotated[str, "cake, coffee or candles"]) -> str:
    """Look up the price of an item. This changes nothing."""
    await asyncio.sleep(0.5)
    return PRICES.get(item, "not on the list")


@tool
def order(item: str) -> str:
    """Order an item from the shop. An order must not be sent twice."""
    with ORDERS.open("a") as orders:
        orders.write(f"{item}\n")
    time.sleep(20)  # the shop is slow to confirm
    return "confirmed"


async def main(key: str, model: ChatModel, limits: Limits) -> None:
    """Answer the messages of one session until the input ends."""
    spec = AgentSpec(
        sessions="workspace",
        system="You help Ada. Be brief.",
        limits=limits,
        # A local model takes a minute to write notes. Messages are recalled even without notes.
        consolidation=not isinstance(model, LocalModel),
    )
    agent = AgentInstance.open(spec, model=model, tools=[price, order])
    loop = AgentLoop(AgentRegistry([agent]))
    for answer in await loop.resume(on_event=tell):
        tell_answer(answer)
    tell_line("ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        id, _, text = line.rstrip("\n").partition("\t")
        said = InboundMessage(key=key, content=text, id=id, sender=SENDER)
        tell_answer(await loop.handle(said, on_event=tell))
        await loop.wait_until_idle()  # until the notes and the summary are written
        tell_line("ready")
    await loop.close()


def tell(event: Event) -> None:
    """Print an event of a turn."""
    match event:
        case ModelCalled():
            tell_line("asked", f"{event.tokens} tokens sent, {event.recalled} recalled")
        case ToolStarted():
            tell_line("calls", f"{event.name} {event.arguments}")
        case ToolFinished():
            tell_line("result", f"{event.name} says {event.text}")
        case SummaryCreated():
            tell_line("compacted", f"{event.report.reason}: {event.report}")


def tell_answer(answer: Answer) -> None:
    """Print the outcome of a message."""
    tell_line(answer.outcome, answer.text)


def tell_line(kind: str, words: str = "") -> None:
    """Print one line: the kind and the text, separated by a tab."""
    print(kind, " ".join(words.split()), sep="\t", flush=True)


def open_model(name: str) -> ChatModel:
    """Return a client for the model at this address, or the local model."""
    if name != "local":
        return OpenAIChat("scripted", base_url=name)
    weights = find_weights()
    assert weights is not None
    return LocalModel(weights, extra={"max_tokens": 60, "temperature": 0})


if __name__ == "__main__":
    wanted = Limits(max_context_tokens=int(sys.argv[3]))
    asyncio.run(main(sys.argv[1], open_model(sys.argv[2]), wanted))
