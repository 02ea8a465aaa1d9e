"""`steno retention`: list the rules for old sessions, and apply them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import click

from stenolog.cli.config import config_option, settings_of
from stenolog.cli.edit import dry_run_option, progress
from stenolog.cli.output import NOT_ALL, count, json_text, moment, one_line, sentence
from stenolog.cli.workspace import Where, check_there, where_options
from stenolog.maintenance.retention_rules import Rule
from stenolog.maintenance.retention_runs import RetentionResult, apply_rules
from stenolog.settings.retention_settings import rules_of

_NO_RULES: Final = (
    "There are no rules: all sessions are kept. `steno config init` writes a file that shows how "
    "a rule is written, under [retention.old]."
)
_WORDS: Final = {"archive": "archived", "delete": "put into the trash", "purge": "deleted for good"}


@click.group("retention")
def retention_command() -> None:
    """Archive, delete or purge old sessions by rules. Without rules all is kept.

    A rule is a table of the config file, as [retention.old] with action = "delete" and
    older_than_days = 365. A rule that says purge takes only what is in the trash. `steno serve`
    keeps to the rules, once an hour.
    """


@retention_command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object for each rule.")
@config_option
def list_command(as_json: bool, config: Path | None) -> None:
    """List the rules.

    One line each, with tabs between: the name, what is done, and with which sessions.

    Exit code: 0 listed, 1 the settings are wrong, 2 wrong usage.
    """
    rules = rules_of(settings_of(config))
    for rule in rules:
        if as_json:
            click.echo(json_text(_rule_fields(rule)))
        else:
            click.echo(f"{rule.name}\t{rule.action}\t{one_line(_which(rule))}")
    if not rules:
        click.echo(_NO_RULES, err=True)


@retention_command.command("run")
@dry_run_option
@click.option("--yes", is_flag=True, help="Do it without asking.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object for each session.")
@config_option
@where_options
@click.pass_context
def run_command(
    ctx: click.Context,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    config: Path | None,
    where: Where,
) -> None:
    """Do what the rules say, in the sessions of every agent, or of the one that --agent names.

    Archiving comes first, purging last. Sessions in which somebody has the turn, and those that
    changed meanwhile, are left alone. Age is counted from the last change that a session tells of
    itself, or from when it was taken in from another program. What was deleted is in the trash, and
    `steno restore` brings it back; it then counts as changed when it was deleted. Damaged sessions
    are not deleted. Only a rule that says purge deletes for good: what is in the trash, counted
    from when it was deleted, and never a session that is in use; it also ends purges that were
    interrupted. What is begun and what was done stands in the file retention.log of the workspace.

    One line for each session, with tabs between: what is done, the rule, the key, how many
    messages it has, and when it last changed. Where nobody can be asked, --yes is needed to delete.

    Exit code: 0 done, or there was nothing to do, 1 it could not be done or was not meant, 2 wrong
    usage, 3 it could not be done for some sessions; stderr says why.
    """
    rules = rules_of(settings_of(config))
    check_there(where.workspace)
    for rule in rules:
        if not rule.has_condition:
            click.echo(f"The rule {rule.name} {_lacks(rule)}, so it takes no session.", err=True)

    steps: list[Callable[[], None]] = []

    def confirm(planned: Sequence[RetentionResult]) -> bool:
        # guard: retention-asks
        if not yes and any(one.step.action != "archive" for one in planned):
            _ask(planned)
        steps.append(bars.enter_context(progress("Keeping to the rules", len(planned))))
        return True

    with ExitStack() as bars:
        found = apply_rules(
            where.workspace,
            rules,
            agent=where.agent,
            namespace=where.namespace,
            dry_run=dry_run,
            confirm=confirm,
            progress=lambda: steps[0](),
        )
    for one in found:
        click.echo(json_text(_fields(one)) if as_json else "\t".join(_row(one)))
    for words in _remarks(rules, found, dry_run=dry_run):
        click.echo(words, err=True)
    ctx.exit(NOT_ALL if any(one.outcome == "failed" for one in found) else 0)


def _ask(planned: Sequence[RetentionResult]) -> None:
    """Ask for confirmation. Raises UsageError, Abort."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError(
            "This deletes sessions, and nobody can be asked; --yes does it without asking, "
            "--dry-run tells which."
        )
    for one in planned:
        click.echo("\t".join(_row(one)), err=True)
    click.confirm(f"{_sum(planned, 'to be')} Do it?", abort=True, err=True)


