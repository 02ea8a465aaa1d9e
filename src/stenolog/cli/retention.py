"""`steno retention`: list the rules for old sessions, and apply them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import click

from stenolog.cli.config import config_option, read_settings
from stenolog.cli.edit import dry_run_option, progress
from stenolog.cli.output import PARTIAL, format_time, json_text, one_line, plural, sentence
from stenolog.cli.workspace import Location, check_exists, location_options
from stenolog.maintenance.retention_rules import Rule
from stenolog.maintenance.retention_runs import RetentionResult, apply_rules
from stenolog.settings.conversion import rules_of

_NO_RULES: Final = (
    "There are no rules: all sessions are kept. `steno config init` creates a config file with an "
    "example, [retention.old]."
)
_ACTIONS: Final = {
    "archive": "archived",
    "delete": "moved to the trash",
    "purge": "deleted permanently",
}


@click.group("retention")
def retention_command() -> None:
    """Archive, delete or purge old sessions by rules.

    A rule is a table in the config file, for example [retention.old] with action = "delete" and
    older_than_days = 365. Purge rules apply only to sessions in the trash. Without rules, all
    sessions are kept. `steno serve` applies the rules once an hour.
    """


@retention_command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per rule.")
@config_option
def list_command(as_json: bool, config: Path | None) -> None:
    """List the rules.

    Prints one line per rule, separated by tabs: name, action, matching sessions.

    Exit codes: 0 done, 1 the settings are invalid, 2 wrong usage.
    """
    rules = rules_of(read_settings(config))
    for rule in rules:
        if as_json:
            click.echo(json_text(_rule_fields(rule)))
        else:
            click.echo(f"{rule.name}\t{rule.action}\t{one_line(_describe_sessions(rule))}")
    if not rules:
        click.echo(_NO_RULES, err=True)


@retention_command.command("run")
@dry_run_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per session.")
@config_option
@location_options
@click.pass_context
def run_command(
    ctx: click.Context,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    config: Path | None,
    where: Location,
) -> None:
    """Apply the rules to the sessions of all agents, or of the one given by --agent.

    Sessions that are running, or that change in the meantime, are skipped; so are damaged ones when
    deleting. The age of a session counts from its last change or from its import, and in the trash
    from its deletion. `steno restore` brings deleted sessions back. Purge rules delete permanently
    and also complete interrupted purges. All actions are recorded in the file retention.log of the
    workspace.

    Prints one line per session, separated by tabs: action, rule, key, number of messages, time of
    the last change. Without a terminal, --yes is required to delete.

    Example: steno retention run --dry-run

    Exit codes: 0 done, or nothing to do, 1 failed or not confirmed, 2 wrong usage, 3 some sessions
    failed.
    """
    rules = rules_of(read_settings(config))
    check_exists(where.workspace)
    for rule in rules:
        if not rule.has_condition:
            click.echo(
                f"Rule {rule.name} matches no session: it {_missing_condition(rule)}.", err=True
            )

    steps: list[Callable[[], None]] = []

    def confirm(planned: Sequence[RetentionResult]) -> bool:
        # guard: retention-asks
        if not yes and any(one.step.action != "archive" for one in planned):
            _confirm(planned)
        steps.append(bars.enter_context(progress("Applying rules", len(planned))))
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
    ctx.exit(PARTIAL if any(one.outcome == "failed" for one in found) else 0)


def _confirm(planned: Sequence[RetentionResult]) -> None:
    """Ask for confirmation. Raises UsageError, Abort."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError(
            "This deletes sessions. Without a terminal to confirm, add --yes; --dry-run lists the "
            "sessions."
        )
    for one in planned:
        click.echo("\t".join(_row(one)), err=True)
    click.confirm(f"{_totals(planned, 'to be')} Continue?", abort=True, err=True)


def _remarks(
    rules: Sequence[Rule], found: Sequence[RetentionResult], *, dry_run: bool
) -> Iterator[str]:
    if not rules:
        yield _NO_RULES
        return
    for one in found:
        if one.outcome in ("skipped", "failed"):
            left = f"skipped, {one.words}" if one.outcome == "skipped" else one.words
            yield f"{one_line(one.step.key)}: {sentence(left)}"
    did = [one for one in found if one.outcome in ("planned", "done")]
    if not did:
        yield "There is nothing to do."
    else:
        yield _totals(did, "would be" if dry_run else "")


def _totals(found: Sequence[RetentionResult], verb: str) -> str:
    parts = []
    for action, words in _ACTIONS.items():
        number = sum(one.step.action == action for one in found)
        if number:
            parts.append(f"{plural(number, 'session')} {verb} {words}".replace("  ", " "))
    return f"{', '.join(parts)}."


def _row(one: RetentionResult) -> list[str]:
    step = one.step
    key = step.key or "-"
    name = key if one.agent is None else f"{one.agent}/{key}"
    shown = step.action if one.outcome in ("planned", "done") else one.outcome
    return [shown, step.rule, one_line(name), str(step.messages), format_time(step.updated)]


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
        "updated": format_time(step.updated),
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


def _describe_sessions(rule: Rule) -> str:
    """Describe the sessions that a rule selects."""
    if not rule.has_condition:
        return f"no sessions: the rule {_missing_condition(rule)}"
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
        parts.append(f"whose key starts with {rule.prefix}")
    spared = f", except those tagged {rule.exclude_tag}" if rule.exclude_tag else ""
    if rule.action == "purge":
        return f"sessions in the trash, {' and '.join(parts)}{spared}"
    return f"sessions {' and '.join(parts)}{spared}"


def _missing_condition(rule: Rule) -> str:
    """Explain why a rule selects no session."""
    if rule.has_unknown_condition:
        return "purges, and purge rules can only use an age and a prefix"
    if rule.action == "purge":
        return "purges, and purge rules need an age"
    return "has no age, count, size or tag"
