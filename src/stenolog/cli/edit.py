"""Commands that change a session: `steno rename`, `tag`, `fork`, `undo`, `summarize`, `archive`."""

import asyncio
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec.structs import asdict

from stenolog.cli.completion import complete_key
from stenolog.cli.config import Options, agent_options
from stenolog.cli.output import (
    PARTIAL,
    error_sentence,
    json_text,
    one_line,
    plural,
    print_notice,
    print_result,
    progress_bar,
    sentence,
)
from stenolog.cli.show import find_session, messages_are
from stenolog.cli.workspace import (
    Location,
    check_exists,
    location_options,
    open_existing,
    open_read_only,
)
from stenolog.errors import StenologError, UsageError
from stenolog.records import SessionInfo, Undone
from stenolog.sessions.undoing import undo_last
from stenolog.stores.base import Store
from stenolog.stores.jsonl.scan import part_of
from stenolog.stores.open_store import address

if TYPE_CHECKING:
    from stenolog.cli.agents import OpenAgent
    from stenolog.context.summarize import SummaryPlan, SummaryReport


_OPERATIONS: Final = {
    "truncate": "hiding of messages",
    "clear": "/clear",
    "hide": "hiding of messages",
    "replace": "replacement of messages",
    "checkpoint": "summary",
    "summary": "change of the summary",
}
"""Name of each store operation, as `steno undo` prints it."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Show what would be done, without doing it."
)
key_argument = click.argument("key", shell_complete=complete_key)


def open_writable(where: Location) -> Store:
    """Open an existing store for writing. Raises UsageError, StoreUnavailable.

    It never creates a store.
    """
    _check_store_exists(where.workspace)
    return open_existing(where, read_only=False)


def _check_store_exists(workspace: str) -> None:
    """Raise UsageError if the store does not exist: a typing error must not create one."""
    check_exists(workspace)
    found = address(workspace)
    if found.engine == "sqlite" and not Path(found.path).is_file():
        raise UsageError(f"there is no database at {found.path}; check the path")


# --- names -----------------------------------------------------------------------------------


@click.command("rename")
@key_argument
@click.argument("title")
@json_option
@location_options
def rename_command(key: str, title: str, as_json: bool, where: Location) -> None:
    """Set the title of the session KEY.

    The title replaces the first prompt in lists. An empty TITLE removes it. The key does not
    change.

    Example: steno rename telegram:123 'Trip to Porto'

    Exit codes: 0 done, 1 failed, 2 wrong usage.
    """
    title = " ".join(title.split())
    with open_writable(where) as store:
        info = find_session(store, key)
        store.set_meta(info.key, title=title or None)
    was = info.meta.get("title")
    fields = {
        "key": info.key,
        "title": title or None,
        "was": was if isinstance(was, str) else None,
    }
    name = one_line(info.key)
    words = f"{name} is now titled “{title}”." if title else f"Removed the title of {name}."
    print_result(fields, words, as_json=as_json)


_REMOVAL_MARK: Final = "\0"
"""Prefix added to a -TAG so that click does not read it as options."""


class _TagCommand(click.Command):
    """A command that accepts -TAG as a tag.

    Click would read it as one-letter options, of which w is the workspace.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError."""
        end = args.index("--") if "--" in args else len(args)
        known = {name for param in self.get_params(ctx) for name in param.opts}
        given = [
            f"{_REMOVAL_MARK}{word}" if _is_removal(word) and word not in known else word
            for word in args[:end]
        ]
        return super().parse_args(ctx, given + args[end:])


def _is_removal(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and word[1] != "-"


@click.command("tag", cls=_TagCommand)
@key_argument
@click.argument("changes", metavar="[TAG|-TAG]...", nargs=-1)
@json_option
@location_options
def tag_command(key: str, changes: tuple[str, ...], as_json: bool, where: Location) -> None:
    """Add tags to the session KEY, remove them, or list them.

    TAG or +TAG adds a tag, -TAG removes it. Without changes, prints the tags, one per line.
    `steno list` and `steno search` select sessions with --tag. To remove a tag that looks like an
    option, put -- before it: steno tag KEY -- -w

    Example: steno tag telegram:123 +work -draft

    Exit codes: 0 done, 1 failed, 2 wrong usage.
    """
    asked = [_tag_change(word.removeprefix(_REMOVAL_MARK)) for word in changes]
    # Listing the tags must not need permission to write.
    with (open_writable if asked else open_read_only)(where) as store:
        info = find_session(store, key)
        before = tags_of(info)
        after = _apply_tag_changes(before, asked)
        if after != before:
            store.set_meta(info.key, tags=after or None)
    if as_json:
        click.echo(json_text({"key": info.key, "tags": after, "was": before}))
    elif not asked:
        for tag in after:
            click.echo(one_line(tag))
        if not after:
            print_notice(f"{one_line(info.key)} has no tags.")
    else:
        tags = ", ".join(map(one_line, after)) if after else "none"
        print_notice(f"Tags of {one_line(info.key)}: {tags}.")


def _tag_change(word: str) -> tuple[str, str]:
    """Return the sign and the tag of a change. Raises UsageError."""
    sign, tag = (word[0], word[1:].strip()) if word[:1] in ("+", "-") else ("+", word.strip())
    if not tag:
        raise click.UsageError(f"{one_line(word)!r}: write +TAG to add a tag or -TAG to remove it.")
    return sign, tag


def _apply_tag_changes(tags: Sequence[str], asked: Sequence[tuple[str, str]]) -> list[str]:
    """Return the tags after applying the changes in order."""
    after = list(tags)
    for sign, tag in asked:
        if sign == "-":
            after = [one for one in after if one != tag]
        elif tag not in after:
            after.append(tag)
    return after


def tags_of(info: SessionInfo) -> list[str]:
    """Return the tags in a session's meta."""
    tags = info.meta.get("tags")
    return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []


