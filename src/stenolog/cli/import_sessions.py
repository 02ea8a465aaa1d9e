"""`steno import`: import sessions of other programs, and report problems."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from stenolog.cli.output import (
    EXIT_PARTIAL,
    attributes_of,
    one_line,
    plural,
    print_notice,
    print_rows,
    print_table,
    sentence,
    show_import_progress,
)
from stenolog.cli.workspace import (
    Location,
    dry_run_option,
    json_option,
    location_options,
)
from stenolog.codec import check_key
from stenolog.errors import UsageError
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.json_file import META_SUFFIX
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.open_store import is_server_address, open_store, parse_address
from stenolog.transfer.importers.legacy_session import ALL_LAYOUTS, LOG_SUFFIX, Layout
from stenolog.transfer.migration import ImportedSession, ImportReport, import_folder

MAX_LISTED_KEYS: Final = 5
"""Maximum number of keys listed in the error for an unknown key."""
_STORE_URL: Final = re.compile(r"(sqlite|jsonl|memory|postgres(ql)?):")
_STORE_FOLDERS: Final = ("archive", "trash", "locks", "aside", "sessions", "notes", "agents")
"""Folders of a stenolog store, which may be next to the files to import."""
PROGRAMS: Final[dict[str, frozenset[Layout]]] = {
    "picoclaw": frozenset({"picoclaw", "picoclaw-legacy"}),
    "zeroclaw": frozenset({"zeroclaw"}),
    "plain": frozenset({"plain"}),
}
"""File layouts of each program that `--from` accepts."""
TRANSCRIPT_PROGRAMS: Final = (
    "claude-code",
    "codex",
    "chatgpt",
    "llm",
    "gemini-cli",
    "opencode",
    "claude-ai",
    "open-webui",
)
"""Programs whose transcripts can be imported (transfer/transcripts)."""
NEEDED_PATHS: Final = {
    **dict.fromkeys(PROGRAMS, "file or folder"),
    "chatgpt": "zip or JSON file of the export",
    "claude-ai": "zip or JSON file of the export",
    "open-webui": "JSON file of the export",
}
"""Kind of path that the user must give, by program. Other programs have a usual place."""
_MAX_ECHOED_CHARACTERS: Final = 200
"""Maximum number of characters of SOURCE in the error for a missing file."""


class _SourceType(click.Path):
    """A file or folder of another program, or the name of a program.

    Addresses and databases of stenolog stores are rejected.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        is_missing = not os.path.lexists(value)  # This is also True if the name is too long.
        if is_missing and value in NEEDED_PATHS:
            text = f"{value} has no usual place; name the {NEEDED_PATHS[value]}"
            self.fail(f"{text}: steno import --from {value} PATH", param, ctx)
        if is_missing and value in TRANSCRIPT_PROGRAMS:
            return value
        is_database = not is_missing and _is_stenolog_database(value)
        if is_database or _STORE_URL.match(str(value)):
            self.fail("this is a store of stenolog; copy it with `steno copy SRC DST`.", param, ctx)
        if is_missing and is_server_address(value):  # guard: import-address-not-quoted
            self.fail("this is an address; name a file or folder.", param, ctx)
        if is_missing:
            text = f"{one_line(value)[:_MAX_ECHOED_CHARACTERS]}: there is no such file or folder."
            self.fail(f"{text} Known programs: {', '.join(TRANSCRIPT_PROGRAMS)}.", param, ctx)
        return super().convert(value, param, ctx)


def _is_stenolog_database(path: str) -> bool:
    # This import loads SQLite, which is only needed here.
    from stenolog.transfer.transcripts.sqlite_file import is_stenolog_database

    return is_stenolog_database(Path(path))


