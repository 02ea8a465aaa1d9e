"""`steno completion`: what has a shell complete commands, options, and keys of sessions.

It is click's own mechanism, but for bash, which takes `telegram:123` for three words: there the
line itself is read, and of what completes it only the part behind the last colon is given back.
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
"""What the script asks by; click makes it of the program's name."""
_PROGRAM: Final = "steno"
_MOST: Final = 200
"""So many keys are offered."""
_PLAIN: Final = re.compile(r"(?!-)[^\s\x00-\x1f\x7f'\"\\$`!*?()<>|&;#~{}\[\]^,]+")
"""A key that needs no quotes in any shell."""


# --- keys ------------------------------------------------------------------------------------


def complete_key(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """The keys of sessions that begin so; none where they cannot be read. Raises nothing."""
    del param
    return _items(ctx, incomplete, deleted=False)


def complete_deleted(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """The keys in the trash that begin so. Raises nothing."""
    del param
    return _items(ctx, incomplete, deleted=True)


def _items(ctx: click.Context, incomplete: str, *, deleted: bool) -> list[CompletionItem[str]]:
    # Who presses Tab wants no words of ours in the line, whatever is wrong.
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
    """What the line names so far, or the settings. Raises StenologError, ClickException."""
    # Only who completes a key waits for them.
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
    """Bash, whose words end at colons, as keys do not."""

    name = "bash"
    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the cursor, and the one that is being written."""
        line = os.environ.get("COMP_WORDS", "")
        words = split_arg_string(line)
        if not line[-1:].strip():
            return words[1:], ""
        return words[1:-1], words[-1] if len(words) > 1 else ""

    def format_completion(self, item: CompletionItem[str]) -> str:
        """The part of it that bash takes for the last word."""
        _, incomplete = self.get_completion_args()
        # Bash breaks at `=` too, and puts only what is behind it anew.
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
    """Have click ask this module what completes a line in bash."""
    add_completion_class(Bash)


@click.command("completion")
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Write the script that completes steno in SHELL.

    Commands and options are completed, and keys of sessions. To have it from the next start on:

    bash: put `eval "$(steno completion bash)"` into ~/.bashrc.

    zsh: put `eval "$(steno completion zsh)"` into ~/.zshrc, behind compinit.

    fish: `steno completion fish > ~/.config/fish/completions/steno.fish`.

    Exit code: 0 written, 2 wrong usage.
    """
    made = _SHELLS[shell](ctx.find_root().command, {}, _PROGRAM, VARIABLE)
    # Not `source()`: that of click would start a bash to see how old it is.
    click.echo(made.source_template % made.source_vars(), nl=False)
