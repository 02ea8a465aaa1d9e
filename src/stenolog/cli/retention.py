"""`steno retention`: apply the rules for old sessions."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import click
from msgspec.structs import asdict

from stenolog.cli.config import config_option, read_settings
from stenolog.cli.output import (
    EXIT_PARTIAL,
    format_time,
    one_line,
    plural,
    print_notice,
    print_rows,
    sentence,
)
from stenolog.cli.workspace import (
    Location,
    check_workspace_exists,
    dry_run_option,
    json_option,
    location_options,
)
from stenolog.maintenance.retention_rules import Rule
from stenolog.maintenance.retention_runs import RetentionResult, apply_rules
from stenolog.settings.conversion import rules_of

_NO_RULES_TEXT: Final = (
    "There are no rules: all sessions are kept. `steno config init` creates a config file with an "
    "example, [retention.old]."
)
_ACTION_PARTICIPLES: Final = {
    "delete": "moved to the trash",
    "purge": "deleted permanently",
}


@click.group("retention")
def retention_command() -> None:
    """Delete or purge old sessions by rules.

    A rule is a table in the config file, for example [retention.old] with action = "delete" and
    older_than_days = 365. Purge rules apply only to sessions in the trash. Without rules, all
    sessions are kept. `steno serve` applies the rules once an hour.
    """


@retention_command.command("run")
@dry_run_option
@json_option("one JSON object per session")
@config_option
@location_options
def run_command(dry_run: bool, config: Path | None, location: Location) -> int:
    """Apply the rules for all agents, or only for --agent NAME.

    Sessions with a turn in progress and sessions that change during the run are skipped. Damaged
    sessions are not deleted. The age of a session counts from its last change or from its import,
    and in the trash from its deletion. `steno restore` restores deleted sessions. Purge rules
    delete permanently and also complete interrupted purges. Nothing is asked: --dry-run shows what
    the rules would do.

    Prints one line per session, separated by tabs: action, rule, key, number of messages, time of
    the last change.

    Example: steno retention run --dry-run

    Exit codes: 0 done, or nothing to do, 1 failed, 2 wrong usage, 3 some sessions failed.
    """
    rules = rules_of(read_settings(config))
    check_workspace_exists(location.workspace)
    for rule in rules:
        if not rule.has_condition:
            print_notice(f"Rule {rule.name} matches no session: {_missing_condition(rule)}.")

    results = apply_rules(
        location.workspace,
        rules,
        agent=location.agent,
        namespace=location.namespace,
        dry_run=dry_run,
    )
    print_rows(results, fields=asdict, cells=_result_cells)
    print_notice(*_run_remarks(rules, results, dry_run=dry_run))
    return EXIT_PARTIAL if any(result.outcome == "failed" for result in results) else 0


def _run_remarks(
    rules: Sequence[Rule], results: Sequence[RetentionResult], *, dry_run: bool
) -> Iterator[str]:
    if not rules:
        yield _NO_RULES_TEXT
        return
    for result in results:
        if result.outcome in ("skipped", "failed"):
            prefix = "skipped, " if result.outcome == "skipped" else ""
            yield f"{one_line(result.key)}: {sentence(f'{prefix}{result.message}')}"
    applied_results = [result for result in results if result.outcome in ("due", "done")]
    totals_text = _totals_text(applied_results, "would be " if dry_run else "")
    yield totals_text if applied_results else "There is nothing to do."


def _totals_text(results: Sequence[RetentionResult], auxiliary: str) -> str:
    counts = Counter[str](result.action for result in results)
    parts = [
        f"{plural(counts[action], 'session')} {auxiliary}{participle}"
        for action, participle in _ACTION_PARTICIPLES.items()
        if counts[action]
    ]
    return f"{', '.join(parts)}."


def _result_cells(result: RetentionResult) -> list[str]:
    key = result.key or "-"
    shown_key = key if result.agent is None else f"{result.agent}/{key}"
    action = result.action if result.outcome in ("due", "done") else result.outcome
    return [action, result.rule, shown_key, str(result.messages), format_time(result.updated)]


def _missing_condition(rule: Rule) -> str:
    """Explain why a rule selects no session."""
    return "a purge rule needs an age" if rule.action == "purge" else "the rule has no age or tag"