@click.command("import")
@click.argument("source", type=_SourceType(exists=True, path_type=Path))
@click.option(
    "--from",
    "program",
    type=click.Choice([*PROGRAMS, *TRANSCRIPT_PROGRAMS]),
    help="Program that wrote SOURCE.  [default: detected]",
)
@click.option(
    "--map",
    "key_pairs",
    multiple=True,
    metavar="OLD=NEW",
    help="Import session OLD as NEW; a * in both stands for the same text. Repeatable.",
)
@click.option("--aliases", is_flag=True, help="Use the aliases in SOURCE.")
@click.option(
    "-r", "--recursive", is_flag=True, help="Also search subfolders; keys start with the path."
)
@click.option("--watch", is_flag=True, help="Keep importing new messages. Transcripts only.")
@dry_run_option
@json_option("one JSON object per session")
@location_options
def import_command(
    source: Path | str,
    program: str | None,
    key_pairs: tuple[str, ...],
    aliases: bool,
    recursive: bool,
    watch: bool,
    dry_run: bool,
    location: Location,
) -> int:
    """Import sessions of other programs from SOURCE.

    SOURCE is a folder, a file, or the name of a coding agent, for the default folder of the agent.

    \b
    Transcripts of coding agents and chat exports:
      claude-code, codex, gemini-cli, opencode, llm,
      chatgpt, claude-ai, open-webui

    \b
    Other programs, detected automatically unless --from is given:
      picoclaw  .jsonl with .meta.json, and the older .json
      zeroclaw  .jsonl
      plain     [{"role": ...}, ...] as .json, or one message per line

    SOURCE is not changed, with one exception: if it is the session folder of the workspace itself,
    imported files are renamed to .migrated. Importing again adds only new messages. If SOURCE is a
    folder, its files and the files of its subfolder sessions are read. --recursive reads all
    subfolders: the session in a/b/talk.json gets the key a/b/talk.

    Imported messages are never answered or sent to a chat app. An alias is a second key of a
    session: new messages with this key are added to the session. The aliases in SOURCE are listed,
    and used only with --aliases.

    In a terminal the command prints a table. In a pipe the command prints one line per session,
    with columns separated by tabs. For transcripts, only sessions with new or changed messages are
    printed.

    \b
    Columns of transcripts:
      1  key
      2  number of messages added
      3  number of messages in the transcript; missing with --watch

    \b
    Columns of other programs:
      1  key
      2  number of messages added
      3  number of messages in the file
      4  layout: the kind of file that was recognized
      5  file

    \b
    Examples:
      steno import claude-code
      steno import ~/Downloads/chatgpt-export.zip
      steno import ~/.picoclaw/workspace --dry-run
      steno import --recursive chats/

    Exit codes: 0 everything is imported, now or earlier, 1 failed or nothing to import, 2 wrong
    usage, 3 something could not be imported; the reasons are on stderr.
    """  # noqa: D301 -- click does not rewrap a block after \b
    if watch and dry_run:
        raise click.UsageError("--watch and --dry-run cannot be combined.")
    if isinstance(source, str) and program not in (None, source):
        raise click.UsageError(f"SOURCE is {source}, but --from is {program}.")
    transcripts = _find_transcripts(source, program)
    if transcripts is not None:
        if key_pairs or aliases:
            raise click.UsageError("--map and --aliases do not apply to transcripts.")
        return _import_transcripts(*transcripts, location, watch=watch, dry_run=dry_run)
    if watch:
        raise click.UsageError("--watch applies only to transcripts of coding agents.")
    source = Path(source)
    folder, file_name = _split_source(source)
    folders = [folder]
    if recursive and file_name is None:
        folders = [source, *_find_subfolders(source)]
    layouts = ALL_LAYOUTS if program is None else PROGRAMS[program]
    import_all = partial(_import_folders, folders, only=file_name, layouts=layouts)
    import_all = partial(import_all, accept_aliases=aliases)
    import_all = partial(import_all, map_key=_make_key_map(key_pairs, import_all))
    import_all = partial(import_all, dry_run=dry_run)
    report = _import_sessions(import_all, folders, file_name, location, dry_run=dry_run)
    return _print_report(report, source, program, recursive=recursive, dry_run=dry_run)


