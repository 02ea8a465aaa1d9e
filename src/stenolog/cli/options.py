"""Options and arguments that several commands share."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def complete_key(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> "list[CompletionItem[str]]":
    """Return the session keys with this prefix, for the completion of a shell."""
    # This import is only needed for completion.
    from stenolog.cli.completion import complete_session_key

    return complete_session_key(ctx, param, incomplete)


def json_option(content: str = "a JSON object") -> _Decorator:
    """Return the option `--json`; its help says that the command prints `content`."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {content}.")


yes_option: Final = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
dry_run_option: Final = click.option(
    "--dry-run", is_flag=True, help="Show what would be done, without doing it."
)
prefix_option: Final = click.option(
    "--prefix", metavar="TEXT", default="", help="Only sessions whose key starts with TEXT."
)
tag_option: Final = click.option("--tag", metavar="TAG", help="Only sessions with this tag.")
key_argument: Final = click.argument("key", shell_complete=complete_key)
optional_key_argument: Final = click.argument("key", required=False, shell_complete=complete_key)


def require_terminal(warning: str, advice: str = "add --yes") -> None:
    """Raise UsageError if there is no terminal in which the user can confirm."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError(f"{warning}. Without a terminal to confirm, {advice}.")
