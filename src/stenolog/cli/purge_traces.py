"""Traces of a session outside its own storage: forks, aliases, logs, input history."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote

from stenolog.cli.output import one_line
from stenolog.errors import StenologError
from stenolog.maintenance.retention_runs import mask_keys_in_log
from stenolog.records import Message
from stenolog.sessions.aliases import NO_ALIASES, Aliases, alias_mark, aliases_in
from stenolog.sessions.folders import NAMESPACE, locate_sessions
from stenolog.stores.base import Store
from stenolog.stores.open_store import address
from stenolog.stores.snapshots import Snapshot, SnapshotStore
from stenolog.transfer.fallback import copies_in_fallback


def other_names(store: Store) -> Mapping[str, Collection[str]]:
    """Return the aliases of each session that has any, including deleted sessions."""
    if alias_mark(store) == NO_ALIASES:
        return {}
    found = {key: set(names) for key, names in Aliases(store).aliases_by_session().items()}
    for snapshot in deleted_snapshots(store):
        if snapshot.forked_from is None and aliases_in(snapshot.meta):
            found.setdefault(snapshot.key, set()).update(aliases_in(snapshot.meta))
    return found


def forks_of(store: Store, keys: Collection[str]) -> Mapping[str, list[str]]:
    """Return the forks of these sessions, including deleted ones, if they can be read."""
    found: dict[str, list[str]] = {}
    for key in store.list_sessions():
        with suppress(StenologError):
            source = store.info(key).forked_from
            if source in keys and source is not None:
                found.setdefault(source, []).append(key)
    for snapshot in deleted_snapshots(store):
        if snapshot.forked_from in keys and snapshot.forked_from is not None:
            found.setdefault(snapshot.forked_from, []).append(snapshot.key)
    return found


def deleted_snapshots(store: Store) -> Iterator[Snapshot]:
    """Yield the sessions in the trash that can be read."""
    if not isinstance(store, SnapshotStore):
        return
    for mark in store.list_snapshots():
        if mark.deleted is not None:
            with suppress(StenologError), store.read_snapshot(mark) as reading:
                yield reading.snapshot


def copies_of(workspace: str, agent: str | None, is_meant: Callable[[str], bool]) -> Iterator[str]:
    """Yield a phrase for each session that the fallback folder still contains."""
    place = locate_sessions(workspace, agent)
    for namespace, key in sorted(copies_in_fallback(place)):
        if is_meant(key):
            other = "" if namespace == NAMESPACE else f" --namespace {quote(namespace)}"
            command = f"steno purge {quote(key)} -w {quote(str(place.fallback))}{other}"
            yield one_line(
                f"messages of {key} in the fallback folder {place.fallback}/{namespace}; delete "
                f"them with `{command}`"
            )


# --- input history ---------------------------------------------------------------------------


def typed_history() -> Path | None:
    """Return the input history of chats, or None if it is missing or empty."""
    # Imported late: slow, and only needed for a purge.
    from stenolog.cli.chat_history import history_file

    file = history_file()
    with suppress(OSError):
        if file.stat().st_size:
            return file
    return None


def said_in(store: Store, key: str, before: int | None) -> Iterator[str]:
    """Yield the readable user messages with this key, below seq `before` if it is given."""
    with suppress(StenologError):
        yield from _texts(store.get_history(key, full=True), before)
    if before is None and isinstance(store, SnapshotStore):
        for mark in store.list_snapshots():
            if mark.deleted is not None and mark.key == key:
                with suppress(StenologError), store.read_snapshot(mark) as reading:
                    yield from _texts(reading.messages, None)


def _texts(messages: Iterable[Message], before: int | None) -> Iterator[str]:
    for message in messages:
        meant = before is None or message.seq < before
        body = message.to_dict() if meant else {}
        content = body.get("content")
        if body.get("role") == "user" and isinstance(content, str):
            yield content.strip()


def forget_typed(file: Path, said: Collection[str]) -> str:
    """Remove messages from the input history; return a phrase about the failure, or nothing."""
    from stenolog.cli.chat_history import forget

    try:
        forget(file, said)
    except OSError as error:
        return f"chat input in {one_line(str(file))}: {error.strerror}"
    return ""


# --- the log of retention --------------------------------------------------------------------


def forget_logged(workspace: str, is_meant: Callable[[str, str], bool]) -> str:
    """Remove sessions from the log of retention; return a phrase about what remains, or nothing."""
    if address(workspace).engine != "jsonl":
        return "entries about it that retention wrote to the program's log"
    try:
        mask_keys_in_log(workspace, is_meant)
    except StenologError as error:
        return f"entries in the retention log: {error}"
    return ""
