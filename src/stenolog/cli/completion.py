"""`steno completion`: shell completion of commands, options and session keys.

It uses click's completion, except in bash, which splits `telegram:123` into three words. For bash,
the line itself is parsed, and only the part after the last colon is returned.
"""

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import (
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    split_arg_string,
)

from stenolog.errors import StenologError

if TYPE_CHECKING:
    from stenolog.stores.base import Store

VARIABLE: Final = "_STENO_COMPLETE"
"""Environment variable that requests completions; click derives it from the program name."""
_PROGRAM: Final = "steno"
_MOST: Final = 200
"""Maximum number of keys offered."""
_PLAIN: Final = re.compile(r"(?!-)[^\s\x00-\x1f\x7f'\"\\$`!*?()<>|&;#~{}\[\]^,]+")
"""A key that needs no quoting in any shell."""


# --- keys ------------------------------------------------------------------------------------


def complete_key(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Return the session keys with this prefix; none if they cannot be read. Raises nothing."""
    del param
    return _items(ctx, incomplete, deleted=False)


def complete_deleted(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Return the keys in the trash with this prefix. Raises nothing."""
    del param
    return _items(ctx, incomplete, deleted=True)


def _items(ctx: click.Context, incomplete: str, *, deleted: bool) -> list[CompletionItem[str]]:
    # Errors must not print anything into the line that the user is typing.
    with suppress(StenologError, click.ClickException, OSError):
        with _store(ctx) as store:
            if deleted:
                listed = [one.key for one in store.list_trash()]
                keys = sorted({key for key in listed if key.startswith(incomplete)})[:_MOST]
            else:
                keys = store.list_sessions(prefix=incomplete, limit=_MOST)
        return [CompletionItem(key) for key in keys if _PLAIN.fullmatch(key)]
    return []


def _store(ctx: click.Context) -> "Store":
    """Open the store named on the command line or in the settings.

    Raises StenologError, ClickException.
    """
    # Imported late: needed only to complete keys.
    from stenolog.cli.workspace import Where, open_to_read

    agent, namespace = ctx.params.get("agent"), ctx.params.get("namespace")
    workspace = ctx.params.get("workspace")
    given = ctx.get_parameter_source("workspace") is click.core.ParameterSource.COMMANDLINE
    if workspace is None or not given:
        from stenolog.cli.config import settings_of

        settings = settings_of(None)
        workspace = settings.agents.get(agent or "", settings.agent).sessions
    return open_to_read(Where(workspace=workspace, agent=agent, namespace=namespace))


# --- shells ----------------------------------------------------------------------------------

_BASH: Final = """\
%(complete_func)s() {
    local IFS=$'\\n'
    local response completion type value

    response=$(env COMP_WORDS="${COMP_LINE:0:COMP_POINT}" COMP_BREAKS="$COMP_WORDBREAKS" \\
%(complete_var)s=bash_complete "$1" 2>/dev/null)

    for completion in $response; do
        IFS=',' read -r type value <<< "$completion"

        if [[ $type == 'dir' ]]; then
            COMPREPLY=()
            compopt -o dirnames
        elif [[ $type == 'file' ]]; then
            COMPREPLY=()
            compopt -o default
        elif [[ $type == 'plain' ]]; then
            COMPREPLY+=("$value")
        fi
    done

    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class Bash(ShellComplete):
    """Completion for bash, which splits words at colons although keys contain them."""

    name = "bash"
    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor, and the incomplete word."""
        line = os.environ.get("COMP_WORDS", "")
        words = split_arg_string(line)
        if not line[-1:].strip():
            return words[1:], ""
        return words[1:-1], words[-1] if len(words) > 1 else ""

    def format_completion(self, item: CompletionItem[str]) -> str:
        """Return the part of the completion that bash treats as the last word."""
        _, incomplete = self.get_completion_args()
        # Bash also splits at `=` and replaces only the part after it.
        breaks = [one for one in ":=" if one in os.environ.get("COMP_BREAKS", ":=")]
        kept = max((incomplete.rfind(one) + 1 for one in breaks), default=0)
        value = item.value
        if value.startswith(incomplete[:kept]):
            value = value[kept:]
        return f"{item.type},{value}"


_SHELLS: Final[dict[str, type[ShellComplete]]] = {
    "bash": Bash,
    "zsh": ZshComplete,
    "fish": FishComplete,
}


def register() -> None:
    """Register the completion for bash with click."""
    add_completion_class(Bash)


@click.command("completion")
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print a shell script that completes commands, options and session keys.

    \b
    bash:  add  eval "$(steno completion bash)"  to ~/.bashrc
    zsh:   add  eval "$(steno completion zsh)"  to ~/.zshrc, after compinit
    fish:  steno completion fish > ~/.config/fish/completions/steno.fish

    Exit codes: 0 done, 2 wrong usage.
    """  # noqa: D301 -- click knows a block by this character
    made = _SHELLS[shell](ctx.find_root().command, {}, _PROGRAM, VARIABLE)
    # Not `source()`: click's version starts bash to check its version.
    click.echo(made.source_template % made.source_vars(), nl=False)
