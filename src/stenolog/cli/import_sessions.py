"""`steno import`: import sessions of other programs, and report problems."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from msgspec.structs import replace

from stenolog.cli.output import (
    PARTIAL,
    json_text,
    one_line,
    plural,
    print_table,
    sentence,
    table_console,
)
from stenolog.cli.workspace import Location, location_options, open_read_only
from stenolog.errors import UsageError
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.json_file import META_SUFFIX
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.open_store import address, open_store
from stenolog.transfer.importers.key_map import KeyMap, parse_pair, parse_pairs
from stenolog.transfer.importers.legacy_session import ALL_LAYOUTS, LOG_SUFFIX, Layout
from stenolog.transfer.migration import ImportedSession, ImportReport, Progress, import_folder

PROGRESS_BYTES: Final = 1024 * 1024
"""Size in bytes from which a progress bar is shown."""
MAX_KEYS_LISTED: Final = 5
"""Maximum number of keys listed if a key was not found."""
_STORE_URL: Final = re.compile(r"(sqlite|jsonl|memory|postgres(ql)?):")
_STORE_FOLDERS: Final = ("archive", "trash", "locks", "aside", "sessions", "notes", "agents")
"""Folders of a stenolog store, which may be next to the files to import."""


PROGRAMS: Final[dict[str, frozenset[Layout]]] = {
    "picoclaw": frozenset({"picoclaw", "picoclaw-legacy"}),
    "zeroclaw": frozenset({"zeroclaw"}),
    "nanobot": frozenset({"nanobot"}),
    "openai-agents": frozenset({"openai-agents"}),
    "langchain": frozenset({"langchain"}),
    "strands": frozenset({"strands"}),
    "adk": frozenset({"adk"}),
    "plain": frozenset({"plain"}),
}
"""Layouts for each value of `--from`."""


TRANSCRIPTS: Final = (
    "claude-code",
    "codex",
    "chatgpt",
    "llm",
    "gemini-cli",
    "opencode",
    "claude-ai",
    "open-webui",
    "aider",
)
"""Programs whose transcripts are imported (transfer/transcripts)."""


class _Source(click.Path):
    """A file or folder of another program, or the name of a program.

    Addresses of stenolog stores are rejected.
    """

    def __init__(self) -> None:
        super().__init__(exists=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in TRANSCRIPTS and not Path(value).exists():
            return value
        if _STORE_URL.match(str(value)):
            self.fail("this is a store of stenolog; copy it with `steno copy SRC DST`.", param, ctx)
        return super().convert(value, param, ctx)


@click.command("import")
@click.argument("source", type=_Source())
@click.option(
    "--from",
    "program",
    type=click.Choice([*PROGRAMS, *TRANSCRIPTS]),
    help="Program that wrote SOURCE.  [default: detected]",
)
@click.option(
    "--map",
    "pairs",
    multiple=True,
    metavar="OLD=NEW",
    help="Import session OLD as NEW; a * in both stands for the same text. Repeatable.",
)
@click.option(
    "--map-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with OLD=NEW pairs, one per line.",
)
@click.option(
    "--aliases/--no-aliases",
    default=None,
    help="Accept other keys that SOURCE names for its sessions.  [default: ask in a terminal]",
)
@click.option(
    "-r", "--recursive", is_flag=True, help="Also search subfolders; keys begin with their path."
)
@click.option(
    "--time-field",
    metavar="NAME",
    default="",
    help="Field with the time of a plain message: ISO 8601, or s or ms since 1970.",
)
@click.option("--watch", is_flag=True, help="Keep importing new messages. Transcripts only.")
@click.option("--dry-run", is_flag=True, help="Show what would be done, without doing it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per session.")
@location_options
@click.pass_context
def import_command(
    ctx: click.Context,
    source: Path | str,
    program: str | None,
    pairs: tuple[str, ...],
    map_file: Path | None,
    aliases: bool | None,
    recursive: bool,
    time_field: str,
    watch: bool,
    dry_run: bool,
    as_json: bool,
    where: Location,
) -> None:
    """Import sessions of other programs from SOURCE.

    SOURCE is a folder, a file, or the name of a coding agent, whose usual folder is read then.

    \b
    Transcripts of coding agents and chat exports:
      claude-code, codex, gemini-cli, opencode, llm, aider,
      chatgpt, claude-ai, open-webui

    \b
    Other programs, detected automatically unless --from is given:
      picoclaw       .jsonl with .meta.json, and the older .json
      zeroclaw       .jsonl
      nanobot        .jsonl, also in the folders of its workspaces
      openai-agents  a SQLite file of SQLiteSession or SQLAlchemySession
      langchain      .json of FileChatMessageHistory, or a SQLite file
                     of SQLChatMessageHistory
      strands        the folders of FileSessionManager
      adk            a SQLite file of SqliteSessionService or
                     DatabaseSessionService
      plain          [{"role": ...}, ...] as .json, or one message per line;
                     {"messages": [...]} per line is one session per line

    SOURCE is not changed. Importing again adds only new messages. In a folder, the files in it or
    in its folder sessions are read, but no other subfolders, unless --recursive is given: then the
    session in a/b/talk.json gets the key a/b/talk. If SOURCE is the session folder of the
    workspace itself, imported files are renamed to .migrated.

    Imported messages are never answered or sent to a chat app. A file may name other keys for a
    session (aliases); future messages to those keys would be added to that session. They are
    listed, and used only with --aliases or if you confirm.

    Prints one line per session, separated by tabs: key, messages added, messages in the file,
    layout, file. In a terminal it prints a table.

    \b
    Examples:
      steno import claude-code
      steno import ~/Downloads/chatgpt-export.zip
      steno import ~/.picoclaw/workspace --dry-run
      steno import --recursive --time-field sent_at chats/

    Exit codes: 0 everything is imported, now or earlier, 1 failed or nothing to import, 2 wrong
    usage, 3 something could not be imported; the reasons are on stderr.
    """  # noqa: D301 -- click knows a block by this character
    transcripts = _find_transcripts(source, program)
    if transcripts is not None:
        if pairs or map_file is not None or aliases is not None or time_field:
            raise click.UsageError(
                "--map, --map-file, --aliases and --time-field do not apply to transcripts."
            )
        code = _import_transcripts(
            *transcripts,
            where,
            watch=watch,
            dry_run=dry_run,
            as_json=as_json,
            color=ctx.color is not False,
        )
        ctx.exit(code)
    if watch:
        raise click.UsageError("--watch applies only to transcripts of coding agents.")
    source = Path(source)
    folder, only = _source_folder(source)
    if recursive and only is None:
        folder = source
    layouts = ALL_LAYOUTS if program is None else PROGRAMS[program]
    folders = _subfolders(folder) if recursive and only is None else []
    look = partial(
        _import_folders, folder, folders, only=only, layouts=layouts, time_field=time_field
    )
    keys = _key_map(pairs, map_file, look)
    migrated = ImportReport()
    is_there = _store_exists(where)
    if not is_there:
        # Create a workspace only if there is a session to import.
        migrated = look(store=InMemoryStore(), rename_files=False, dry_run=True, map_key=keys)
    if is_there or migrated.imported:
        with (_open_read_only if dry_run else _open_writable)(where) as store:
            in_place = isinstance(store, JSONLStore) and store.folder.samefile(folder)
            with _show_progress([folder, *folders], only, shown=not dry_run) as progress:
                migrated = look(
                    store=store,
                    rename_files=in_place,
                    is_own=in_place,
                    aliases=bool(aliases),
                    dry_run=dry_run,
                    map_key=keys,
                    progress=progress,
                )
            if _confirm_aliases(migrated, aliases, dry_run=dry_run):
                named = look(store=store, rename_files=False, aliases=True, map_key=keys)
                migrated = _with_aliases(migrated, named)
    if as_json:
        for one in migrated.imported:
            click.echo(json_text({**_fields(one), "dry_run": dry_run}))
    elif sys.stdout.isatty() and migrated.imported:
        _print_table(migrated, color=ctx.color is not False)
    else:
        for one in migrated.imported:
            click.echo("\t".join(_row(one)))
    problems = list(_problem_lines(migrated))
    for words in (
        *problems,
        *_note_lines(migrated),
        *_alias_report(migrated, dry_run=dry_run),
        *_report_lines(migrated, source, program, recursive=recursive, dry_run=dry_run),
    ):
        click.echo(words, err=True)
    if not migrated.imported and not migrated.migrated:
        ctx.exit(1)
    ctx.exit(PARTIAL if problems else 0)


def _confirm_aliases(migrated: ImportReport, aliases: bool | None, *, dry_run: bool) -> bool:
    """Ask in a terminal whether to accept the aliases that were found."""
    found = [one for one in migrated.imported if one.unaccepted_aliases]
    if not found or aliases is not None or dry_run or not sys.stdin.isatty():
        return False
    for one in found:
        click.echo(_alias_line(one.key, one.unaccepted_aliases), err=True)
    return click.confirm("Accept these aliases?", err=True)


def _with_aliases(migrated: ImportReport, named: ImportReport) -> ImportReport:
    """Return the first report with the aliases that the second run has added."""
    given = {(one.file, one.key): one for one in named.imported}
    imported = []
    for one in migrated.imported:
        again = given.get((one.file, one.key))
        if again is not None and one.unaccepted_aliases:
            problems = tuple(dict.fromkeys((*one.problems, *again.problems)))
            one = replace(one, aliases=again.aliases, unaccepted_aliases=(), problems=problems)
        imported.append(one)
    return replace(migrated, imported=tuple(imported))


def _alias_report(migrated: ImportReport, *, dry_run: bool) -> Iterator[str]:
    for one in migrated.imported:
        if one.aliases:
            has = "would have" if dry_run else "now has"
            yield f"{one_line(one.key)} {has} the aliases: {_alias_names(one.aliases)}."
    left = [one for one in migrated.imported if one.unaccepted_aliases]
    for one in left:
        yield _alias_line(one.key, one.unaccepted_aliases)
    if left:
        yield "These aliases were not accepted. To accept them, import again with --aliases."


def _alias_line(key: str, names: Sequence[str]) -> str:
    return f"The file names aliases of {one_line(key)}: {_alias_names(names)}."


def _alias_names(names: Sequence[str]) -> str:
    return ", ".join(map(one_line, names))


def _find_transcripts(source: Path | str, program: str | None) -> tuple[str, Path] | None:
    """Return the program and place of transcripts; None if SOURCE holds other sessions."""
    if program in PROGRAMS:
        return None
    # Imported late: loads the readers of all programs.
    from stenolog.cli.import_transcripts import default_place
    from stenolog.transfer.transcripts.programs import detect_program

    if isinstance(source, str):
        return source, default_place(source)
    if program is not None:
        return program, source
    found = detect_program(source)
    # Aider's file is in the folder of a project, where there may be anything else.
    if found is None or (found == "aider" and _has_other_sessions(source)):
        return None
    return found, source


def _has_other_sessions(source: Path) -> bool:
    """Return whether a folder with transcripts also has sessions of the other programs."""
    if not source.is_dir():
        return False
    folder, only = _source_folder(source)
    report = import_folder(
        folder,
        InMemoryStore(),
        only=only,
        layouts=ALL_LAYOUTS,
        rename_files=False,
        dry_run=True,
    )
    return bool(report.imported)


def _import_transcripts(
    program: str,
    path: Path,
    where: Location,
    *,
    watch: bool,
    dry_run: bool,
    as_json: bool,
    color: bool,
) -> int:
    """Import the transcripts of a program and return the exit code."""
    from stenolog.cli.import_transcripts import TranscriptsCommand

    if dry_run or not (watch or TranscriptsCommand(program, path, None).files()):
        run = TranscriptsCommand(program, path, None)
        run.run()
        run.show(as_json=as_json, color=color, dry_run=dry_run)
        return run.exit_code
    with _open_writable(where) as store:
        run = TranscriptsCommand(program, path, store)
        run.run()
        run.show(as_json=as_json, color=color)
        code = run.exit_code
        if watch:
            run.watch()
    return code


def _key_map(pairs: Sequence[str], file: Path | None, look: Callable[..., ImportReport]) -> KeyMap:
    """Return the mapping from old to new keys. Raises UsageError for pairs that make no sense."""
    try:
        given = KeyMap(tuple(map(parse_pair, pairs)))
        text = "" if file is None else file.read_text("utf-8-sig")
        keys = KeyMap(given.pairs + parse_pairs(text))
    except UsageError as error:
        raise click.UsageError(f"--map: {one_line(str(error))}") from error
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--map-file cannot be read: {error}") from error
    if not keys.pairs:
        return keys
    found: list[str] = []

    def collect(key: str) -> str:
        found.append(key)
        return key

    # Check before anything is written: a typing error would create sessions with wrong names.
    look(store=InMemoryStore(), rename_files=False, dry_run=True, map_key=collect)
    for pair in given.unmatched(found):
        there = ", ".join(map(one_line, found[:MAX_KEYS_LISTED])) + (
            ", …" if len(found) > MAX_KEYS_LISTED else ""
        )
        has = f"; known keys: {there}" if found else ""
        raise click.UsageError(
            f"--map {one_line(str(pair))}: SOURCE has no session of that key{has}"
        )
    for key in keys.duplicates(found):
        raise click.UsageError(f"--map: several sessions would get the key {one_line(key)}")
    return keys


def _fields(one: ImportedSession) -> dict[str, Any]:
    return {
        "key": one.key,
        "added": one.added,
        "messages": one.messages,
        "dropped": one.dropped,
        "layout": one.layout,
        "file": one.file,
        "problems": list(one.problems),
        "notes": list(one.notes),
        "aliases": list(one.aliases),
        "aliases_left": list(one.unaccepted_aliases),
    }


def _row(one: ImportedSession) -> Sequence[str]:
    cells = (one.key, one.added, one.messages, one.layout, one.file)
    return [one_line(str(cell)) for cell in cells]


_MIN_WIDTHS: Final = {"added": 0, "messages": 60, "layout": 76, "file": 50}
"""Minimum width of the terminal for each column after the key."""


def _print_table(migrated: ImportReport, *, color: bool) -> None:
    console = table_console(color=color)
    shown = [name for name, width in _MIN_WIDTHS.items() if console.width >= width]
    columns: dict[str, dict[str, Any]] = {"key": {"overflow": "fold"}}
    for name in shown:
        justify = "right" if name in ("added", "messages") else "left"
        columns[name] = {"no_wrap": name != "file", "overflow": "fold", "justify": justify}
    rows = []
    for one in migrated.imported:
        key, *others = _row(one)
        cells: dict[str, Any] = dict(zip(_MIN_WIDTHS, others, strict=True))
        cells["file"] = one_line(Path(one.file).name), "dim"
        rows.append([(key, "cyan"), *(cells[name] for name in shown)])
    print_table(console, columns, rows)


def _subfolders(folder: Path) -> list[Path]:
    """Return all subfolders that --recursive searches: neither hidden ones nor links.

    Logs of stenolog in them are recognized by their content and not imported.
    """
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_dir() or path.name.startswith("."):
            continue
        if _is_searched_folder(path):
            continue
        found += [path, *_subfolders(path)]
    return found


def _import_folders(
    folder: Path,
    more: Sequence[Path],
    store: Store,
    *,
    map_key: Callable[[str], str] | None = None,
    rename_files: bool = False,
    **options: Any,
) -> ImportReport:
    """Import a folder and its subfolders. Keys of sessions in a subfolder begin with its path."""
    total = import_folder(folder, store, map_key=map_key, rename_files=rename_files, **options)
    for path in more:
        prefix = path.relative_to(folder).as_posix()

        def named(key: str, prefix: str = prefix) -> str:
            key = f"{prefix}/{key}"
            return key if map_key is None else map_key(key)

        found = import_folder(path, store, map_key=named, rename_files=False, **options)
        total = total.combined_with(found)
    return total


def _source_folder(source: Path) -> tuple[Path, str | None]:
    """Return the folder to search, and the file name if SOURCE is a file."""
    if source.is_dir():
        inside = source / "sessions"
        return (inside if inside.is_dir() else source), None
    name = source.name
    if name.endswith(META_SUFFIX):
        name = name.removesuffix(META_SUFFIX) + LOG_SUFFIX
    return source.parent, name


def _store_exists(where: Location) -> bool:
    place = where.place
    found = address(place.where)
    if found.engine == "postgresql":
        return True
    path = Path(found.path)
    return (path / place.namespace if found.engine == "jsonl" else path).exists()


def _open_writable(where: Location) -> Store:
    place = where.place
    return open_store(place.where, namespace=place.namespace)


def _open_read_only(where: Location) -> Store:
    """Open the store read-only; return an empty one if it does not exist yet."""
    found = address(where.workspace)
    is_there = found.engine == "postgresql" or Path(found.path).exists()
    return open_read_only(where) if is_there else InMemoryStore()


@contextmanager
def _show_progress(
    folders: Sequence[Path], only: str | None, *, shown: bool
) -> Iterator[Progress | None]:
    """Show a progress bar in a terminal if the import is large."""
    files = (
        [folders[0] / only]
        if only is not None
        else [path for folder in folders for path in _files(folder)]
    )
    size = sum(path.stat().st_size for path in files if path.is_file())
    if not shown or size < PROGRESS_BYTES or not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=size, label="Importing", file=sys.stderr) as bar:
        done = 0.0

        def progress(step: float) -> None:
            nonlocal done
            done += step
            bar.update(int(done) - bar.pos)

        yield progress


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files that the import reads."""
    for path in folder.iterdir():
        if not path.is_dir():
            yield path
        elif _is_searched_folder(path):
            yield from path.rglob("*")


