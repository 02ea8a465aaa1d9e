"""What tells of a session beside its own storage: its forks, other names, logs, what was typed."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote

from stenolog.cli.text import one_line
from stenolog.errors import StenologError
from stenolog.records import Message
from stenolog.sessions.aliases import NO_ALIASES, Aliases, alias_mark, claimed
from stenolog.sessions.fallback import copies_in_fallback
from stenolog.sessions.folders import NAMESPACE, find_place
from stenolog.sessions.retention_runs import forget_in_log
from stenolog.stores.base import Store
from stenolog.stores.opening import address
from stenolog.stores.snapshots import Life, WholeStore


def other_names(store: Store) -> Mapping[str, Collection[str]]:
    """The aliases of each session that was given any, deleted ones included."""
    if alias_mark(store) == NO_ALIASES:
        return {}
    found = {key: set(names) for key, names in Aliases(store).claims().items()}
    for life in deleted_lives(store):
        if life.forked_from is None and claimed(life.meta):
            found.setdefault(life.key, set()).update(claimed(life.meta))
    return found


def forks_of(store: Store, keys: Collection[str]) -> Mapping[str, list[str]]:
    """The sessions that were forked from these, deleted ones included, as far as can be read."""
    found: dict[str, list[str]] = {}
    for key in store.list_sessions():
        with suppress(StenologError):
            source = store.info(key).forked_from
            if source in keys and source is not None:
                found.setdefault(source, []).append(key)
    for life in deleted_lives(store):
        if life.forked_from in keys and life.forked_from is not None:
            found.setdefault(life.forked_from, []).append(life.key)
    return found


def deleted_lives(store: Store) -> Iterator[Life]:
    """What is in the trash, as far as it can be read."""
    if not isinstance(store, WholeStore):
        return
    for mark in store.lives():
        if mark.deleted is not None:
            with suppress(StenologError), store.read_life(mark) as reading:
                yield reading.life


def copies_of(workspace: str, agent: str | None, is_meant: Callable[[str], bool]) -> Iterator[str]:
    """The sessions that a fallback folder still has, each as words for a sentence."""
    place = find_place(workspace, agent)
    for namespace, key in sorted(copies_in_fallback(place)):
        if is_meant(key):
            other = "" if namespace == NAMESPACE else f" --namespace {quote(namespace)}"
            command = f"steno purge {quote(key)} -w {quote(str(place.fallback))}{other}"
            yield one_line(
                f"what the fallback folder {place.fallback}/{namespace} has of {key}; "
                f"`{command}` deletes it"
            )


# --- what was typed --------------------------------------------------------------------------


def typed_history() -> Path | None:
    """The file with what was typed into chats; None where there is none."""
    # Slow to import, and only a purge needs it.
    from stenolog.cli.chat_history import history_file

    file = history_file()
    with suppress(OSError):
        if file.stat().st_size:
            return file
    return None


def said_in(store: Store, key: str, before: int | None) -> Iterator[str]:
    """What a user said in the sessions of a key, below this seq, as far as it can be read."""
    with suppress(StenologError):
        yield from _texts(store.get_history(key, full=True), before)
    if before is None and isinstance(store, WholeStore):
        for mark in store.lives():
            if mark.deleted is not None and mark.key == key:
                with suppress(StenologError), store.read_life(mark) as reading:
                    yield from _texts(reading.messages, None)


def _texts(messages: Iterable[Message], before: int | None) -> Iterator[str]:
    for message in messages:
        meant = before is None or message.seq < before
        body = message.to_dict() if meant else {}
        content = body.get("content")
        if body.get("role") == "user" and isinstance(content, str):
            yield content.strip()


def forget_typed(file: Path, said: Collection[str]) -> str:
    """Take out of the history of chats what was said; what is wrong where that cannot be done."""
    from stenolog.cli.chat_history import forget

    try:
        forget(file, said)
    except OSError as error:
        return f"what was typed into chats, in {one_line(str(file))}: {error.strerror}"
    return ""


# --- the log of retention --------------------------------------------------------------------


def forget_logged(workspace: str, is_meant: Callable[[str, str], bool]) -> str:
    """Make the log of retention name these sessions no more; what it is that still does."""
    if address(workspace).engine != "jsonl":
        return "what retention told of it in the log of the program"
    try:
        forget_in_log(workspace, is_meant)
    except StenologError as error:
        return f"lines of the log of retention: {error}"
    return ""