def _import_sessions(
    import_all: Callable[..., ImportReport],
    folders: Sequence[Path],
    file_name: str | None,
    location: Location,
    *,
    dry_run: bool,
) -> ImportReport:
    """Import the sessions with `import_all`. Creates no store if there is nothing to import."""
    if not _store_exists(location):
        # Opening the store creates the workspace, so first check with a dry run whether there is
        # a session to import.
        report = import_all(store=InMemoryStore(), dry_run=True)
        if not report.imported:
            return report
    with _open_target(location, dry_run=dry_run) as store:
        is_session_folder = isinstance(store, JSONLStore) and store.folder.samefile(folders[0])
        byte_count = 0 if dry_run else _count_import_bytes(folders, file_name)
        with show_import_progress(byte_count) as progress:
            return import_all(
                store=store,
                rename_files=is_session_folder,
                is_own=is_session_folder,
                progress=progress,
            )


def _print_report(
    report: ImportReport, source: Path, program: str | None, *, recursive: bool, dry_run: bool
) -> int:
    """Print what was imported and what was not, and return the exit code."""
    print_rows(
        report.imported,
        fields=lambda session: {**_session_fields(session), "dry_run": dry_run},
        cells=_session_cells,
        table=_print_table,
    )
    problems = list(_problem_lines(report))
    print_notice(*problems)
    print_notice(*_alias_lines(report, dry_run=dry_run))
    print_notice(*_report_lines(report, source, program, recursive=recursive, dry_run=dry_run))
    if not report.imported and not report.migrated:
        return 1
    return EXIT_PARTIAL if problems else 0


def _alias_lines(report: ImportReport, *, dry_run: bool) -> Iterator[str]:
    verb = "would have" if dry_run else "now has"
    for session in report.imported:
        if session.aliases:
            names_text = ", ".join(map(one_line, session.aliases))
            yield f"{one_line(session.key)} {verb} the aliases: {names_text}."
    unaccepted_sessions = [session for session in report.imported if session.unaccepted_aliases]
    for session in unaccepted_sessions:
        names_text = ", ".join(map(one_line, session.unaccepted_aliases))
        yield f"The file names aliases of {one_line(session.key)}: {names_text}."
    if unaccepted_sessions:
        yield "These aliases were not accepted. To accept them, import again with --aliases."


def _find_transcripts(source: Path | str, program: str | None) -> tuple[str, Path] | None:
    """Return program and path of the transcripts; None if SOURCE is not imported as transcripts."""
    if program in PROGRAMS:
        return None
    # This import loads the readers of all programs.
    from stenolog.transfer.transcripts.programs import detect_program, find_transcripts_path

    if isinstance(source, str):
        path = find_transcripts_path(source)
        if path is None:
            raise click.ClickException(
                f"No transcripts of {source} in the usual place; "
                f"name their folder: steno import --from {source} FOLDER"
            )
        return source, path
    if program is not None:
        return program, source
    program = detect_program(source)
    return None if program is None else (program, source)


def _import_transcripts(
    program: str, path: Path, location: Location, *, watch: bool, dry_run: bool
) -> int:
    """Import the transcripts of a program and return the exit code."""
    from stenolog.cli.import_transcripts import TranscriptsCommand

    has_files = watch or TranscriptsCommand(program, path, InMemoryStore()).find_files()
    # If there are no transcripts, use a store in memory, so that no workspace is created.
    with _open_target(location, dry_run=dry_run) if has_files else InMemoryStore() as store:
        command = TranscriptsCommand(program, path, store)
        exit_code = command.run(dry_run=dry_run)
        if watch:
            command.watch()
    return exit_code


