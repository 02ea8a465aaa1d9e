"""Chat commands: messages that start with `/`, the same in every front end.

A command that changes a session needs its lease. While an answer is written, in this or another
process, the command is rejected with a hint to /stop.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from msgspec import Struct

from stenolog.agent.history_changes import last_seq, replace_history
from stenolog.agent.instance import AgentInstance
from stenolog.agent.scheduler import SessionBusy, TurnScheduler
from stenolog.agent.turn_events import Answer, EventHandler
from stenolog.agent.turn_options import TurnOptions
from stenolog.catalog.entries import Entry
from stenolog.catalog.message_metadata import is_received, mark_received, origin_of, seen_by
from stenolog.context.message_parts import calls_of, has_text, text_parts_of
from stenolog.context.turn_state import turn_state
from stenolog.errors import (
    ModelRefused,
    NoSuchNote,
    NoSuchSession,
    NothingToUndo,
    StenologError,
    UsageError,
)
from stenolog.records import Message
from stenolog.sessions.keys import KeyParts, join_key, split_key
from stenolog.sessions.session_store import SessionStore
from stenolog.sessions.undoing import undo_last
from stenolog.stores.base import Store

_LISTED: Final = 15
_MAX_SEARCHED: Final = 2_000
"""Maximum number of sessions that are searched for those of one user."""
_WIDTH: Final = 40


class Command(Struct, frozen=True, kw_only=True):
    """A command, as shown by the help and by completion."""

    arguments: str = ""
    help: str
    alone: bool = False
    """Whether the command changes the session and therefore needs the lease."""


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


class ParsedCommand(Struct, frozen=True):
    """A parsed command."""

    name: str
    rest: str


def parse_command(content: str | Sequence[Mapping[str, Any]]) -> ParsedCommand | None:
    """Return the command in a message; None for any other message, including `//text`."""
    if not isinstance(content, str) or not content.startswith("/"):
        return None
    found = re.match(r"/([a-zA-Z_]+)(?:@\w+)?(?:\s+(.*))?\Z", content.strip(), re.DOTALL)
    if found is None:
        return None
    return ParsedCommand(found[1].lower(), (found[2] or "").strip())


def new_key(channel: str = "cli", sender: str = "default", *, at: datetime | None = None) -> str:
    """Return the key for a new session of a user. All sessions of a user share one memory."""
    moment = (at or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    return join_key(KeyParts(channel, sender, f"{moment}-{secrets.token_hex(2)}"))


def sibling_key(key: str, thread: str = "") -> str:
    """Return a key for a new session of the same user.

    Raises UsageError if `key` is not of the form channel:sender: its user is unknown, and two users
    must never be mistaken for one.
    """
    parts = split_key(key)
    if parts is None:
        raise UsageError(
            f"{key!r} is not of the form channel:sender, so no other session can be its user's"
        )
    if thread:
        return join_key(KeyParts(parts.channel, parts.who, thread))
    return new_key(parts.channel, parts.who)


class CommandRunner:
    """Runs commands for one agent."""

    def __init__(
        self, turns: TurnScheduler, instance: AgentInstance, *, sender: str, all_sessions: bool
    ) -> None:
        """Run commands for the verified `sender`; empty if the sender is unknown.

        `all_sessions` allows listing and opening all sessions, not only those of the sender.
        """
        self._sender = sender
        self._turns = turns
        self._instance = instance
        self._all_sessions = all_sessions
        self._run = turns.threads.run
        self._seen = 0
        """The last seq of the session when the command arrived."""

    async def carry_out(self, key: str, asked: ParsedCommand, on_event: EventHandler) -> Answer:
        """Run a command and return its result in Markdown, even if the store fails."""
        known = COMMANDS.get(asked.name)
        if known is None:
            return _reply(key, f"There is no /{asked.name}; /help shows what there is.")
        carry = getattr(self, f"_{asked.name}")
        try:
            if not known.alone:
                answer: Answer = await carry(key, asked.rest, on_event)
                return answer
            if self._turns.is_asked(self._instance, key):
                return _reply(key, _BUSY)
            # The user has not seen messages that arrive after the command.
            self._seen = await self._run(last_seq, self._instance.sessions, key)

            async def change(sessions: SessionStore) -> Answer | None:
                self._seen = await self._run(self._seen_of, sessions, key)
                changed: Answer | None = await carry(key, asked.rest, on_event, sessions)
                return changed

            options = TurnOptions(sender=self._sender)
            return await self._turns.alone(
                self._instance, key, change, on_event=on_event, options=options
            )
        except SessionBusy:
            return _reply(key, _BUSY)
        except StenologError as error:
            # Users can correct a wrong command; other errors are for the operator.
            own = isinstance(error, UsageError) and not isinstance(error, ModelRefused)
            raised = None if own else error
            return Answer(key=key, text=_sentence(error), outcome="command", error=raised)

    def _seen_of(self, sessions: SessionStore, key: str) -> int:
        """Return the last seq that the user can have seen when sending the command.

        An unanswered message may have been stored before the seq was read.
        """
        if not self._turns.is_asked(self._instance, key):
            return self._seen
        unanswered = turn_state(sessions.get_history(key)).unanswered
        return min(self._seen, *(seq - 1 for seq in unanswered)) if unanswered else self._seen

    # --- the session -------------------------------------------------------------------------

    async def _new(self, key: str, rest: str, on_event: EventHandler) -> Answer:
        del rest, on_event
        words = "A new session. The one before stays: /sessions shows it, /resume goes back."
        return _reply(sibling_key(key), words)

    async def _clear(
        self, key: str, rest: str, on_event: EventHandler, sessions: SessionStore
    ) -> Answer:
        del rest, on_event
        # guard: clear-upto-seen
        await self._run(sessions.store.clear, key, upto=self._seen)
        undoable = await self._run(_undoable, sessions.store, key)
        back = "; /undo brings it back" if undoable else ""
        return _reply(key, f"Everything said so far is hidden{back}.")

    async def _compact(
        self, key: str, rest: str, on_event: EventHandler, sessions: SessionStore
    ) -> Answer:
        del rest, on_event, sessions
        model = await self._run(self._instance.model_of, key)
        done = await self._turns.threads.ask(self._instance.context(model).summarize, key)
        if done is None:
            return _reply(key, "There is nothing that could be made shorter.")
        return _reply(key, f"{done}.")

    async def _undo(
        self, key: str, rest: str, on_event: EventHandler, sessions: SessionStore
    ) -> Answer:
        del rest, on_event
        try:
            undone = await self._run(undo_last, sessions.store, key)
        except NothingToUndo:
            return _reply(key, "There is nothing to take back.")
        shown = f"{_count(undone.shown)} back" if undone.shown else "the summary is as before"
        gone = f", {_count(undone.hid)} hidden" if undone.hid else ""
        return _reply(key, f"Taken back, {_OPERATIONS.get(undone.op, undone.op)}: {shown}{gone}.")

    async def _retry(
        self, key: str, rest: str, on_event: EventHandler, sessions: SessionStore
    ) -> Answer | None:
        del rest, on_event
        return await self._again(key, sessions, None)

    async def _edit(
        self, key: str, rest: str, on_event: EventHandler, sessions: SessionStore
    ) -> Answer | None:
        del on_event
        if not rest:
            return _reply(key, "Write the new words behind it: /edit TEXT.")
        return await self._again(key, sessions, rest)

    async def _again(self, key: str, sessions: SessionStore, words: str | None) -> Answer | None:
        """Hide the messages after the last question, or replace that question with `words`."""
        arrived: list[Message] = []

        def until_the_last(history: Sequence[Message]) -> list[Message | dict[str, Any]] | None:
            last = _last_user_message(history)
            arrived[:] = [message for message in history if message.seq > self._seen]
            if last is None or arrived:
                return None
            end = _end_of_earlier_answers(history, last)
            if words is None:
                return [*history[:end]]
            # The new answer has the same address as the answer to the replaced message.
            before = history[last].to_dict()
            origin = origin_of(before) if is_received(before) else None
            new = {"role": "user", "content": words}
            said = mark_received(new, sender=self._sender, origin=origin)
            return [*history[:last], *history[last + 1 : end], said]

        done = await self._run(replace_history, sessions, key, until_the_last)
        match done:
            case "done":
                return None
            case "unchanged" if not arrived:
                return _reply(key, "There is no message to answer again.")
            case _:
                return _reply(key, _ARRIVED)

    async def _stop(self, key: str, rest: str, on_event: EventHandler) -> Answer:
        del rest, on_event
        stopped = await self._turns.stop(self._instance, key)
        return _reply(key, "Stopped." if stopped else "No answer is being written.")

    async def _fork(
        self, key: str, rest: str, on_event: EventHandler, sessions: SessionStore
    ) -> Answer:
        del on_event
        fork = sibling_key(key, self._thread_named(key, rest))
        await self._run(sessions.store.fork, key, fork)
        return _reply(fork, f"This is a copy, `{fork}`; `{key}` stays as it is.")

    def _thread_named(self, key: str, name: str) -> str:
        """Return the thread part of the key for a copy with this name.

        Without a verified sender, the owner of `app:alice:1` is unknown, and `app:bob:1` may be the
        key of another user. Then the name gets a random suffix.
        """
        parts = split_key(key)
        has_thread = parts is not None and parts.thread is not None
        if name and has_thread and not (self._sender or self._all_sessions):  # guard: fork-own-key
            return f"{name}-{secrets.token_hex(4)}"
        return name

    # --- sessions ----------------------------------------------------------------------------

    async def _sessions(self, key: str, rest: str, on_event: EventHandler) -> Answer:
        del on_event
        found = await self._run(self._matching, key, rest)
        if not found:
            return _reply(key, "There are none." if rest else "There are no sessions yet.")
        lines = [
            f"- `{one.key}` · {one.count} message{'' if one.count == 1 else 's'} · {_day(one)} · "
            f"{one.title or '(no title)'}"
            for one in found[:_LISTED]
        ]
        more = f"\n\n{len(found) - _LISTED} more; name some words." if len(found) > _LISTED else ""
        return _reply(key, "\n".join(lines) + more)

    async def _resume(self, key: str, rest: str, on_event: EventHandler) -> Answer:
        if not rest:
            return await self._sessions(key, rest, on_event)
        found = await self._run(self._matching, key, rest)
        exact = [one for one in found if one.key == rest]
        if not exact and len(found) > 1:
            listed = await self._sessions(key, rest, on_event)
            return _reply(key, f"Several fit; name one.\n\n{listed.text}")
        if not found:
            return _reply(key, f"There is no session {rest!r}; /sessions shows yours.")
        chosen = (exact or found)[0]
        return _reply(chosen.key, f"Going on in `{chosen.key}`: {chosen.title or '(no title)'}")

    def _matching(self, key: str, words: str) -> list[Entry]:
        """Return the user's sessions with these words in their key, title or messages."""
        catalog = self._instance.catalog
        parts = split_key(key)
        prefix = "" if self._all_sessions or parts is None else f"{key.partition(':')[0]}:"
        entries: list[Entry] = []
        after: str | None = None
        while len(entries) < _MAX_SEARCHED:
            page = catalog.list(prefix=prefix, limit=500, after=after)
            entries += [one for one in page.entries if self._may_see(one, key)]
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

    def _may_see(self, entry: Entry, key: str) -> bool:
        """Return whether the user may see a session: the current one, or one of the same sender."""
        own = bool(self._sender) and entry.sender == self._sender
        return self._all_sessions or entry.key == key or own  # guard: commands-own-sessions

    # --- information -------------------------------------------------------------------------

    async def _context(self, key: str, rest: str, on_event: EventHandler) -> Answer:
        del rest, on_event
        return _reply(key, await self._run(self._context_words, key))

    def _context_words(self, key: str) -> str:
        model = self._instance.model_of(key)
        context = self._instance.context(model)
        tokens = context.tokens
        history = self._instance.sessions.get_history(key)
        said = [text_parts_of(body) for message in history if has_text(body := message.to_dict())]
        recalled = self._instance.recall(said[-1] if said else "", key, sender=self._sender)
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

    async def _memory(self, key: str, rest: str, on_event: EventHandler) -> Answer:
        del on_event
        memory = self._instance.memory
        if memory is None:
            return _reply(key, "There is no memory in this run.")
        scope = await self._run(self._instance.memory_scope, key, sender=self._sender)
        if rest:
            notes = await self._run(memory.notes.search, rest, scope=scope)
        else:
            notes = await self._run(memory.notes.list, scope)
        if not notes:
            return _reply(key, "Nothing is remembered yet." if not rest else "Nothing matches.")
        lines = [
            f"- `{note.id}` {note.text}" + ("" if note.kind == "core" else f" ({note.at:%Y-%m-%d})")
            for note in notes[: -_LISTED - 1 : -1]
        ]
        more = len(notes) - _LISTED
        told = f"\n\n{more} older ones; /memory WORDS finds them." if more > 0 else ""
        return _reply(key, "\n".join(lines) + f"{told}\n\n/forget ID forgets one.")

    async def _forget(self, key: str, rest: str, on_event: EventHandler) -> Answer:
        del on_event
        memory = self._instance.memory
        if memory is None:
            return _reply(key, "There is no memory in this run.")
        if not rest:
            return _reply(key, "Which one? /memory shows them, then /forget ID.")
        try:
            scope = await self._run(self._instance.memory_scope, key, sender=self._sender)
            note = await self._run(memory.forget, rest, scope=scope)
        except NoSuchNote:
            return _reply(key, f"There is no note {rest!r}; /memory shows the ones there are.")
        return _reply(key, f"Forgotten: {note.text}")

    async def _model(self, key: str, rest: str, on_event: EventHandler) -> Answer:
        del on_event
        if not rest:
            model = await self._run(self._instance.model_of, key)
            return _reply(key, f"{model.name} answers here; /model NAME takes another.")
        choose = self._instance.choose_model
        model = await self._run(choose, key, rest, any_model=self._all_sessions)
        return _reply(key, f"{model.name} answers here from now on.")

    async def _help(self, key: str, rest: str, on_event: EventHandler) -> Answer:
        del rest, on_event
        lines = [
            f"- `/{name}{' ' if one.arguments else ''}{one.arguments}` {one.help}"
            for name, one in COMMANDS.items()
        ]
        return _reply(key, "\n".join(lines) + "\n\n`//text` says `/text` to the model.")


