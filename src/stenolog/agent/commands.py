"""What a user says to the agent itself, in every front end: lines that begin with `/`.

What changes a session is done while nobody has its turn; while an answer is being made, here or in
another process, it says so, and /stop ends it. What needs the store says that it is off where a
stand-in keeps the sessions.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from msgspec import Struct

from stenolog.agent.events import Answer, Tell
from stenolog.agent.instance import AgentInstance
from stenolog.agent.rewriting import rewrite
from stenolog.agent.turns import Busy, Turns
from stenolog.catalog.answers import from_channel, origin_of
from stenolog.catalog.entries import Entry
from stenolog.catalog.owners import owner_of
from stenolog.context.shapes import speaks, words_of
from stenolog.errors import NoSuchNote, NothingToUndo, StenologError, UsageError
from stenolog.records import Message
from stenolog.sessions.keys import Parts, join, split
from stenolog.sessions.session_store import SessionStore
from stenolog.sessions.undoing import undo
from stenolog.stores.base import Store

_LISTED: Final = 15
_LOOKED_AT: Final = 2_000
"""So many sessions are looked through for those of one user."""
_WIDTH: Final = 40


class Command(Struct, frozen=True, kw_only=True):
    """One command, for the help and for completion."""

    arguments: str = ""
    help: str
    alone: bool = False
    """Whether it changes the session, and so cannot be carried out beside an answer."""


COMMANDS: Final = {
    "new": Command(help="begin a new session; this one stays and can be resumed"),
    "clear": Command(help="hide everything said so far; /undo brings it back", alone=True),
    "compact": Command(help="make a summary of all but the last turns now", alone=True),
    "undo": Command(help="take back the last /clear, /compact, /retry or /edit", alone=True),
    "retry": Command(help="have the last message answered again", alone=True),
    "edit": Command(arguments="TEXT", help="say the last message differently", alone=True),
    "context": Command(help="what the model sees, and how much room is left"),
    "stop": Command(help="end the answer that is being written; what was said is kept"),
    "fork": Command(
        arguments="[NAME]", help="go on in a copy; this session stays as it is", alone=True
    ),
    "sessions": Command(arguments="[TEXT]", help="your sessions, or those with these words"),
    "resume": Command(arguments="KEY|TEXT", help="go on in another session"),
    "memory": Command(arguments="[TEXT]", help="what is remembered of you"),
    "forget": Command(arguments="ID", help="forget one of these notes"),
    "model": Command(arguments="[NAME]", help="which model answers here, or another one"),
    "help": Command(help="these lines"),
}


class Given(Struct, frozen=True):
    """A command as it was given."""

    name: str
    rest: str


def parse(content: str | Sequence[Mapping[str, Any]]) -> Given | None:
    """The command in a message; None for any other message. `//text` is none, either."""
    if not isinstance(content, str) or not content.startswith("/"):
        return None
    found = re.match(r"/([a-zA-Z_]+)(?:@\w+)?(?:\s+(.*))?\Z", content.strip(), re.DOTALL)
    if found is None:
        return None
    return Given(found[1].lower(), (found[2] or "").strip())


def new_key(channel: str = "cli", sender: str = "default", *, at: datetime | None = None) -> str:
    """The key of a new session of a user, whose memory all their sessions share."""
    moment = (at or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    return join(Parts(channel, sender, f"{moment}-{secrets.token_hex(2)}"))


def key_beside(key: str, thread: str = "") -> str:
    """The key of a new session of the same user. Raises UsageError for a key of another form.

    Of such a one nobody can say whose it is, and no two users may be taken for one.
    """
    parts = split(key)
    if parts is None:
        raise UsageError(
            f"{key!r} is not of the form channel:sender, so no other session can be its user's"
        )
    if thread:
        return join(Parts(parts.channel, parts.who, thread))
    return new_key(parts.channel, parts.who)


class Commands:
    """Carries commands out for one agent."""

    def __init__(self, turns: Turns, instance: AgentInstance, *, everything: bool) -> None:
        """`everything`: all sessions may be shown and opened, not only those of one user."""
        self._turns = turns
        self._instance = instance
        self._everything = everything
        self._run = turns.threads.run

    async def carry_out(self, key: str, asked: Given, tell: Tell) -> Answer:
        """What came of it, in Markdown. Raises nothing of the store's: that is the answer, too."""
        known = COMMANDS.get(asked.name)
        if known is None:
            return _told(key, f"There is no /{asked.name}; /help shows what there is.")
        carry = getattr(self, f"_{asked.name}")
        try:
            if not known.alone:
                answer: Answer = await carry(key, asked.rest, tell)
                return answer

            async def change(sessions: SessionStore) -> Answer | None:
                changed: Answer | None = await carry(key, asked.rest, tell, sessions)
                return changed

            return await self._turns.alone(self._instance, key, change, tell=tell)
        except Busy:
            return _told(key, "An answer is being written; /stop ends it.")
        except StenologError as error:
            return _told(key, _sentence(error))

    # --- the session -------------------------------------------------------------------------

    async def _new(self, key: str, rest: str, tell: Tell) -> Answer:
        del rest, tell
        words = "A new session. The one before stays: /sessions shows it, /resume goes back."
        return _told(key_beside(key), words)

    async def _clear(self, key: str, rest: str, tell: Tell, sessions: SessionStore) -> Answer:
        del rest, tell
        if sessions.store is not None:
            await self._run(sessions.store.clear, key)
            return _told(key, "Everything said so far is hidden; /undo brings it back.")
        everything = await self._run(sessions.get_history, key)
        upto = everything[-1].seq if everything else 0
        done = await self._run(sessions.checkpoint, key, summary="", upto=upto)
        return _told(key, "Everything said so far is hidden." if done else self._not_saved())

    async def _compact(self, key: str, rest: str, tell: Tell, sessions: SessionStore) -> Answer:
        del rest, tell, sessions
        model = await self._run(self._instance.model_of, key)
        done = await self._turns.threads.ask(self._instance.context(model).compact, key)
        if done is None:
            return _told(key, "There is nothing that could be made shorter.")
        return _told(key, f"{done}.")

    async def _undo(self, key: str, rest: str, tell: Tell, sessions: SessionStore) -> Answer:
        del rest, tell
        try:
            undone = await self._run(undo, _store_of(sessions), key)
        except NothingToUndo:
            return _told(key, "There is nothing to take back.")
        shown = f"{_count(undone.shown)} back" if undone.shown else "the summary is as before"
        gone = f", {_count(undone.hid)} hidden" if undone.hid else ""
        return _told(key, f"Taken back, {_OPERATIONS.get(undone.op, undone.op)}: {shown}{gone}.")

    async def _retry(
        self, key: str, rest: str, tell: Tell, sessions: SessionStore
    ) -> Answer | None:
        del rest, tell
        return await self._again(key, sessions, None)

    async def _edit(self, key: str, rest: str, tell: Tell, sessions: SessionStore) -> Answer | None:
        del tell
        if not rest:
            return _told(key, "Write the new words behind it: /edit TEXT.")
        return await self._again(key, sessions, rest)

    async def _again(self, key: str, sessions: SessionStore, words: str | None) -> Answer | None:
        """Have the last message be the last again, or have it say these words instead."""

        def until_the_last(history: list[Message]) -> list[Message | dict[str, Any]] | None:
            last = _last_said(history)
            if last is None:
                return None
            said: Message | dict[str, Any] = history[last]
            if words is not None:
                # The answer belongs where that to the words before did.
                origin = origin_of(history[last].to_dict())
                said = from_channel({"role": "user", "content": words}, origin)
            return [*history[:last], said]

        done = await self._run(rewrite, sessions, key, until_the_last)
        match done:
            case "done":
                return None
            case "nothing":
                return _told(key, "There is no message to answer again.")
            case "not saved":
                return _told(key, self._not_saved())
            case "others speak":
                return _told(key, "Others speak all the time; try again in a moment.")

    async def _stop(self, key: str, rest: str, tell: Tell) -> Answer:
        del rest, tell
        stopped = await self._turns.stop(self._instance, key)
        return _told(key, "Stopped." if stopped else "No answer is being written.")

    async def _fork(self, key: str, rest: str, tell: Tell, sessions: SessionStore) -> Answer:
        del tell
        fork = key_beside(key, rest)
        await self._run(_store_of(sessions).fork, key, fork)
        return _told(fork, f"This is a copy, `{fork}`; `{key}` stays as it is.")

    # --- sessions ----------------------------------------------------------------------------

    async def _sessions(self, key: str, rest: str, tell: Tell) -> Answer:
        del tell
        found = await self._run(self._matching, key, rest)
        if not found:
            return _told(key, "There are none." if rest else "There are no sessions yet.")
        lines = [
            f"- `{one.key}` · {one.count} message{'' if one.count == 1 else 's'} · {_day(one)} · "
            f"{one.title or '(no title)'}"
            for one in found[:_LISTED]
        ]
        more = f"\n\n{len(found) - _LISTED} more; name some words." if len(found) > _LISTED else ""
        return _told(key, "\n".join(lines) + more)

    async def _resume(self, key: str, rest: str, tell: Tell) -> Answer:
        if not rest:
            return await self._sessions(key, rest, tell)
        found = await self._run(self._matching, key, rest)
        exact = [one for one in found if one.key == rest]
        if not exact and len(found) > 1:
            listed = await self._sessions(key, rest, tell)
            return _told(key, f"Several fit; name one.\n\n{listed.text}")
        if not found:
            return _told(key, f"There is no session {rest!r}; /sessions shows yours.")
        chosen = (exact or found)[0]
        return _told(chosen.key, f"Going on in `{chosen.key}`: {chosen.title or '(no title)'}")

    def _matching(self, key: str, words: str) -> list[Entry]:
        """Those of the user's sessions that have these words in key, title or what was said."""
        catalog = self._instance.catalog
        if catalog is None:
            raise UsageError(_OFF)
        owner = owner_of(key)
        parts = split(key)
        prefix = "" if self._everything or parts is None else f"{key.partition(':')[0]}:"
        entries: list[Entry] = []
        after: str | None = None
        while len(entries) < _LOOKED_AT:
            page = catalog.list(prefix=prefix, limit=500, after=after)
            entries += [
                one for one in page.entries if self._everything or owner_of(one.key) == owner
            ]
            after = page.after
            if after is None:
                break
        if not words:
            return entries
        wanted = words.casefold()
        said = {hit.key for hit in catalog.search(words, prefix=prefix, limit=100).hits}
        return [
            one
            for one in entries
            if wanted in f"{one.key}\n{one.title}".casefold() or one.key in said
        ]

    # --- what is known -----------------------------------------------------------------------

    async def _context(self, key: str, rest: str, tell: Tell) -> Answer:
        del rest, tell
        return _told(key, await self._run(self._context_words, key))

    def _context_words(self, key: str) -> str:
        model = self._instance.model_of(key)
        context = self._instance.context(model)
        tokens = context.tokens
        history = self._instance.sessions.get_history(key)
        said = [words_of(body) for message in history if speaks(body := message.to_dict())]
        recalled = self._instance.recall(said[-1] if said else "", key)
        window = context.window(key, memory=recalled.block)
        parts = {
            "system prompt": tokens.text(self._instance.spec.system),
            "tools": tokens.tools(self._instance.definitions),
            f"memory ({len(recalled.found)} recalled)": tokens.text(recalled.block),
            "summary": tokens.text(self._instance.sessions.get_summary(key)),
        }
        parts["messages"] = max(0, window.tokens - sum(parts.values()))
        share = min(1.0, window.tokens / window.budget)
        bar = "█" * round(share * _WIDTH) + "░" * (_WIDTH - round(share * _WIDTH))
        lines = [
            f"`{bar}` {share:.0%}",
            "",
            f"About {window.tokens:,} of {window.budget:,} tokens are sent to {model.name}:",
            "",
            *(f"- {name}: about {count:,}" for name, count in parts.items()),
            "",
            f"{_count(len(history))} in sight; the oldest are summarised at "
            f"{context.limits.max_history_messages}, or when the room is used up.",
        ]
        if recalled.found:
            lines += ["", "Recalled for your last message:", ""]
            lines += [f"- {one.text}" for one in recalled.found[:_LISTED]]
        return "\n".join(lines)

    async def _memory(self, key: str, rest: str, tell: Tell) -> Answer:
        del tell
        memory = self._instance.memory
        if memory is None:
            return _told(key, "There is no memory in this run.")
        scope = await self._run(memory.scope, key=key)
        if rest:
            notes = await self._run(memory.notes.search, rest, scope=scope)
        else:
            notes = await self._run(memory.notes.list, scope)
        if not notes:
            return _told(key, "Nothing is remembered yet." if not rest else "Nothing matches.")
        lines = [
            f"- `{note.id}` {note.text}" + ("" if note.kind == "core" else f" ({note.at:%Y-%m-%d})")
            for note in notes[: -_LISTED - 1 : -1]
        ]
        more = len(notes) - _LISTED
        told = f"\n\n{more} older ones; /memory WORDS finds them." if more > 0 else ""
        return _told(key, "\n".join(lines) + f"{told}\n\n/forget ID forgets one.")

    async def _forget(self, key: str, rest: str, tell: Tell) -> Answer:
        del tell
        memory = self._instance.memory
        if memory is None:
            return _told(key, "There is no memory in this run.")
        if not rest:
            return _told(key, "Which one? /memory shows them, then /forget ID.")
        try:
            note = await self._run(memory.forget, rest, key=key)
        except NoSuchNote:
            return _told(key, f"There is no note {rest!r}; /memory shows the ones there are.")
        return _told(key, f"Forgotten: {note.text}")

    async def _model(self, key: str, rest: str, tell: Tell) -> Answer:
        del tell
        if not rest:
            model = await self._run(self._instance.model_of, key)
            return _told(key, f"{model.name} answers here; /model NAME takes another.")
        choose = self._instance.choose_model
        model = await self._run(choose, key, rest, any_model=self._everything)
        return _told(key, f"{model.name} answers here from now on.")

    async def _help(self, key: str, rest: str, tell: Tell) -> Answer:
        del rest, tell
        lines = [
            f"- `/{name}{' ' if one.arguments else ''}{one.arguments}` {one.help}"
            for name, one in COMMANDS.items()
        ]
        return _told(key, "\n".join(lines) + "\n\n`//text` says `/text` to the model.")

    def _not_saved(self) -> str:
        health = self._instance.sessions.health()
        return f"That could not be saved, and nothing is changed: {health.last_error}"


_OFF: Final = (
    "that is off while sessions are kept as plain JSON; it is back when the store can be used again"
)


_OPERATIONS: Final = {
    "replace": "the last /retry or /edit",
    "checkpoint": "the last compaction",
    "clear": "the last /clear",
    "hide": "what was hidden last",
    "summary": "the last change of the summary",
}
"""What an operation of the store is called in a chat."""


def _count(messages: int) -> str:
    return "1 message is" if messages == 1 else f"{messages} messages are"


def _store_of(sessions: SessionStore) -> Store:
    if sessions.store is None:
        raise UsageError(_OFF)
    return sessions.store


def _told(key: str, text: str) -> Answer:
    return Answer(key=key, text=text, outcome="command")


def _sentence(error: StenologError) -> str:
    words = str(error)
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "?", "!")) else ".")


def _last_said(history: Sequence[Message]) -> int | None:
    """Where the user's last words stand."""
    found = [
        index
        for index, message in enumerate(history)
        if speaks(body := message.to_dict()) and words_of(body)
    ]
    return found[-1] if found else None


def _day(entry: Entry) -> str:
    return "" if entry.updated is None else f"{entry.updated:%Y-%m-%d %H:%M}"
