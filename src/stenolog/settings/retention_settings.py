"""Conversion of settings to retention rules."""

from datetime import timedelta

from stenolog.maintenance.retention_rules import Rule
from stenolog.settings.values import Settings

_MEGABYTE = 1_000_000


def rules_of(settings: Settings) -> tuple[Rule, ...]:
    """Return the configured rules, sorted by name. The default is none."""
    return tuple(
        Rule(
            name=name,
            action=rule.action,
            older_than=timedelta(days=rule.older_than_days) if rule.older_than_days else None,
            keep_newest=rule.keep_newest,
            larger_than=int(rule.larger_than_mb * _MEGABYTE),
            tag=rule.tag,
            prefix=rule.prefix,
            exclude_tag=rule.spare_tag,
        )
        for name, rule in sorted(settings.retention.items())
    )