# --- visibility ------------------------------------------------------------------------------


@click.command("fork")
@key_argument
@click.argument("new_key")
@click.option(
    "--at",
    metavar="SEQ",
    type=click.IntRange(min=1),
    help="Copy only up to this message, inclusive.",
)
@json_option
@location_options
def fork_command(key: str, new_key: str, at: int | None, as_json: bool, where: Location) -> None:
    """Copy the visible messages of KEY into a new session NEW_KEY.

    Messages keep their seq and time; summary, title and tags are copied. KEY is not changed.

    Example: steno fork telegram:123 telegram:experiment --at 14

    Exit codes: 0 done, 1 failed, for example because NEW_KEY exists, 2 wrong usage.
    """
    with open_writable(where) as store:
        source = find_session(store, key)
        store.fork(source.key, new_key, at=at)
        made = store.info(new_key)
    fields = {
        "key": made.key,
        "uid": made.uid,
        "forked_from": source.key,
        "at": made.last_seq,
        "messages": made.visible,
    }
    words = (
        f"Copied {plural(made.visible, 'message')}, up to seq {made.last_seq}, from "
        f"{one_line(source.key)} to {one_line(new_key)}."
    )
    print_result(fields, words, as_json=as_json)


@click.command("undo")
@key_argument
@json_option
@location_options
def undo_command(key: str, as_json: bool, where: Location) -> None:
    """Undo the last operation that hid messages of the session KEY.

    That is a summary, /clear, /retry or /edit. Messages added since then are kept. Up to eight
    operations can be undone, one per call; there is no redo.

    Exit codes: 0 done, 1 failed or nothing to undo, 2 wrong usage.
    """
    with open_writable(where) as store:
        own = find_session(store, key).key
        done = undo_last(store, own)
        left = store.info(own).undoable
    more = f"{left:,} more can be undone." if left else "Nothing more to undo."
    fields = {"key": own, **asdict(done), "left": left}
    print_result(fields, f"{_undo_text(done)} {more}", as_json=as_json)


def _undo_text(done: Undone) -> str:
    what = [f"{messages_are(done.shown)} visible again"] if done.shown else []
    what += [f"{messages_are(done.hid)} hidden"] if done.hid else []
    what += ["the summary is as before"] if done.summary_restored else []
    operation = _OPERATIONS.get(done.op, one_line(done.op))
    return f"Undid the last {operation}: {', '.join(what) or 'no visible change'}."


# --- summarize -------------------------------------------------------------------------------