def _make_key_map(
    key_pairs: Sequence[str], import_all: Callable[..., ImportReport]
) -> Callable[[str], str]:
    """Return the function from old to new keys. Raises UsageError for a wrong OLD=NEW pair.

    A pair without `*` wins over pairs with `*`. Of several pairs with `*`, the first wins. A dry
    run of `import_all` finds the keys of SOURCE.
    """
    pairs = {text: _parse_pair(text) for text in sorted(key_pairs, key=lambda text: "*" in text)}

    def map_key(key: str) -> str:
        matches = ((pattern.fullmatch(key), new) for pattern, new in pairs.values())
        new_keys = (new.replace("*", "".join(match.groups())) for match, new in matches if match)
        return next(new_keys, key)

    source_keys: list[str] = []

    def collect_key(key: str) -> str:
        source_keys.append(key)
        return key

    # Check the keys before writing: a typing error would create sessions with wrong keys.
    report = ImportReport()
    if pairs:
        report = import_all(store=InMemoryStore(), dry_run=True, map_key=collect_key)
    for text, (pattern, _) in pairs.items():
        if not any(map(pattern.fullmatch, source_keys)):
            names_text = ", ".join(map(one_line, source_keys[:MAX_LISTED_KEYS]))
            more = ", …" if len(source_keys) > MAX_LISTED_KEYS else ""
            known_text = f"; known keys: {names_text}{more}" if source_keys else ""
            error = f"--map {one_line(text)}: SOURCE has no session with that key"
            raise click.UsageError(f"{error}{known_text}")
    for key, count in Counter(map(map_key, set(source_keys))).items():
        if count > 1:
            raise click.UsageError(f"--map: several sessions would get the key {one_line(key)}")
    mapped_keys = {map_key(key): key for key in source_keys if map_key(key) != key}
    for session in report.imported:
        for alias in session.aliases:
            if mapped_keys.get(alias, session.key) != session.key:
                text = f"{one_line(alias)} is an alias of {one_line(session.key)}"
                raise click.UsageError(f"--map: {text}, so no other session can get this key")
    return map_key


def _parse_pair(text: str) -> tuple[re.Pattern[str], str]:
    """Return the pattern of old keys, and the new key, of an OLD=NEW pair. Raises UsageError."""
    old, _, new = text.partition("=")
    if not old or not new or old.count("*") != new.count("*") or old.count("*") > 1:
        raise click.UsageError(
            f"--map {one_line(text)}: the form is OLD=NEW, the key in SOURCE and the key here, "
            "with one * in both or in neither"
        )
    try:
        check_key(new)
    except UsageError as error:
        raise click.UsageError(f"--map: {one_line(str(error))}") from error
    return re.compile(re.escape(old).replace(r"\*", "(.*)"), re.DOTALL), new


def _session_fields(imported: ImportedSession) -> dict[str, Any]:
    return {
        **attributes_of(imported, "key", "added", "messages", "dropped", "layout", "file"),
        **attributes_of(imported, "problems", "aliases"),
        "aliases_left": imported.unaccepted_aliases,
    }


def _session_cells(imported: ImportedSession) -> Sequence[object]:
    return imported.key, imported.added, imported.messages, imported.layout, imported.file


def _print_table(sessions: Sequence[ImportedSession]) -> None:
    number_style = {"justify": "right", "no_wrap": True}
    # Users copy the key: it is wrapped, never shortened.
    columns: dict[str, dict[str, Any]] = {
        "key": {"overflow": "fold"},
        "added": number_style,
        "messages": number_style,
        "file": {"overflow": "fold"},
    }

    def table_row(session: ImportedSession) -> Sequence[Any]:
        file = (one_line(Path(session.file).name), "dim")
        return (one_line(session.key), "cyan"), str(session.added), str(session.messages), file

    print_table(columns, map(table_row, sessions))


def _find_subfolders(folder: Path) -> list[Path]:
    """Return the subfolders to import with --recursive, without hidden folders and links.

    Folders of a stenolog store are not left out, because its logs are recognized by their content
    and not imported.
    """
    folders = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            folders += [path, *_find_subfolders(path)]
    return folders


