"""Archives: those that a session leads to, each naming the one before it, and those of nobody."""

import os
from collections.abc import Iterator, Sequence

from stenolog.errors import StenologError
from stenolog.records import Span, State
from stenolog.sessions.damage import Finding, Kind, lost_in_words
from stenolog.sessions.standing_still import folder_below, judge_file, names_in, trash_of
from stenolog.stores import spans
from stenolog.stores.jsonl import archive, names, trash
from stenolog.stores.jsonl.directory import Directory


def archives_of(
    directory: Directory, namespace: str, state: State, reached: set[str]
) -> Iterator[Finding]:
    """What is wrong with the archives that a state leads to; their names go into `reached`."""
    named = state.archive
    while named is not None:
        reached.add(named.name)
        path = f"{namespace}/{archive.FOLDER}/{state.uid}/{named.name}"
        whole = [(named.first, named.last)]
        gone = [*state.void, *state.purged]
        try:
            opened = archive.read(directory, state.uid, named)
        except StenologError as error:
            yield _damaged_archive(state.key, path, f"It could not be read: {error}.", whole)
            return
        held = spans.union(((m.seq, m.seq) for m in opened.messages), gone)
        lost = spans.minus(whole, held)
        if not os.path.lexists(directory.path / opened.path):
            yield Finding(
                kind=Kind.MISSING_ARCHIVE,
                key=state.key,
                path=path,
                where="",
                meaning=f"The session's beginning was here. {lost_in_words(lost)}",
                advice="Put the file back from a backup.",
                lost=tuple(lost),
            )
            return
        if any(not piece.known for piece in opened.bad) or lost:
            meaning = f"Part of it cannot be unpacked or read. {lost_in_words(lost)}"
            yield _damaged_archive(state.key, path, meaning, lost)
        named = opened.before if archive.is_before(opened.before, named) else None


def _damaged_archive(key: str, path: str, meaning: str, lost: Sequence[Span]) -> Finding:
    return Finding(
        kind=Kind.DAMAGED_ARCHIVE,
        key=key,
        path=path,
        where="",
        meaning=meaning,
        advice="Put the file back from a backup.",
        lost=tuple(lost),
    )


def listed_archives(directory: Directory) -> dict[str, list[str]]:
    """The files of each uid."""
    found = {}
    with folder_below(directory, archive.FOLDER) as top:
        for uid in names_in(top):
            with folder_below(directory, archive.FOLDER, uid) as below:
                if below is not None:
                    found[uid] = names_in(below)
    return found


def spare_archives(
    directory: Directory, folder: int | None, uid: str, key: str | None
) -> list[str]:
    """The files in a folder of archives that the session of this key does not lead to.

    None of them where that cannot be told. The folder must stand still.
    """
    reached: set[str] = set()
    if key is not None:
        state = _state_of(directory, uid, key)
        if state is None or list(archives_of(directory, "", state, reached)):
            return []
    return [file for file in names_in(folder) if file not in reached]


def _state_of(directory: Directory, uid: str, key: str) -> State | None:
    """The state of one life of a key, live or deleted; None where it cannot be told."""
    judged = judge_file(directory, "", names.file_name(key))
    if judged is not None and judged.state is not None and judged.state.uid == uid:
        return judged.state
    with trash_of(directory) as folder:
        for entry in trash.entries(directory) if folder is not None else []:
            if entry.uid == uid and folder is not None:
                judged = judge_file(folder, "", entry.name, deleted=True)
                return judged.state if judged is not None else None
    return None
