"""A chat that names no session: it is answered, and nothing of it is kept or remembered."""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from stenolog.agent.events import Answer, Counted, Noticed, Said, Tell, Thought
from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.manner import Manner
from stenolog.context.window import build_window
from stenolog.errors import StenologError
from stenolog.providers.base import Reply


async def answered_only(
    loop: AgentLoop,
    instance: AgentInstance,
    talk: Sequence[Mapping[str, Any]],
    manner: Manner,
    tell: Tell,
) -> Answer:
    """The model's answer to what was sent, as much of it as fits; the agent's tools are not used.

    What the model's server raises is told by the answer. Raises UsageError.
    """
    model = await loop.run(instance.model_for, manner.model)
    context = await loop.run(instance.context, model)
    reply = Reply()
    try:
        window = await loop.run(
            build_window,
            talk,
            "",
            system=manner.system if manner.system is not None else "",
            tools=manner.tools,
            limits=context.limits,
            needs=instance.spec.needs,
            tokens=context.tokens,
        )
        stream = model.stream(
            window.messages, tools=manner.tools, schema=manner.schema, max_tokens=manner.max_tokens
        )
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                reply.add(delta)
                if delta.notice:
                    tell(Noticed(words=delta.notice))
                if delta.reasoning:
                    tell(Thought(text=delta.reasoning))
                if delta.text:
                    tell(Said(text=delta.text))
    except StenologError as error:
        return Answer(key="", text=str(error), outcome="failed", error=error)
    if reply.usage is not None:
        tell(Counted(usage=reply.usage))
    calls = tuple(reply.calls)
    return Answer(
        key="",
        text=reply.text,
        outcome="calls" if calls else "answered",
        calls=calls,
        finish=reply.finish,
        saved=False,
    )
