"""Chat commands: messages that start with `/`, the same in every front end.

A command that changes or copies the messages of a session needs the session's lease. While any
process writes an answer in the session, such a command is rejected with a hint to /stop.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from msgspec import Struct

from stenolog.agent.instance import AgentInstance
from stenolog.agent.scheduler import SessionBusy, TurnScheduler
from stenolog.agent.session_history import read_last_seq, replace_history
from stenolog.agent.turn_events import Answer, EventHandler, TurnOptions
from stenolog.catalog.entries import Entry
from stenolog.catalog.message_metadata import has_seen, is_received, mark_received, origin_of
from stenolog.context.turn_state import is_finished_answer, turn_state
from stenolog.errors import ModelRefused, NothingToUndo, StenologError, UsageError
from stenolog.messages import has_text, text_parts_of
from stenolog.records import Message
from stenolog.sessions.keys import KeyParts, join_key, split_key
from stenolog.sessions.session_store import undo_last
from stenolog.stores.base import Store, find_info

T = TypeVar("T")

_MAX_LISTED_ITEMS: Final = 15
"""Maximum number of sessions or notes in a reply."""
_MAX_SEARCHED_SESSIONS: Final = 2_000
"""Number of sessions of the user after which no further sessions are read from the catalog."""
_USAGE_BAR_LENGTH: Final = 40
"""Length of the bar that /context shows, in characters."""


class Command(Struct, frozen=True, kw_only=True):
    """A command, as shown by the help and by completion."""

    arguments: str = ""
    help: str
    needs_lease: bool = False
    """Whether the command changes or copies messages, which only the lease holder may do."""


COMMANDS: Final = {
    "new": Command(help="start a new session; this one is kept and can be resumed"),
    "clear": Command(help="hide all messages so far; /undo shows them again", needs_lease=True),
    "compact": Command(help="summarize all but the last turns now", needs_lease=True),
    "undo": Command(help="undo the last /clear, /compact, /retry or /edit", needs_lease=True),
    "retry": Command(help="answer the last message again", needs_lease=True),
    "edit": Command(arguments="TEXT", help="replace the last message with TEXT", needs_lease=True),
    "context": Command(help="show what is sent to the model, in tokens"),
    "stop": Command(help="stop the current answer; its text so far is kept"),
    "fork": Command(
        arguments="[NAME]",
        help="continue in a copy; this session stays unchanged",
        needs_lease=True,
    ),
    "sessions": Command(arguments="[TEXT]", help="list your sessions, or those with TEXT"),
    "resume": Command(arguments="KEY|TEXT", help="continue another session"),
    "memory": Command(arguments="[TEXT]", help="show the notes about you, or those with TEXT"),
    "forget": Command(arguments="ID", help="delete a note"),
    "model": Command(arguments="[NAME]", help="show or change the model of this session"),
    "help": Command(help="show this list"),
}


class ParsedCommand(Struct, frozen=True):
    """Name and argument of a command in a chat message."""

    name: str
    argument: str
    """The text after the command name; may be empty."""


def parse_command(content: str | Sequence[Mapping[str, Any]]) -> ParsedCommand | None:
    """Return the command in a message; None if the message is no command, such as `//text`."""
    if not isinstance(content, str) or not content.startswith("/"):
        return None
    match = re.match(r"/([a-zA-Z_]+)(?:@\w+)?(?:\s+(.*))?\Z", content.strip(), re.DOTALL)
    if match is None:
        return None
    return ParsedCommand(match[1].lower(), (match[2] or "").strip())


def new_key(channel: str = "cli", sender: str = "default") -> str:
    """Return the key for a new session of a user."""
    timestamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return join_key(KeyParts(channel, sender, f"{timestamp}-{secrets.token_hex(2)}"))


def sibling_key(key: str, thread: str = "") -> str:
    """Return a key for a new session of the same user, with `thread` or a generated thread part.

    Raises UsageError if `key` is not of the form channel:sender, because the user of any other key
    is unknown. Two users must never be mistaken for the same user.
    """
    parts = split_key(key)
    if parts is None:
        raise UsageError(
            f"the user of {key!r} is unknown: the key is not of the form channel:sender"
        )
    if thread:
        return join_key(KeyParts(parts.channel, parts.who, thread))
    return new_key(parts.channel, parts.who)


class CommandRunner(Struct, eq=False, kw_only=True):
    """Runs one command in a session.

    `sender`: the verified sender, or empty if the sender is unknown. `all_sessions` allows listing
    and opening all sessions, not only those of the sender.
    """

    scheduler: TurnScheduler
    instance: AgentInstance
    key: str
    name: str
    argument: str
    sender: str
    all_sessions: bool
    last_seq: int = 0
    """Last seq of the session, read soon after the command arrived."""
    seen_seq: int = 0
    """Last seq that the user can have seen when sending the command."""

    async def _run(self, function: Callable[..., T], *values: Any, **named: Any) -> T:
        return await self.scheduler.threads.run(function, *values, **named)

    async def run(self, on_event: EventHandler) -> Answer:
        """Run the command and return its result, or its error, in Markdown."""
        name = self.name
        definition = COMMANDS.get(name)
        if definition is None:
            return self._reply(f"Unknown command /{name}. /help lists all commands.")
        method = getattr(self, f"_run_{name}")
        try:
            if not definition.needs_lease:
                answer: Answer = await method()
                return answer
            if self.scheduler.has_waiting_message(self.instance, self.key):
                return self._reply(_BUSY_TEXT)
            with self.scheduler.use_session(self.instance, self.key) as session:
                earlier_count = len(session.new_seqs)
                self.last_seq = await self._run(read_last_seq, self.instance.store, self.key)

                async def change(store: Store) -> Answer | None:
                    new_seqs = session.new_seqs[earlier_count:]  # guard: unseen-by-command
                    self.seen_seq = await self._run(self._read_seen_seq, store, new_seqs)
                    change_answer: Answer | None = await method(store)
                    return change_answer

                options = TurnOptions(sender=self.sender)
                return await self.scheduler.change_now(
                    self.instance, self.key, change, on_event=on_event, options=options
                )
        except SessionBusy:
            return self._reply(_BUSY_TEXT)
        except StenologError as error:
            # The user can correct a wrong command, so only other errors go to the operator.
            is_user_error = isinstance(error, UsageError) and not isinstance(error, ModelRefused)
            reported_error = None if is_user_error else error
            return Answer(
                key=self.key, text=_format_error(error), outcome="command", error=reported_error
            )

    def _reply(self, text: str, *, key: str = "") -> Answer:
        return Answer(key=key or self.key, text=text, outcome="command")

    def _read_seen_seq(self, store: Store, new_seqs: list[int]) -> int:
        """Return the last seq that the user can have seen when sending the command.

        `new_seqs`: seqs of the messages that this process stored after the command arrived, and may
        have answered before the command read `last_seq`.
        """
        if self.scheduler.has_waiting_message(self.instance, self.key):
            new_seqs += turn_state(store.get_history(self.key)).unanswered
        return min((self.last_seq, *(seq - 1 for seq in new_seqs)))

    # --- the session -------------------------------------------------------------------------

    async def _run_new(self) -> Answer:
        text = (
            "Started a new session. The previous one is kept: /sessions lists it, /resume opens it."
        )
        return self._reply(text, key=sibling_key(self.key))

    async def _run_clear(self, store: Store) -> Answer:
        # guard: clear-upto-seen
        await self._run(store.clear, self.key, upto=self.seen_seq)
        info = await self._run(find_info, store, self.key)
        hint = " /undo shows them again." if info is not None and info.undoable else ""
        return self._reply(f"All messages so far are hidden.{hint}")

    async def _run_compact(self, store: Store) -> Answer:
        del store
        context = self.instance.context(await self._run(self.instance.model_of, self.key))
        report = await self.scheduler.threads.run_model(context.summarize, self.key)
        return self._reply("Nothing to summarize." if report is None else f"{report}.")

    async def _run_undo(self, store: Store) -> Answer:
        try:
            result = await self._run(undo_last, store, self.key)
        except NothingToUndo:
            return self._reply("Nothing to undo.")
        effect = "summary restored"
        if result.shown:
            effect = f"{_message_count_with_verb(result.shown)} visible again"
        suffix = f", {_message_count_with_verb(result.hid)} hidden" if result.hid else ""
        return self._reply(f"Undid {_OPERATION_NAMES.get(result.op, result.op)}: {effect}{suffix}.")

    async def _run_retry(self, store: Store) -> Answer | None:
        return await self._hide_last_answer(store, None)

    async def _run_edit(self, store: Store) -> Answer | None:
        if not self.argument:
            return self._reply("Write the new text after the command: /edit TEXT")
        return await self._hide_last_answer(store, self.argument)

    async def _hide_last_answer(self, store: Store, new_text: str | None) -> Answer | None:
        """Hide the answer to the last user message; with `new_text`, replace the message, too.

        Returns None if the history was changed, otherwise an Answer with the reason.
        """
        unseen_messages: list[Message] = []

        def make_history(history: Sequence[Message]) -> list[Message | dict[str, Any]] | None:
            user_index = _last_user_index(history)
            unseen_messages[:] = [message for message in history if message.seq > self.seen_seq]
            if user_index is None or unseen_messages:
                return None
            end = _index_after_earlier_answers(history, user_index)
            if new_text is None:
                return [*history[:end]]
            # Keep the origin, so that the new answer goes to the same destination as the old one.
            replaced_body = history[user_index].to_dict()
            origin = origin_of(replaced_body) if is_received(replaced_body) else None
            new_body = {"role": "user", "content": new_text}
            new_message = mark_received(new_body, sender=self.sender, origin=origin)
            return [*history[:user_index], *history[user_index + 1 : end], new_message]

        result = await self._run(replace_history, store, self.key, make_history)
        match result:
            case "done":
                return None
            case "unchanged" if not unseen_messages:
                return self._reply("There is no message to answer.")
            case _:
                return self._reply(_MESSAGE_ARRIVED_TEXT)

    async def _run_stop(self) -> Answer:
        stopped = await self.scheduler.stop(self.instance, self.key)
        return self._reply("Stopped." if stopped else "No answer is in progress.")

    async def _run_fork(self, store: Store) -> Answer:
        fork_key = sibling_key(self.key, self._make_fork_thread())
        await self._run(store.fork, self.key, fork_key)
        text = f"Continuing in the copy `{fork_key}`. `{self.key}` stays unchanged."
        return self._reply(text, key=fork_key)

    def _make_fork_thread(self) -> str:
        """Return the thread part of the copy's key, made from the name that the user gave.

        If the key of this session has a thread part and the sender is not verified, the name gets a
        random suffix, because the copy could otherwise get the key of another user's session.
        """
        name, parts = self.argument, split_key(self.key)
        has_thread = parts is not None and parts.thread is not None
        if name and has_thread and not (self.sender or self.all_sessions):  # guard: fork-own-key
            return f"{name}-{secrets.token_hex(4)}"
        return name

    # --- sessions ----------------------------------------------------------------------------

    async def _run_sessions(self) -> Answer:
        entries = await self._run(self._find_matching_sessions)
        if not entries:
            return self._reply("No session matches." if self.argument else "No sessions yet.")
        return self._reply(_format_sessions(entries))

    async def _run_resume(self) -> Answer:
        wanted_key = self.argument
        if not wanted_key:
            return await self._run_sessions()
        entries = await self._run(self._find_matching_sessions)
        exact_matches = [entry for entry in entries if entry.key == wanted_key]
        if not exact_matches and len(entries) > 1:
            session_list = _format_sessions(entries)
            return self._reply(f"Several sessions match. Use one of these keys:\n\n{session_list}")
        if not entries:
            return self._reply(f"There is no session {wanted_key!r}. /sessions lists yours.")
        chosen_entry = (exact_matches or entries)[0]
        title = chosen_entry.title or "(no title)"
        return self._reply(f"Continuing `{chosen_entry.key}`: {title}", key=chosen_entry.key)

    def _find_matching_sessions(self) -> list[Entry]:
        """Return the sessions that the user may see and that match the argument.

        A session matches if its key, title or messages contain the argument.
        """
        catalog, text = self.instance.catalog, self.argument
        any_channel = self.all_sessions or split_key(self.key) is None
        prefix = "" if any_channel else f"{self.key.partition(':')[0]}:"
        entries: list[Entry] = []
        cursor: str | None = None
        while len(entries) < _MAX_SEARCHED_SESSIONS:
            page = catalog.list(prefix=prefix, limit=500, after=cursor)
            entries += [entry for entry in page.entries if self._may_see(entry)]
            cursor = page.after
            if cursor is None:
                break
        if not text:
            return entries
        search_text = text.casefold()
        found_keys = {hit.key for hit in catalog.search(text, prefix=prefix, limit=100).hits}
        return [
            entry
            for entry in entries
            if search_text in f"{entry.key}\n{entry.title}".casefold() or entry.key in found_keys
        ]

    def _may_see(self, entry: Entry) -> bool:
        """Return whether the user may see a session.

        Without `all_sessions`, a user may see only the current session and their own sessions.
        """
        is_own = bool(self.sender) and entry.sender == self.sender
        # guard: commands-own-sessions
        return self.all_sessions or entry.key == self.key or is_own

    # --- information -------------------------------------------------------------------------

    async def _run_context(self) -> Answer:
        return self._reply(await self._run(self._describe_context))

    def _describe_context(self) -> str:
        key, instance = self.key, self.instance
        model = instance.model_of(key)
        context = instance.context(model)
        tokens = context.tokens
        history = instance.store.get_history(key)
        texts = [text_parts_of(body) for message in history if has_text(body := message.to_dict())]
        recall_result = instance.recall(texts[-1] if texts else "", key, sender=self.sender)
        window = context.window(key, memory=recall_result.block)
        token_counts = {
            "system prompt": tokens.text(instance.spec.system),
            "tools": tokens.tools(instance.tool_definitions),
            f"memory ({len(recall_result.found)} recalled)": tokens.text(recall_result.block),
            "summary": tokens.text(instance.store.get_summary(key)),
        }
        token_counts["messages"] = max(0, window.tokens - sum(token_counts.values()))
        used_share = min(1.0, window.tokens / window.budget)
        filled_length = round(used_share * _USAGE_BAR_LENGTH)
        lines = [
            f"`{'█' * filled_length}{'░' * (_USAGE_BAR_LENGTH - filled_length)}` {used_share:.0%}",
            "",
            f"Next request to {model.name}: about {window.tokens:,} of {window.budget:,} tokens.",
            "",
            *(f"- {name}: about {count:,}" for name, count in token_counts.items()),
            "",
            f"{_message_count_with_verb(len(history))} visible to the model. "
            "The oldest are summarized if there are more than "
            f"{context.limits.max_history_messages}, or too many tokens.",
        ]
        if recall_result.found:
            lines += ["", "Recalled for your last message:", ""]
            lines += [f"- {hit.text}" for hit in recall_result.found[:_MAX_LISTED_ITEMS]]
        return "\n".join(lines)

    async def _run_memory(self) -> Answer:
        memory = self.instance.memory
        if memory is None:
            return self._reply(_NO_MEMORY_TEXT)
        scope = await self._run(self.instance.memory_scope, self.key, sender=self.sender)
        if self.argument:
            notes = await self._run(memory.notes.search, self.argument, scope=scope)
        else:
            notes = await self._run(memory.notes.list, scope)
        if not notes:
            return self._reply("No note matches." if self.argument else "There are no notes yet.")
        lines = [
            f"- `{note.id}` {note.text}" + ("" if note.kind == "core" else f" ({note.at:%Y-%m-%d})")
            for note in notes[: -_MAX_LISTED_ITEMS - 1 : -1]
        ]
        older_count = len(notes) - _MAX_LISTED_ITEMS
        hint = (
            f"\n\n{older_count} older notes; /memory TEXT searches them." if older_count > 0 else ""
        )
        return self._reply("\n".join(lines) + f"{hint}\n\n/forget ID deletes one.")

    async def _run_forget(self) -> Answer:
        memory = self.instance.memory
        if memory is None:
            return self._reply(_NO_MEMORY_TEXT)
        if not self.argument:
            return self._reply("Which note? /memory lists them with their ids: /forget ID")
        scope = await self._run(self.instance.memory_scope, self.key, sender=self.sender)
        note = await self._run(memory.forget, self.argument, scope=scope)
        return self._reply(f"Forgotten: {note.text}")

    async def _run_model(self) -> Answer:
        if not self.argument:
            model = await self._run(self.instance.model_of, self.key)
            return self._reply(
                f"The model of this session is {model.name}. /model NAME changes it."
            )
        choose_model = self.instance.choose_model
        model = await self._run(choose_model, self.key, self.argument, any_model=self.all_sessions)
        return self._reply(f"The model of this session is {model.name} now.")

    async def _run_help(self) -> Answer:
        lines = [
            f"- `/{name}{' ' if command.arguments else ''}{command.arguments}` {command.help}"
            for name, command in COMMANDS.items()
        ]
        return self._reply("\n".join(lines) + "\n\n`//text` sends `/text` to the model.")


_BUSY_TEXT: Final = "An answer is in progress. /stop ends it."
_NO_MEMORY_TEXT: Final = "This agent has no memory in this run."
_MESSAGE_ARRIVED_TEXT: Final = (
    "Another message has just arrived in this session, so nothing was changed. Try again."
)
_OPERATION_NAMES: Final = {
    "replace": "the last /retry or /edit",
    "checkpoint": "the last summary",
    "clear": "the last /clear",
    "hide": "the last hiding of messages",
    "show": "the last showing of hidden messages",
    "summary": "the last change of the summary",
}
"""Names of the store's operations in chat messages."""