@click.command("summarize")
@key_argument
@dry_run_option
@json_option
@agent_options
@click.pass_context
def summarize_command(
    ctx: click.Context, key: str, dry_run: bool, as_json: bool, options: Options
) -> None:
    """Summarize all but the last turns of the session KEY.

    The model writes the summary, as in a chat with /compact or when a conversation gets too long.
    Later requests contain the summary instead of these messages. Nothing is deleted: `steno show
    --all` shows them, `steno undo` makes them visible again.

    Example: steno summarize telegram:123 --dry-run

    Exit codes: 0 done, or nothing to summarize, 1 failed, 2 wrong usage.
    """
    fields, words, code = asyncio.run(_summarize(options, key, dry_run=dry_run))
    print_result(fields, words, as_json=as_json)
    ctx.exit(code)


async def _summarize(
    options: Options, key: str, *, dry_run: bool
) -> tuple[dict[str, Any], str, int]:
    """Summarize a session and return the result as fields, as a sentence, and as an exit code."""
    # Imported late: slow, and not needed for --help.
    from stenolog.agent.scheduler import SessionBusy
    from stenolog.cli.agents import Signals, close_agent, open_agent, session_model
    from stenolog.cli.config import read_settings

    settings = read_settings(options.config)
    of_agent = settings.agents.get(options.agent or "", settings.agent)
    _check_store_exists(options.workspace or of_agent.sessions)
    opened = open_agent(options, model_of_session=True, only_look=dry_run)
    signals = Signals()
    try:
        store = opened.agent.store
        own = find_session(store, key).key
        if dry_run:
            plan = await opened.loop.run(_plan_summary, opened, own)
            fields, words = _plan_report(own, plan)
        else:
            session_model(opened, own)
            done = await signals.run_until_signal(_make_summary(opened, own))
            fields, words = _summary_report(own, done)
    except SessionBusy:
        raise click.ClickException(
            f"An answer is being written in {one_line(key)}. Try again when it is finished."
        ) from None
    finally:
        code = await close_agent(opened, signals, print_notice)
    return fields, words, code


async def _make_summary(opened: "OpenAgent", key: str) -> "SummaryReport | None":
    async def change(_: object) -> "SummaryReport | None":
        model = await opened.loop.run(opened.agent.model_of, key)
        return await opened.loop.run_model(opened.agent.context(model).summarize, key)

    return await opened.loop.change(key, change, agent=opened.agent.id)


def _plan_summary(opened: "OpenAgent", key: str) -> "SummaryPlan | None":
    """Return the plan of a summary made now, or None if there is nothing to summarize."""
    from stenolog.context.summarize import plan_summary, session_state

    agent = opened.agent
    context = agent.context(agent.model_of(key))
    tokens, seen = context.tokens, session_state(context.store, key)
    system = {"role": "system", "content": f"{agent.spec.system}\n\n"}
    return plan_summary(
        seen.history,
        summary=seen.summary,
        floor=seen.floor,
        uid=seen.uid,
        fixed=tokens.tools(agent.tool_definitions) + tokens.message(system),
        limits=context.limits,
        needs=agent.spec.needs,
        tokens=tokens,
        trigger="manual",
        undone=seen.undone,
        keep_from=seen.unanswered_from,
    )


_NOTHING_TO_SUMMARIZE: Final = "There is nothing to summarize."


def _plan_report(key: str, plan: "SummaryPlan | None") -> tuple[dict[str, Any], str]:
    if plan is None:
        return _summary_fields(key, dry_run=True), _NOTHING_TO_SUMMARIZE
    first, hidden = plan.messages[0].seq, len(plan.messages)
    fields = _summary_fields(
        key,
        dry_run=True,
        hidden=hidden,
        first=first,
        last=plan.upto,
        tokens_before=plan.tokens_before,
    )
    words = (
        f"Would summarize {plural(hidden, 'message')} (seq {first}–{plan.upto}) and keep "
        f"{plural(plan.kept, 'message')} visible. The next request has about "
        f"{plan.tokens_before:,} tokens now."
    )
    return fields, words


def _summary_report(key: str, done: "SummaryReport | None") -> tuple[dict[str, Any], str]:
    if done is None:
        return _summary_fields(key, dry_run=False), _NOTHING_TO_SUMMARIZE
    fields = _summary_fields(
        key,
        dry_run=False,
        hidden=done.count,
        first=done.first,
        last=done.last,
        tokens_before=done.tokens_before,
        tokens_after=done.tokens_after,
        fallback=done.fallback or None,
    )
    # Imported late: only needed after a summary.
    from stenolog.context.summarize import UNDO_HINT

    words = str(done).removesuffix(UNDO_HINT)
    why = f" {error_sentence(done.fallback)}" if done.fallback else ""
    undo = one_line(f"`steno undo {shlex.quote(key)}`")
    return fields, f"{words}. {undo} restores them.{why}"