def _import_folders(
    folders: Sequence[Path],
    store: Store,
    *,
    map_key: Callable[[str], str],
    rename_files: bool = False,
    **options: Any,
) -> ImportReport:
    """Import a folder and its subfolders. Keys from a subfolder start with the subfolder's path."""
    folder, *subfolders = folders
    report = import_folder(folder, store, map_key=map_key, rename_files=rename_files, **options)
    for path in subfolders:

        def map_with_prefix(key: str, prefix: str = path.relative_to(folder).as_posix()) -> str:
            return map_key(f"{prefix}/{key}")

        report = report.combined_with(
            import_folder(path, store, map_key=map_with_prefix, rename_files=False, **options)
        )
    return report


def _split_source(source: Path) -> tuple[Path, str | None]:
    """Return the folder to search, and the file name if SOURCE is a file."""
    if source.is_dir():
        sessions_folder = source / "sessions"
        return (sessions_folder if sessions_folder.is_dir() else source), None
    name = source.name
    if name.endswith(META_SUFFIX):
        name = name.removesuffix(META_SUFFIX) + LOG_SUFFIX
    return source.parent, name


def _store_exists(location: Location) -> bool:
    place = location.place
    address = parse_address(place.where)
    if address.engine == "postgresql":
        return True
    path = Path(address.path)
    return (path / place.namespace if address.engine == "jsonl" else path).exists()


def _open_target(location: Location, *, dry_run: bool) -> Store:
    """Open the store. For a dry run it is read-only, and empty if it does not exist yet."""
    if dry_run and not _store_exists(location):
        return InMemoryStore()
    place = location.place
    return open_store(place.where, namespace=place.namespace, read_only=dry_run)


def _count_import_bytes(folders: Sequence[Path], file_name: str | None) -> int:
    """Return the number of bytes in the files to import."""
    if file_name is None:
        files = [path for folder in folders for path in folder.iterdir()]
    else:
        files = [folders[0] / file_name]
    return sum(path.stat().st_size for path in files if path.is_file())


def _problem_lines(report: ImportReport) -> Iterator[str]:
    for session in report.imported:
        for problem in session.problems:
            yield f"{one_line(session.file)}: {sentence(problem)}"
    for skipped in report.skipped:
        yield f"{one_line(skipped.file)} was skipped: {sentence(skipped.reason)}"


def _report_lines(
    report: ImportReport, source: Path, program: str | None, *, recursive: bool, dry_run: bool
) -> Iterator[str]:
    if report.migrated and not report.imported:
        yield f"Already imported: {plural(report.migrated, 'file')} *.migrated."
    if report.imported or report.skipped:
        yield _total_line(report, dry_run=dry_run)
    if not (report.imported or report.migrated or report.skipped):
        sought_text = f"sessions of {program}" if program else "session files of a known program"
        place = one_line(str(source))
        yield f"No {sought_text} in {place}. `steno import --help` lists the programs."
    paths = source.iterdir() if source.is_dir() and not recursive else ()
    folder_count = sum(path.is_dir() and path.name not in _STORE_FOLDERS for path in paths)
    if folder_count:
        yield f"{plural(folder_count, 'subfolder')} not searched. Use --recursive to search them."


def _total_line(report: ImportReport, *, dry_run: bool) -> str:
    verb = "Would import" if dry_run else "Imported"
    parts = [f"{verb} {plural(report.sessions, 'session')}, {plural(report.messages, 'message')}"]
    if earlier_count := sum(session.already_imported for session in report.imported):
        parts.append(f"{plural(earlier_count, 'session')} already imported")
    if report.skipped:
        parts.append(f"{plural(len(report.skipped), 'file')} skipped")
    if report.dropped:
        parts.append(f"{plural(report.dropped, 'message')} could not be imported")
    return f"{'; '.join(parts)}."