def _is_searched_folder(folder: Path) -> bool:
    # Imported late: loads SQLite, which no other command needs.
    from stenolog.transfer.importers.framework_tables import is_searched

    return is_searched(folder)


def _problem_lines(migrated: ImportReport) -> Iterator[str]:
    for one in migrated.imported:
        for words in one.problems:
            yield f"{one_line(one.file)}: {sentence(words)}"
    for left in migrated.skipped:
        yield f"{one_line(left.file)} was skipped: {sentence(left.reason)}"


def _note_lines(migrated: ImportReport) -> Iterator[str]:
    """Yield what was converted, once for all sessions."""
    converted: Counter[str] = Counter()
    for one in migrated.imported:
        if not one.already_imported:
            for note in one.notes:
                text, _, count = note.rpartition(" in ")
                converted[text] += int(count.split()[0].replace(",", ""))
    for text, number in converted.most_common():
        yield f"Note: {one_line(text)} in {plural(number, 'message')}."


def _report_lines(
    migrated: ImportReport, source: Path, program: str | None, *, recursive: bool, dry_run: bool
) -> Iterator[str]:
    if migrated.migrated and not migrated.imported:
        yield f"Already imported: {plural(migrated.migrated, 'file')} *.migrated."
    if migrated.imported or migrated.skipped:
        yield _total_line(migrated, dry_run=dry_run)
    if not (migrated.imported or migrated.migrated or migrated.skipped):
        known = "session files of a known program" if program is None else f"sessions of {program}"
        place = one_line(str(source))
        yield f"No {known} in {place}. `steno import --help` lists the programs."
    entries = source.iterdir() if source.is_dir() and not recursive else ()
    folders = sum(
        path.is_dir() and path.name not in _STORE_FOLDERS and not _is_searched_folder(path)
        for path in entries
    )
    if folders:
        yield f"{plural(folders, 'subfolder')} not searched. Use --recursive to search them."


def _total_line(migrated: ImportReport, *, dry_run: bool) -> str:
    done = "Would import" if dry_run else "Imported"
    words = [
        f"{done} {plural(migrated.sessions, 'session')}, {plural(migrated.messages, 'message')}"
    ]
    known = [one for one in migrated.imported if one.already_imported]
    never = sum(one.dropped for one in known)
    if known:
        words.append(f"{plural(len(known), 'session')} already imported")
    if never:
        words[-1] += f", except {plural(never, 'message')} that could not be imported"
    if migrated.skipped:
        words.append(f"{plural(len(migrated.skipped), 'file')} skipped")
    if migrated.dropped > never:
        words.append(f"{plural(migrated.dropped - never, 'message')} could not be imported")
    return f"{'; '.join(words)}."
