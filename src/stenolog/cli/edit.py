"""Commands that change a session: `steno rename`, `tag`, `fork`, `undo`, `summarize`, `archive`."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec.structs import asdict

from stenolog.cli.config import AgentOptions, agent_options, read_settings
from stenolog.cli.output import (
    EXIT_PARTIAL,
    attributes_of,
    error_sentence,
    one_line,
    plural,
    print_json,
    print_notice,
    print_result,
    print_rows,
    sentence,
    show_progress,
    wants_json,
)
from stenolog.cli.workspace import (
    Location,
    check_store_exists,
    find_session,
    json_option,
    location_options,
    messages_with_verb,
    seq_option,
    session_command,
)
from stenolog.errors import StenologError
from stenolog.records import UndoResult
from stenolog.sessions.session_store import undo_last
from stenolog.stores.base import Store

if TYPE_CHECKING:
    from stenolog.cli.agents import OpenAgent
    from stenolog.context.summarize import SummaryReport


_OPERATION_NAMES: Final = {
    "truncate": "hiding of messages",
    "clear": "/clear",
    "hide": "hiding of messages",
    "show": "showing of hidden messages",
    "replace": "replacement of messages",
    "checkpoint": "summary",
    "summary": "change of the summary",
}
"""Name of each store operation, as `steno undo` prints it."""


# --- names -----------------------------------------------------------------------------------


@click.command("rename")
@click.argument("key")
@click.argument("title")
@json_option()
@location_options
def rename_command(key: str, title: str, location: Location) -> None:
    """Set the title of the session KEY.

    Lists show the title instead of the first prompt. An empty TITLE removes the title. The key does
    not change.

    Example: steno rename telegram:123 'Trip to Porto'

    Exit codes: 0 done, 1 failed, 2 wrong usage.
    """
    title = " ".join(title.split())
    with location.open(writable=True) as store:
        info = find_session(store, key)
        store.set_meta(info.key, title=title or None)
    old_title = info.meta.get("title")
    was = old_title if isinstance(old_title, str) else None
    fields = {"key": info.key, "title": title or None, "was": was}
    key_text = one_line(info.key)
    removed_text = f"Removed the title of {key_text}."
    text = f"{key_text} is now titled “{title}”." if title else removed_text
    print_result(fields, text)


_REMOVAL_PREFIX: Final = "\0"
"""Prefix that is added to -TAG, so that click does not read -TAG as options."""


class _TagCommand(click.Command):
    """A command that accepts -TAG as a tag.

    Click would read -TAG as one-letter options, for example a `w` in TAG as the option -w.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError."""
        options_end = args.index("--") if "--" in args else len(args)
        option_names = {name for param in self.get_params(ctx) for name in param.opts}

        def hide_from_click(word: str) -> str:
            is_removal = len(word) > 1 and word[0] == "-" and word[1] != "-"
            return f"{_REMOVAL_PREFIX}{word}" if is_removal and word not in option_names else word

        words = [*map(hide_from_click, args[:options_end]), *args[options_end:]]
        return super().parse_args(ctx, words)


@click.command("tag", cls=_TagCommand)
@click.argument("key")
@click.argument("changes", metavar="[TAG|-TAG]...", nargs=-1)
@json_option()
@location_options
def tag_command(key: str, changes: tuple[str, ...], location: Location) -> None:
    """Add, remove or list tags of the session KEY.

    TAG or +TAG adds a tag, -TAG removes it. Without TAG, all tags are printed, one per line.
    `steno list` and `steno search` select sessions with --tag. To remove a tag that looks like an
    option, put -- before it: steno tag KEY -- -w

    Example: steno tag telegram:123 +work -draft

    Exit codes: 0 done, 1 failed, 2 wrong usage.
    """
    tag_changes = [_parse_tag_change(word.removeprefix(_REMOVAL_PREFIX)) for word in changes]
    # Listing the tags must not need permission to write.
    with location.open(writable=bool(tag_changes)) as store:
        info = find_session(store, key)
        tags = info.meta.get("tags")
        old_tags = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
        new_tags = _apply_tag_changes(old_tags, tag_changes)
        if new_tags != old_tags:
            store.set_meta(info.key, tags=new_tags or None)
    if print_json({"key": info.key, "tags": new_tags, "was": old_tags}):
        return
    if not tag_changes:
        for tag in new_tags:
            click.echo(one_line(tag))
        if not new_tags:
            print_notice(f"{one_line(info.key)} has no tags.")
    else:
        tags_text = ", ".join(map(one_line, new_tags)) or "none"
        print_notice(f"Tags of {one_line(info.key)}: {tags_text}.")


def _parse_tag_change(word: str) -> tuple[str, str]:
    """Return the sign, `+` or `-`, and the tag. Raises UsageError."""
    sign, tag = (word[0], word[1:].strip()) if word[:1] in ("+", "-") else ("+", word.strip())
    if not tag:
        raise click.UsageError(f"{one_line(word)!r}: write +TAG to add a tag or -TAG to remove it.")
    return sign, tag


def _apply_tag_changes(tags: Sequence[str], changes: Sequence[tuple[str, str]]) -> list[str]:
    """Return the tags after applying the changes in order."""
    new_tags = list(tags)
    for sign, tag in changes:
        if sign == "-":
            new_tags = [old_tag for old_tag in new_tags if old_tag != tag]
        elif tag not in new_tags:
            new_tags.append(tag)
    return new_tags


# --- visibility ------------------------------------------------------------------------------


@click.command("fork")
@click.argument("key")
@click.argument("new_key")
@seq_option("--at", help="Copy only up to this message, inclusive.")
@json_option()
@location_options
def fork_command(key: str, new_key: str, at: int | None, location: Location) -> None:
    """Copy the visible messages of KEY into a new session NEW_KEY.

    Messages keep their seq and time; summary, title and tags are copied. KEY is not changed.

    Example: steno fork telegram:123 telegram:experiment --at 14

    Exit codes: 0 done, 1 failed, for example because NEW_KEY exists, 2 wrong usage.
    """
    with location.open(writable=True) as store:
        source = find_session(store, key)
        store.fork(source.key, new_key, at=at)
        fork = store.info(new_key)
    fields = {
        "key": fork.key,
        "uid": fork.uid,
        "forked_from": source.key,
        "at": fork.last_seq,
        "messages": fork.visible,
    }
    text = (
        f"Copied {plural(fork.visible, 'message')}, up to seq {fork.last_seq}, from "
        f"{one_line(source.key)} to {one_line(new_key)}."
    )
    print_result(fields, text)


@click.command("undo")
@click.argument("key")
@json_option()
@location_options
def undo_command(key: str, location: Location) -> None:
    """Undo the last operation that hid messages of the session KEY or changed its summary.

    These operations are a summary, a truncation, /clear, /retry and /edit. Messages that were added
    later are kept. Each call undoes one operation. Up to eight operations can be undone; there is
    no redo.

    Exit codes: 0 done, 1 failed or nothing to undo, 2 wrong usage.
    """
    with location.open(writable=True) as store:
        key = find_session(store, key).key
        undo_result = undo_last(store, key)
        undoable_count = store.info(key).undoable
        has_summary = bool(store.get_summary(key))
    count_text = f"{undoable_count:,} more can be undone."
    undoable_text = count_text if undoable_count else "Nothing more to undo."
    fields = {"key": key, **asdict(undo_result), "left": undoable_count}
    print_result(fields, f"{_undo_text(undo_result, has_summary)} {undoable_text}")


def _undo_text(result: UndoResult, has_summary: bool) -> str:
    effects = [f"{messages_with_verb(result.shown)} visible again"] if result.shown else []
    effects += [f"{messages_with_verb(result.hid)} hidden"] if result.hid else []
    if result.summary_restored:
        restored_text = "the previous summary is restored"
        effects.append(restored_text if has_summary else "the summary is removed")
    operation = _OPERATION_NAMES.get(result.op, one_line(result.op))
    return f"Undid the last {operation}: {', '.join(effects) or 'no visible change'}."


# --- summarize -------------------------------------------------------------------------------


@click.command("summarize")
@click.argument("key")
@json_option()
@agent_options
def summarize_command(key: str, options: AgentOptions) -> int:
    """Summarize all but the last turns of the session KEY.

    The model writes the summary, like the chat command /compact. Later requests contain the summary
    instead of the summarized messages. Nothing is deleted: `steno show --all` shows the
    summarized messages, and `steno undo` makes them visible again.

    Exit codes: 0 done, or nothing to summarize, 1 failed, 2 wrong usage.
    """
    return asyncio.run(_summarize(options, key))


async def _summarize(options: AgentOptions, key: str) -> int:
    """Summarize a session, print the result, and return the exit code."""
    # These imports are slow and not needed for --help.
    from stenolog.agent.scheduler import SessionBusy
    from stenolog.cli.agents import Signals, close_agent, open_agent, session_model

    settings = read_settings(options.config)
    agent_settings = settings.agents.get(options.agent or "", settings.agent)
    check_store_exists(options.workspace or agent_settings.sessions)
    opened_agent = open_agent(options, allow_missing_model=True)
    signals = Signals()
    try:
        key = find_session(opened_agent.agent.store, key).key
        session_model(opened_agent, key)
        report = await signals.run_until_signal(_make_summary(opened_agent, key))
        fields, text = _summary_report(key, report)
    except SessionBusy:
        raise click.ClickException(
            f"An answer is being written in {one_line(key)}. Try again when it is finished."
        ) from None
    finally:
        exit_code = await close_agent(opened_agent, signals, print_notice)
    print_result({"key": key, **_NO_SUMMARY, **fields}, text)
    return exit_code


async def _make_summary(opened_agent: "OpenAgent", key: str) -> "SummaryReport | None":
    async def summarize(_: object) -> "SummaryReport | None":
        model = await opened_agent.loop.run(opened_agent.agent.model_of, key)
        return await opened_agent.loop.run_model(opened_agent.agent.context(model).summarize, key)

    return await opened_agent.loop.change(key, summarize, agent=opened_agent.agent.id)


_NO_SUMMARY: Final = {
    "hidden": 0,
    **dict.fromkeys(("first", "last", "tokens_before", "tokens_after", "fallback")),
}


def _summary_report(key: str, report: "SummaryReport | None") -> tuple[dict[str, Any], str]:
    if report is None:
        return {}, "There is nothing to summarize."
    # This import is only needed after a summary.
    from stenolog.context.summarize import UNDO_HINT

    fields = attributes_of(report, "first", "last", "tokens_before", "tokens_after")
    fields |= {"hidden": report.count, "fallback": report.fallback or None}
    problem = f" {error_sentence(report.fallback)}" if report.fallback else ""
    undo_hint = f"`{session_command('undo', key)}` restores them."
    return fields, f"{str(report).removesuffix(UNDO_HINT)}. {undo_hint}{problem}"


# --- archive ---------------------------------------------------------------------------------


_ARCHIVE_COLUMNS: Final = ("key", "archived", "bytes_before", "bytes_after")
"""JSON fields of an archived session that are also printed as columns."""


@click.command("archive")
@click.argument("key", required=False)
@click.option("--all", "all_sessions", is_flag=True, help="Archive all sessions.")
@json_option("one JSON object per session")
@location_options
def archive_command(key: str | None, all_sessions: bool, location: Location) -> int:
    """Move messages that a summary has hidden to the archive of the session KEY.

    Archiving makes the live storage smaller. Nothing is deleted: `steno show --all` reads archives,
    and `steno undo` still works.

    Prints one line per archived session, separated by tabs: key, number of messages, bytes before,
    bytes after. A summary goes to stderr.

    Exit codes: 0 done, or nothing to archive, 1 failed, 2 wrong usage, 3 some sessions failed.
    """
    if (key is not None) == all_sessions:
        raise click.UsageError("Give a KEY or --all.")
    with location.open(writable=True) as store:
        keys = [find_session(store, key).key] if key is not None else store.list_sessions()
        results = []
        with show_progress("Archiving", len(keys), enabled=all_sessions) as advance:
            for session_key in keys:
                results.append(_archive_session(store, session_key, raise_errors=not all_sessions))
                advance()
    print_rows(
        [result for result in results if wants_json() or result["archived"]],
        fields=lambda result: result,
        cells=lambda result: (result[name] for name in _ARCHIVE_COLUMNS),
    )
    print_notice(*_archive_report_lines(results))
    return EXIT_PARTIAL if any(result["problem"] for result in results) else 0


def _archive_session(store: Store, key: str, *, raise_errors: bool) -> dict[str, Any]:
    try:
        report = store.compact(key)
    except StenologError as error:
        if raise_errors:
            raise
        # A damaged session must not prevent archiving the other sessions.
        fields = dict.fromkeys(_ARCHIVE_COLUMNS)
        return {**fields, "key": key, "archived": 0, "problem": str(error)}
    return {"key": key, **attributes_of(report, *_ARCHIVE_COLUMNS[1:]), "problem": None}


def _archive_report_lines(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    for result in results:
        if result["problem"]:
            yield f"{one_line(result['key'])}: {sentence(result['problem'])}"
    counts = [result["archived"] for result in results if result["archived"]]
    totals_text = f"{plural(sum(counts), 'message')} of {plural(len(counts), 'session')}"
    yield f"Archived {totals_text}." if counts else "There is nothing to archive."