_BUSY: Final = "An answer is being written; /stop ends it."
_ARRIVED: Final = (
    "Another message has just arrived in this session, so nothing was changed; try again."
)
_OPERATIONS: Final = {
    "replace": "the last /retry or /edit",
    "checkpoint": "the last compaction",
    "clear": "the last /clear",
    "hide": "what was hidden last",
    "summary": "the last change of the summary",
}
"""Names of the store's operations in chat messages."""


def _count(messages: int) -> str:
    return "1 message is" if messages == 1 else f"{messages} messages are"


def _undoable(store: Store, key: str) -> int:
    try:
        return store.info(key).undoable
    except NoSuchSession:
        return 0


def _reply(key: str, text: str) -> Answer:
    return Answer(key=key, text=text, outcome="command")


def _sentence(error: StenologError) -> str:
    words = str(error)
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "?", "!")) else ".")


def _last_user_message(history: Sequence[Message]) -> int | None:
    """Return the index of the last user message with text; None if there is none."""
    found = [
        index
        for index, message in enumerate(history)
        if has_text(body := message.to_dict()) and text_parts_of(body)
    ]
    return found[-1] if found else None


def _end_of_earlier_answers(history: Sequence[Message], last: int) -> int:
    """Return the index after the message at `last` and after the answers to earlier messages.

    Those answers follow it if it was sent while they were written.
    """
    question = history[last].seq
    for index in range(len(history) - 1, last, -1):
        body = history[index].to_dict()
        is_answer = body.get("role") == "assistant" and not calls_of(body)
        if is_answer and seen_by(body, history[index].seq) < question:
            return index + 1
    return last + 1


def _day(entry: Entry) -> str:
    return "" if entry.updated is None else f"{entry.updated:%Y-%m-%d %H:%M}"
