"""Options that several commands share, and the store and sessions that these options select."""

import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import Struct
from msgspec.structs import replace

from stenolog.cli.output import (
    JSON_OUTPUT,
    first_lines,
    one_line,
    plural,
    print_notice,
    show_progress,
)
from stenolog.errors import ForeignLog, NoSuchSession, StenologError, UsageError
from stenolog.sessions.folders import SessionsLocation, check_workspace, locate_sessions
from stenolog.stores.base import Store, find_info
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store, parse_address

if TYPE_CHECKING:
    from stenolog.catalog.entries import Entry
    from stenolog.records import Message, SessionInfo

DEFAULT_WORKSPACE: Final = "./workspace"
WORKSPACE_HELP: Final = (
    "Workspace folder, sqlite:FILE or postgresql://…  "
    f"[default: agent.sessions in the config file, otherwise {DEFAULT_WORKSPACE}]"
)
"""Help text of `--workspace`."""
PROGRAM_NAMES: Final = {
    "chatgpt": "ChatGPT",
    "claude-ai": "Claude.ai",
    "claude-code": "Claude Code",
    "codex": "Codex",
    "gemini-cli": "Gemini CLI",
    "open-webui": "Open WebUI",
}
"""Names of programs in printed texts, by the names that commands accept."""
_MAX_LISTED_KEYS: Final = 5
"""Maximum number of matching keys listed in the error for an unknown key."""
_SHORT_KEY_LENGTHS: Final = (8, 12, 16)
"""Numbers of characters of a shortened key; the first that is enough is used."""
_MAX_WHOLE_KEY_LENGTH: Final = 16
"""Maximum number of characters of a key that is never shortened."""

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


# --- options --------------------------------------------------------------------------------------