def _format_sessions(entries: Sequence[Entry]) -> str:
    lines = []
    for entry in entries[:_MAX_LISTED_ITEMS]:
        count_text = f"{entry.count} message{'' if entry.count == 1 else 's'}"
        updated_text = "" if entry.updated is None else f"{entry.updated:%Y-%m-%d %H:%M}"
        title = entry.title or "(no title)"
        lines.append(f"- `{entry.key}` · {count_text} · {updated_text} · {title}")
    unlisted_count = len(entries) - _MAX_LISTED_ITEMS
    hint = (
        f"\n\n{unlisted_count} more; /sessions TEXT narrows the list." if unlisted_count > 0 else ""
    )
    return "\n".join(lines) + hint


def _message_count_with_verb(count: int) -> str:
    """Return a text such as `1 message is` or `2 messages are`."""
    return "1 message is" if count == 1 else f"{count} messages are"


def _format_error(error: StenologError) -> str:
    text = str(error)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def _last_user_index(history: Sequence[Message]) -> int | None:
    """Return the index of the last user message with text; None if no user message has text."""
    for index in range(len(history) - 1, -1, -1):
        if has_text(body := history[index].to_dict()) and text_parts_of(body):
            return index
    return None


def _index_after_earlier_answers(history: Sequence[Message], user_index: int) -> int:
    """Return the index after the answers to earlier messages, at least `user_index` + 1.

    An answer to an earlier message follows the message at `user_index` if the user sent that
    message while the earlier answer was being written.
    """
    user_seq = history[user_index].seq
    for index in range(len(history) - 1, user_index, -1):
        body = history[index].to_dict()
        if is_finished_answer(body) and not has_seen(body, history[index].seq, user_seq):
            return index + 1
    return user_index + 1
