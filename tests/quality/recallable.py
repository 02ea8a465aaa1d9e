"""Measure how many of fifty facts can be recalled after 300 turns, for docs/memory.md.

--real also asks the small language model, which takes most of an hour on two cores; without it, its
column is unchanged. --write updates the results and the page.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from talk import SEED, TURNS, Fact, turns  # noqa: E402

from stenolog.catalog import open_catalog  # noqa: E402
from stenolog.context.context import Context  # noqa: E402
from stenolog.context.window import Limits  # noqa: E402
from stenolog.memory.consolidation import Consolidator  # noqa: E402
from stenolog.memory.notes import Notes  # noqa: E402
from stenolog.memory.recall import recall  # noqa: E402
from stenolog.memory.scopes import scope_of  # noqa: E402
from stenolog.providers.chat_model import CompletionFunction  # noqa: E402
from stenolog.stores.base import Store  # noqa: E402
from stenolog.stores.open_store import open_store  # noqa: E402
from support.copying_model import copying  # noqa: E402

RESULTS: Final = HERE / "results.json"
PAGE: Final = ROOT / "docs" / "memory.md"
KEY: Final = "telegram:4711"
LIMITS: Final = Limits(max_context_tokens=4_000, max_history_messages=50)
BUDGET: Final = 1_000
"""Tokens of the context that recall may use."""

ROWS: Final = {
    "window": "in the window: the summary and the newest turns",
    "messages": "recalled from past messages alone",
    "notes": "recalled from notes alone",
    "both": "recalled from both",
    "any": "in the window or recalled",
}

Progress = Callable[[int], None]


def measure(
    place: Path,
    ask: CompletionFunction,
    *,
    count: int = TURNS,
    together: int = 5,
    max_turns: int = 20,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Store the conversation, ask for every fact, and return how many were found."""
    told: list[Fact] = []
    summaries = 0
    with (
        open_store(f"jsonl:{place}") as store,
        open_store(f"jsonl:{place}", namespace="notes") as kept,
    ):
        context = Context(store, ask, limits=LIMITS)
        notes = Notes(kept)
        consolidation = Consolidator(store, notes, ask, max_turns=max_turns)
        rejected = 0
        for number, turn in enumerate(turns(count), 1):
            store.add_messages(KEY, turn.messages)
            told += [turn.fact] if turn.fact is not None else []
            summaries += context.summarize_if_needed(KEY) is not None
            if number % together == 0 or number == count:
                rejected += consolidation.run(KEY).rejected
            progress(number)
        return {
            "turns": count,
            "summaries": summaries,
            "core notes": len(notes.list(scope_of(KEY), kind="core")),
            "facts rejected": rejected,
            "facts": len(told),
            "plain": sum(fact.plain for fact in told),
            "found": _count_found(store, notes, context, told),
        }


def _count_found(
    store: Store, notes: Notes, context: Context, told: list[Fact]
) -> dict[str, list[int]]:
    """Return for each method how many questions with and without a rare word it answers."""
    window = "\n".join(str(message["content"]) for message in context.window(KEY).messages)
    found: dict[str, list[int]] = {way: [0, 0] for way in ROWS}
    with open_catalog(store) as catalog:
        for fact in told:
            shown = {
                "window": window,
                "messages": _recalled(fact, None, catalog),
                "notes": _recalled(fact, notes, None),
                "both": _recalled(fact, notes, catalog),
            }
            ways = {way for way, text in shown.items() if fact.answer.lower() in text.lower()}
            if ways & {"window", "both"}:
                ways.add("any")
            for way in ways:
                found[way][not fact.plain] += 1
    return found


def _recalled(fact: Fact, notes: Notes | None, catalog: Any) -> str:
    return recall(
        fact.question,
        scope=scope_of(KEY),
        notes=notes,
        catalog=catalog,
        budget=BUDGET,
        exclude_session=KEY,
    ).block


def page(results: dict[str, Any]) -> str:
    """Return the table of the page."""
    columns = [name for name in ("scripted", "real") if name in results]
    first = results[columns[0]]
    heads = {"scripted": "scripted model", "real": "small model (SmolLM2-135M)"}
    plain, other = first["plain"], first["facts"] - first["plain"]
    lines = [
        "| the answer is | "
        + " | ".join(f"{heads[c]}: shared word / none" for c in columns)
        + " |",
        "|---|" + "---|" * len(columns),
    ]
    for way, words in ROWS.items():
        cells = [
            "{}/{} and {}/{}".format(
                results[c]["found"][way][0], plain, results[c]["found"][way][1], other
            )
            for c in columns
        ]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    for name in ("core notes", "facts rejected", "summaries"):
        cells = [str(results[c][name]) for c in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def renew(text: str, results: dict[str, Any]) -> str:
    """Return the page with a new table."""
    begin, end = "<!-- begin figures -->", "<!-- end figures -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n{page(results)}\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true", help="ask the small model, too")
    parser.add_argument("--write", action="store_true", help="renew the results and the page")
    parser.add_argument("--turns", type=int, default=TURNS, help="fewer, for a trial")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    print(f"seed {SEED}, {asked.turns} turns")
    with tempfile.TemporaryDirectory() as folder:
        results["scripted"] = measure(Path(folder), copying, count=asked.turns)
    if asked.real:
        results["real"] = _measure_small_model(asked.turns)
    print(page(results))
    if asked.write:
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
        PAGE.write_text(renew(PAGE.read_text(), results))


def _measure_small_model(count: int) -> dict[str, Any]:
    from support.small_model import SmallModel, weights

    begun = time.monotonic()

    def progress(number: int) -> None:
        print(f"\r{number} of {count} turns, {time.monotonic() - begun:.0f} s", end="", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        # With several turns at once the small model gets confused and keeps inventing facts.
        model = SmallModel(weights(), longest=200)
        found = measure(Path(folder), model, count=count, max_turns=1, progress=progress)
    print()
    return found


if __name__ == "__main__":
    main()