def json_option(content: str = "a JSON object") -> _Decorator:
    """Return the option `--json`; its help says that the command prints `content`."""

    def remember_flag(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        ctx.meta[JSON_OUTPUT] = value

    return click.option(
        "--json", is_flag=True, expose_value=False, callback=remember_flag, help=f"Print {content}."
    )


yes_option: Final = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
dry_run_option: Final = click.option(
    "--dry-run", is_flag=True, help="Show what would be done, without doing it."
)
prefix_option: Final = click.option(
    "--prefix", metavar="TEXT", default="", help="Only sessions whose key starts with TEXT."
)
tag_option: Final = click.option("--tag", metavar="TAG", help="Only sessions with this tag.")
limit_option: Final = partial(click.option, "-n", "--limit", metavar="N")
seq_option: Final = partial(click.option, metavar="SEQ", type=click.IntRange(min=1))


def require_terminal(warning: str, advice: str = "add --yes") -> None:
    """Raise UsageError if there is no terminal in which the user can confirm."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError(f"{warning}. Without a terminal to confirm, {advice}.")


def workspace_option(
    command: Callable[..., Any], *, error_type: type[click.ClickException] = click.ClickException
) -> Callable[..., Any]:
    """Add `--workspace` to a command. Wrong settings raise `error_type`."""

    def resolve_workspace(ctx: click.Context, _: click.Parameter, value: str | None) -> str:
        if value is not None:
            return value
        # With DIR, the settings are not needed, so wrong settings must not be an error.
        if ctx.params.get("directory") is not None or ctx.resilient_parsing:
            return DEFAULT_WORKSPACE
        try:
            return workspace_in_settings(ctx.params.get("agent"))
        except click.ClickException as error:
            raise error_type(error.message) from error

    return click.option(
        "-w", "--workspace", metavar="DIR", callback=resolve_workspace, help=WORKSPACE_HELP
    )(command)


def workspace_in_settings(agent: str | None) -> str:
    """Return the workspace that the settings name for an agent. Raises ClickException."""
    # These imports are slow, and they are not needed with -w.
    from stenolog.settings.file import has_file_or_variables

    if not has_file_or_variables(os.environ):
        return DEFAULT_WORKSPACE
    from stenolog.cli.config import read_settings

    settings = read_settings(None)
    return settings.agents.get(agent or "", settings.agent).sessions


def options_as_struct(
    parameter: str, struct_type: type[Struct], *options: _Decorator
) -> _Decorator:
    """Return a decorator that adds options to a command, passed as one struct.

    The options are named like the fields of the struct.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_struct(*arguments: Any, **values: Any) -> Any:
            fields = {name: values.pop(name) for name in struct_type.__struct_fields__}
            return command(*arguments, **{parameter: struct_type(**fields)}, **values)

        decorated: Callable[..., Any] = with_struct
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def location_hint() -> str:
    """Return the options that selected the workspace, to append to a suggested command."""
    ctx = click.get_current_context(silent=True)
    parts = []
    for option, name in (("-w", "workspace"), ("--agent", "agent"), ("--namespace", "namespace")):
        if ctx is not None and name in ctx.params and is_on_command_line(ctx, name):
            parts.append(f" {option} {shlex.quote(display_name(ctx.params[name]))}")
    return "".join(parts)


def session_command(name: str, key: str) -> str:
    """Return a command for a session, with the options that selected the workspace."""
    return one_line(f"steno {name} {shlex.quote(key)}{location_hint()}")


def is_on_command_line(ctx: click.Context, name: str) -> bool:
    """Return whether the user gave this option."""
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def choose_workspace(directory: str | None, workspace: str) -> str:
    """Return DIR, or the workspace if DIR is omitted. Raises UsageError if both are given."""
    if directory is None:
        return workspace
    if is_on_command_line(click.get_current_context(), "workspace"):
        raise click.UsageError("Name the workspace only once: as DIR or with -w.")
    return directory


# --- stores ---------------------------------------------------------------------------------------


class Location(Struct, frozen=True, kw_only=True):
    """Options that select a store: a workspace, and an agent or namespace in it."""

    workspace: str
    agent: str | None = None
    namespace: str | None = None

    def __post_init__(self) -> None:
        """Raise UsageError if both an agent and a namespace are given."""
        if self.agent is not None and self.namespace is not None:
            raise click.UsageError("Use either --agent or --namespace, not both.")

    @property
    def place(self) -> SessionsLocation:
        """Return the place of the store. Raises UsageError."""
        place = locate_sessions(self.workspace, self.agent)
        return place if self.namespace is None else replace(place, namespace=self.namespace)

    def open(self, *, writable: bool = False) -> Store:
        """Open the store, read-only unless `writable` is set.

        Raises UsageError if the workspace is missing, StoreUnavailable if it cannot be opened.
        """
        (check_store_exists if writable else check_workspace_exists)(self.workspace)
        return self.open_existing(writable=writable)

    def open_existing(self, *, writable: bool = False) -> Store:
        """Open the store; return an empty store if nothing was ever stored there."""
        place = self.place
        folder = Path(place.where, place.namespace)
        if parse_address(place.where).engine == "jsonl" and not folder.exists():
            # An empty store behaves the same and creates no files.
            return InMemoryStore()
        return open_store(place.where, namespace=place.namespace, read_only=not writable)


location_options: Final = options_as_struct(
    "location",
    Location,
    workspace_option,
    click.option("--agent", metavar="NAME", help="Use the sessions of this agent."),
    click.option(
        "--namespace", metavar="NAME", help="Set of sessions, such as notes.  [default: sessions]"
    ),
)


def display_name(workspace: str) -> str:
    """Return the address of a workspace with masked secrets, to show it to the user."""
    if "://" not in workspace and "password" not in workspace:
        return workspace
    # This import is only needed for databases.
    from stenolog.settings.values import mask_secrets

    return mask_secrets(workspace)


def check_workspace_exists(workspace: str) -> None:
    """Raise UsageError if there is no such folder, StoreUnavailable if it is inaccessible.

    Databases are not checked.
    """
    address = parse_address(workspace)
    if address.engine != "jsonl":
        return
    if workspace == DEFAULT_WORKSPACE and not Path(workspace).exists():
        raise UsageError(
            f"there is no folder {DEFAULT_WORKSPACE} here; name a workspace with -w DIR. "
            "`steno chat`, `steno ask` and `steno import` create one, `steno view` works without "
            "one"
        )
    try:
        check_workspace(Path(address.path))
    except UsageError as error:
        hint = transcripts_hint(address.path)
        raise UsageError(f"{error}; {hint}" if hint else str(error)) from error


def transcripts_hint(folder: str | os.PathLike[str]) -> str:
    """Describe how to use the transcripts of a known program in a folder; empty if none exist."""
    # This import is only needed if there is nothing to list.
    from stenolog.transfer.transcripts.programs import detect_program

    path, program = Path(folder), None
    with suppress(OSError):
        program = detect_program(path) if path.is_dir() else None
    if program is None:
        return ""
    name = shlex.quote(one_line(str(path)))
    return (
        f"it has transcripts of {PROGRAM_NAMES.get(program, program)}: "
        f"`steno view {name}` shows them, `steno import {name}` imports them"
    )


def check_store_exists(workspace: str) -> None:
    """Raise UsageError if the folder or SQLite file is missing: a typo must not create a store."""
    check_workspace_exists(workspace)
    address = parse_address(workspace)
    if address.engine == "sqlite" and not Path(address.path).is_file():
        raise UsageError(f"there is no database at {address.path}; check the path")


# --- sessions -------------------------------------------------------------------------------------


def read_each_session(
    label: str, keys: Sequence[str], read_session: Callable[[str], None]
) -> dict[str, str]:
    """Call `read_session` with each key and show progress; return the problems by key."""
    problems: dict[str, str] = {}
    with show_progress(label, len(keys), enabled=len(keys) > 1) as advance:
        for key in keys:
            try:
                read_session(key)
            except (NoSuchSession, ForeignLog):
                pass  # The session was just deleted, or the file belongs to another program.
            except StenologError as error:
                problems[key] = str(error)
            advance()
    return problems


def find_session(store: Store, name: str) -> "SessionInfo":
    """Return the session with this key or alias. Raises ClickException if there is no session.

    Commands that change a session use this function: they need the whole key.
    """
    session = find_session_or_none(store, name)
    if session is None:
        raise _unknown_key_error(name, store.list_sessions(), " This command needs a whole key.")
    return session


def find_session_to_read(store: Store, name: str) -> "SessionInfo":
    """Return the session with this key or alias, or the only session whose key matches in part.

    Only for commands that change nothing. If stderr is not a terminal, the whole key is required,
    because a script would not notice that a partly matching key selects another session. Raises
    ClickException.
    """
    session = find_session_or_none(store, name)
    if session is None:
        keys = store.list_sessions()
        if not _is_in_terminal():
            raise _unknown_key_error(name, keys, " A script needs a whole key.")
        matches = matching_keys(keys, name)
        if len(matches) != 1:
            raise _unknown_key_error(name, keys)
        session = store.info(matches[0])
        print_notice(f"Session {one_line(session.key)}")
    return session


def _is_in_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def matching_keys(keys: Sequence[str], key_part: str) -> list[str]:
    """Return the keys that start or end with `key_part`, or contain it after a colon."""
    # With a colon before the key, the start of the key also follows a colon.
    return [key for key in keys if f":{key_part}" in f":{key}" or key.endswith(key_part)]


def short_keys(keys: Iterable[str], all_keys: Sequence[str]) -> dict[str, str]:
    """Return for each key a short text that selects only this key of `all_keys`.

    The text is the start of the key, of a part after a colon, or the end of the key, as
    `find_session_to_read` accepts it. A short key stays whole, and so does a key without such a
    text.
    """
    known_keys = set(all_keys)
    texts = {key: key for key in keys}
    for length in _SHORT_KEY_LENGTHS:
        long_keys = [key for key, text in texts.items() if len(text) > _MAX_WHOLE_KEY_LENGTH]
        if not long_keys:
            break
        counts = Counter(text for key in all_keys for text in _key_texts(key, length))
        for key in long_keys:
            for text in _key_texts(key, length) if one_line(key) == key else ():
                # A text that starts with - is an option, and KEY:SEQ selects a message of KEY.
                is_usable = text[:1] != "-" and text.rpartition(":")[0] not in known_keys
                if counts[text] == 1 and is_usable:
                    texts[key] = text
                    break
    return texts


def _key_texts(key: str, length: int) -> Iterable[str]:
    """Return the starts of the parts of a key, and its end; each has `length` characters."""
    # The last part comes first: it is often an id, while many keys have the same first part.
    starts = [i + 1 for i, character in enumerate(key) if character == ":"]
    texts = [key[start : start + length] for start in (*reversed(starts), 0)]
    texts.append(key[-length:])
    return dict.fromkeys(text for text in texts if len(text) == length)


def _unknown_key_error(name: str, keys: Sequence[str], advice: str = "") -> click.ClickException:
    """Return the error for an unknown key. `advice` is added if some of `keys` match in part."""
    ctx = click.get_current_context(silent=True)
    workspace = None if ctx is None else ctx.params.get("workspace")
    place = f" in {one_line(display_name(workspace))}" if workspace else ""
    text = f"There is no session {one_line(name)!r}{place}."
    matches = matching_keys(keys, name)
    if not matches:
        return click.ClickException(f"{text} `steno list{location_hint()}` lists the sessions.")
    count = len(matches)
    lines = [f"{text}{advice} {plural(count, 'key')} {'matches' if count == 1 else 'match'}:"]
    lines += first_lines([one_line(key) for key in matches], _MAX_LISTED_KEYS)
    return click.ClickException("\n".join(lines))


def find_session_or_none(store: Store, name: str) -> "SessionInfo | None":
    """Return the session with this key or alias, or None."""
    # Most commands that list sessions do not need this import.
    from stenolog.sessions.aliases import Aliases

    return find_info(store, Aliases(store).resolve_key(name))


def session_title(info: "SessionInfo", history: "Iterable[Message]") -> str:
    """Return the title of a session, or the start of its first prompt in `history`."""
    # Only some commands need this import.
    from stenolog.catalog.searchable_text import prompt_from, role_of, text_of, title_from

    message_dicts = (message.to_dict() for message in history)
    prompt = prompt_from((role_of(fields), text_of(fields)) for fields in message_dicts)
    return title_from(info.meta, prompt)


def damage_lines(info: "SessionInfo | Entry", workspace: str) -> Iterator[str]:
    """Yield a sentence if the session is damaged."""
    if info.lost or info.damaged:
        lost_text = f"at least {messages_with_verb(info.lost)} lost"
        damage = lost_text if info.lost else "no message is lost so far"
        command = f"steno doctor {shlex.quote(display_name(workspace))}"
        yield f"{one_line(info.key)} is damaged: {damage}. Run `{command}` for details."


def messages_with_verb(count: int) -> str:
    """Return the number of messages, followed by "is" or "are"."""
    return "1 message is" if count == 1 else f"{count:,} messages are"