def _remarks(
    rules: Sequence[Rule], found: Sequence[RetentionResult], *, dry_run: bool
) -> Iterator[str]:
    if not rules:
        yield _NO_RULES
        return
    for one in found:
        if one.outcome in ("skipped", "failed"):
            left = f"left alone, {one.words}" if one.outcome == "skipped" else one.words
            yield f"{one_line(one.step.key)}: {sentence(left)}"
    did = [one for one in found if one.outcome in ("planned", "done")]
    if not did:
        yield "There is nothing to do."
    else:
        yield _sum(did, "would be" if dry_run else "")


def _sum(found: Sequence[RetentionResult], verb: str) -> str:
    parts = []
    for action, words in _WORDS.items():
        number = sum(one.step.action == action for one in found)
        if number:
            parts.append(f"{count(number, 'session')} {verb} {words}".replace("  ", " "))
    return f"{', '.join(parts)}."


def _row(one: RetentionResult) -> list[str]:
    step = one.step
    key = step.key or "-"
    name = key if one.agent is None else f"{one.agent}/{key}"
    shown = step.action if one.outcome in ("planned", "done") else one.outcome
    return [shown, step.rule, one_line(name), str(step.messages), moment(step.updated)]


def _fields(one: RetentionResult) -> dict[str, Any]:
    step = one.step
    return {
        "action": step.action,
        "rule": step.rule,
        "agent": one.agent,
        "namespace": one.namespace,
        "key": step.key,
        "uid": step.uid,
        "messages": step.messages,
        "updated": moment(step.updated),
        "in_trash": step.in_trash,
        "outcome": one.outcome,
        "words": one.words,
    }


def _rule_fields(rule: Rule) -> dict[str, Any]:
    return {
        "name": rule.name,
        "action": rule.action,
        "older_than_days": rule.older_than.total_seconds() / 86_400 if rule.older_than else None,
        "keep_newest": rule.keep_newest or None,
        "larger_than_bytes": rule.larger_than or None,
        "tag": rule.tag or None,
        "prefix": rule.prefix or None,
        "spare_tag": rule.exclude_tag or None,
    }


def _which(rule: Rule) -> str:
    """Describe the sessions that a rule selects."""
    if not rule.has_condition:
        return f"no session: it {_lacks(rule)}"
    parts = []
    if rule.older_than is not None:
        days = f"{rule.older_than.total_seconds() / 86_400:,g} days"
        in_trash = rule.action == "purge"
        parts.append(f"deleted {days} ago" if in_trash else f"unchanged for {days}")
    if rule.keep_newest:
        parts.append(f"beyond the newest {rule.keep_newest:,}")
    if rule.larger_than:
        parts.append(f"larger than {rule.larger_than / 1_000_000:,g} MB")
    if rule.tag:
        parts.append(f"tagged {rule.tag}")
    if rule.prefix:
        parts.append(f"whose key begins with {rule.prefix}")
    spared = f", but not those tagged {rule.exclude_tag}" if rule.exclude_tag else ""
    if rule.action == "purge":
        return f"sessions in the trash, {' and '.join(parts)}{spared}"
    return f"sessions {' and '.join(parts)}{spared}"


def _lacks(rule: Rule) -> str:
    """Explain why a rule selects no session."""
    if rule.has_unknown_condition:
        return "purges, which goes by age and prefix, and names a count, a size or a tag"
    if rule.action == "purge":
        return "purges, and names no age"
    return "names no age, no count, no size and no tag"
