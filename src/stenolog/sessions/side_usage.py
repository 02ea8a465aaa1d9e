"""Token counts of model calls outside of turns: calls that write notes and summaries.

The counts are one field of meta, which is written together with the result of the calls. For
summaries, the field is in the session; for notes, in the progress mark (memory/consolidation.py).
If a process is killed between a model call and the write, the counts of the call are lost.
"""

from collections.abc import Mapping
from typing import Any, Final

from stenolog.providers.chat_model import CountedAnswer
from stenolog.sessions.usage import Counts, Price

META: Final = "side_usage"
"""Meta field with the counts by model, and the uid of the session they belong to."""
_COUNTS: Final = ("calls", "prompt", "answer", "cached")
_MAX_MODELS: Final = 64
"""Maximum number of models in one field. Calls of more models count under an empty name."""

SideUsage = dict[str, dict[str, int]]
"""Number of calls and their token counts, by name of the model."""


def count_answer(usage: SideUsage, answer: object) -> None:
    """Add the token counts of an answer, if its provider reported them."""
    if not isinstance(answer, CountedAnswer):
        return
    counts = {"calls": 1, "prompt": answer.usage.prompt, "answer": answer.usage.answer}
    add_usage(usage, {answer.model: {**counts, "cached": answer.usage.cached}})


def add_usage(usage: SideUsage, added_usage: Mapping[str, Mapping[str, int]]) -> None:
    """Add the counts in `added_usage` to `usage`."""
    for model, counts in added_usage.items():
        name = model if model in usage or len(usage) < _MAX_MODELS else ""
        sums = usage.setdefault(name, dict.fromkeys(_COUNTS, 0))
        for count in _COUNTS:
            sums[count] += counts.get(count, 0)


def updated_field(meta: Mapping[str, Any], uid: str, added_usage: SideUsage) -> dict[str, Any]:
    """Return the field of meta with `added_usage` included, as arguments of `set_meta`."""
    if not added_usage:
        return {}
    usage = read_field(meta, uid)
    add_usage(usage, added_usage)
    return {META: {"uid": uid, "models": usage}}


def read_field(meta: Mapping[str, Any], uid: str) -> SideUsage:
    """Return the stored counts; empty for a fork, whose field belongs to another session."""
    field = meta.get(META)
    if not isinstance(field, Mapping) or field.get("uid") != uid:
        return {}
    models = field.get("models")
    usage: SideUsage = {}
    if isinstance(models, Mapping):
        for name, counts in models.items():
            if isinstance(name, str) and isinstance(counts, Mapping):
                add_usage(usage, {name: {count: _count(counts.get(count)) for count in _COUNTS}})
    return usage


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def side_counts(usage: SideUsage, price: Price | None) -> dict[str, Counts]:
    """Return the counts by model. Each call costs as much as an average call of its model."""
    counts: dict[str, Counts] = {}
    for name, sums in usage.items():
        calls = max(sums["calls"], 1)
        average_usage = {count: sums[count] // calls for count in ("prompt", "answer", "cached")}
        cost = price(name, average_usage) if price is not None else None
        counts[name] = Counts(
            answers=calls,
            prompt=sums["prompt"],
            answer=sums["answer"],
            cached=sums["cached"],
            priced=0 if cost is None else calls,
            dollars=0.0 if cost is None else cost * calls,
        )
    return counts