def _summary_fields(key: str, *, dry_run: bool, hidden: int = 0, **more: Any) -> dict[str, Any]:
    names = ("first", "last", "tokens_before", "tokens_after", "fallback")
    values = {name: more.get(name) for name in names}
    return {"key": key, "hidden": hidden, **values, "dry_run": dry_run}


# --- archive ---------------------------------------------------------------------------------


@click.command("archive")
@click.argument("key", metavar="[KEY]", required=False, shell_complete=complete_key)
@click.option("--all", "every", is_flag=True, help="Archive all sessions.")
@dry_run_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per session.")
@location_options
@click.pass_context
def archive_command(
    ctx: click.Context,
    key: str | None,
    every: bool,
    dry_run: bool,
    as_json: bool,
    where: Location,
) -> None:
    """Move messages that a summary has hidden to the archive of the session KEY.

    This makes the live storage smaller. Nothing is deleted: `steno show --all` reads archives, and
    `steno undo` still works.

    Prints one line per archived session, separated by tabs: key, number of messages, bytes before,
    bytes after. A summary goes to stderr.

    Exit codes: 0 done, or nothing to archive, 1 failed, 2 wrong usage, 3 some sessions failed.
    """
    if (key is not None) == every:
        raise click.UsageError("Give a KEY or --all.")
    with open_writable(where) as store:
        keys = [find_session(store, key).key] if key is not None else store.list_sessions()
        done: list[dict[str, Any]] = []
        with progress("Archiving", len(keys), shown=every) as step:
            for one in keys:
                done.append(_archive_session(store, one, dry_run=dry_run, alone=not every))
                step()
    for fields in done:
        if as_json:
            click.echo(json_text(fields))
        elif fields["archived"]:
            row = (fields[name] for name in ("key", "archived", "bytes_before", "bytes_after"))
            click.echo("\t".join("-" if one is None else one_line(str(one)) for one in row))
    for words in _archive_report(done, dry_run=dry_run):
        print_notice(words)
    ctx.exit(PARTIAL if any(fields["problem"] for fields in done) else 0)


def _archive_session(store: Store, key: str, *, dry_run: bool, alone: bool) -> dict[str, Any]:
    fields = {"key": key, "archived": 0, "bytes_before": None, "bytes_after": None}
    problem = None
    try:
        if dry_run:
            fields["archived"] = _count_archivable(store, key)
        else:
            done = store.compact(key)
            fields |= {
                "archived": done.archived,
                "bytes_before": done.bytes_before,
                "bytes_after": done.bytes_after,
            }
    except StenologError as error:
        if alone:
            raise
        # A damaged session must not prevent archiving the others.
        problem = str(error)
    return {**fields, "dry_run": dry_run, "problem": problem}


def _count_archivable(store: Store, key: str) -> int:
    info = store.info(key)
    if info.floor <= info.archived:
        return 0
    every = store.get_history(key, after=info.archived, full=True)
    below = [message for message in every if message.seq <= info.floor]
    # A batch is archived completely or not at all.
    while below and (part := part_of(below[-1])) is not None and part[0] != part[1]:
        below.pop()
    return len(below)


def _archive_report(done: Sequence[dict[str, Any]], *, dry_run: bool) -> Iterator[str]:
    for fields in done:
        if fields["problem"]:
            yield f"{one_line(fields['key'])}: {sentence(fields['problem'])}"
    messages = sum(fields["archived"] for fields in done)
    sessions = sum(bool(fields["archived"]) for fields in done)
    if not messages:
        yield "There is nothing to archive."
    else:
        done_words = "Would archive" if dry_run else "Archived"
        yield f"{done_words} {plural(messages, 'message')} of {plural(sessions, 'session')}."


@contextmanager
def progress(what: str, total: int, *, shown: bool = True) -> "Iterator[Any]":
    """Yield a function to call after each step. Shows a progress bar if stderr is a terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda: None
        return
    with progress_bar() as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
