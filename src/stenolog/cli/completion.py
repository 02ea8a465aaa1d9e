"""`steno completion`: shell completion of commands, options and session keys.

Click's completion is used for all shells except bash. Bash splits `telegram:123` into three words,
so for bash this module parses the command line and returns only the part of a key after its last
colon.
"""

import os
import re
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import (
    CompletionItem,
    ShellComplete,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from stenolog.errors import StenologError

if TYPE_CHECKING:
    from stenolog.stores.base import Store

COMPLETION_VARIABLE: Final = "_STENO_COMPLETE"
"""Environment variable with which a shell requests completions. Click defines its name."""
_PROGRAM_NAME: Final = "steno"
_MAX_KEYS: Final = 200
"""Maximum number of keys offered as completions."""
_UNQUOTED_KEY: Final = re.compile(r"(?!-)[^\s\x00-\x1f\x7f'\"\\$`!*?()<>|&;#~{}\[\]^,]+")
"""A key that needs no quoting in any shell."""


# --- keys ------------------------------------------------------------------------------------


def complete_session_key(
    ctx: click.Context, param: click.Parameter, incomplete: str, *, deleted: bool = False
) -> list[CompletionItem[str]]:
    """Return the session keys that start with `incomplete`; with `deleted`, keys in the trash.

    Keys that need quoting are left out. Return an empty list if the sessions cannot be read.
    """
    del param
    # Errors must not print anything into the line that the user is typing.
    with suppress(StenologError, click.ClickException, OSError):
        with _open_store(ctx) as store:
            if deleted:
                deleted_keys = {session.key for session in store.list_trash()}
                keys = sorted(key for key in deleted_keys if key.startswith(incomplete))[:_MAX_KEYS]
            else:
                keys = store.list_sessions(prefix=incomplete, limit=_MAX_KEYS)
        return [CompletionItem(key) for key in keys if _UNQUOTED_KEY.fullmatch(key)]
    return []


complete_deleted_key: Final = partial(complete_session_key, deleted=True)


def _open_store(ctx: click.Context) -> "Store":
    """Open the store that the command line or the settings name.

    Raises StenologError, ClickException.
    """
    # This import is only needed to complete keys.
    from stenolog.cli.workspace import (
        Location,
        is_on_command_line,
        workspace_in_settings,
    )

    agent, namespace = ctx.params.get("agent"), ctx.params.get("namespace")
    workspace = ctx.params.get("workspace")
    if workspace is None or not is_on_command_line(ctx, "workspace"):
        workspace = workspace_in_settings(agent)
    return Location(workspace=workspace, agent=agent, namespace=namespace).open()


# --- shells ----------------------------------------------------------------------------------

_BASH_SCRIPT: Final = """\
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


@add_completion_class
class BashCompletion(ShellComplete):
    """Completion for bash, which splits words at the colons of session keys."""

    name = "bash"
    source_template = _BASH_SCRIPT

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
        # Bash also splits words at `=` and replaces only the part after the `=`.
        word_breaks = [char for char in ":=" if char in os.environ.get("COMP_BREAKS", ":=")]
        start = max((incomplete.rfind(char) + 1 for char in word_breaks), default=0)
        return f"{item.type},{item.value.removeprefix(incomplete[:start])}"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print a shell script that completes commands, options and session keys.

    \b
    bash:  add  eval "$(steno completion bash)"  to ~/.bashrc
    zsh:   add  eval "$(steno completion zsh)"  to ~/.zshrc, after compinit
    fish:  steno completion fish > ~/.config/fish/completions/steno.fish

    Exit codes: 0 done, 2 wrong usage.
    """  # noqa: D301 -- click does not rewrap a block after \b
    steno = ctx.find_root().command
    completion_class = get_completion_class(shell)
    assert completion_class is not None, "click knows all shells of the argument"
    completion = completion_class(steno, {}, _PROGRAM_NAME, COMPLETION_VARIABLE)
    # Click's method `source()` is not used, because it starts bash to check the version of bash.
    click.echo(completion.source_template % completion.source_vars(), nl=False)
