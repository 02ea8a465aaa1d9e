"""Cost, tokens, model, program, project, failures and forks of sessions, on every engine."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stenolog.catalog import Catalog, open_catalog
from stenolog.catalog.entries import Entry, SessionFilter, Sort
from stenolog.sessions.usage import Totals, cost_of, load_prices
from stenolog.stores.base import Store

START = datetime(2026, 3, 1, tzinfo=UTC)
PRICED = "gpt-4o"


def _answer(
    model: str = PRICED, *, prompt: int = 1_000, answer: int = 100, text: str = "Done."
) -> dict[str, Any]:
    usage = {"prompt": prompt, "answer": answer, "cached": 0}
    marks = {"model": model, "usage": usage}
    return {"role": "assistant", "content": text, "stenolog": marks}


def _entry(catalog: Catalog, key: str) -> Entry:
    found = catalog.entry(key)
    assert found is not None
    return found


def _keys(catalog: Catalog, **how: Any) -> list[str]:
    return [one.key for one in catalog.list(**how).entries]


def _stats_cost(store: Store, *keys: str) -> float:
    totals = Totals(price=load_prices())
    for key in keys:
        totals.add(store.info(key), store.get_history(key, full=True))
    return cost_of(totals.models).total


def _import(store: Store, key: str, folder: str, *, program: str = "claude-code") -> None:
    store.set_meta(key, transcript={"program": program, "folders": [folder, "/elsewhere"]})


def test_entry_has_cost_tokens_and_model_of_all_answers(store: Store, catalog: Catalog) -> None:
    store.add_message("k", "user", "Do it.")
    store.add_messages("k", [_answer(), _answer("claude-sonnet-4-5", prompt=500)])
    first = _entry(catalog, "k")
    assert (first.input_tokens, first.output_tokens, first.model) == (
        1_500,
        200,
        "claude-sonnet-4-5",
    )
    store.clear("k")  # hidden answers used tokens, too
    store.add_messages("k", [_answer("no-such-model", prompt=7), _answer()])
    entry = _entry(catalog, "k")
    assert (entry.input_tokens, entry.output_tokens, entry.model) == (2_507, 400, PRICED)
    assert entry.unpriced == 1
    assert entry.cost == pytest.approx(_stats_cost(store, "k"), abs=1e-8)
    assert first.cost is not None
    assert entry.cost is not None
    assert entry.cost > first.cost > 0


def test_cost_is_unknown_without_a_price(store: Store, catalog: Catalog) -> None:
    store.add_message("nothing", "user", "Hello?")
    store.add_messages("k", [_answer("no-such-model")])
    assert _entry(catalog, "nothing").cost is None
    assert (_entry(catalog, "k").cost, _entry(catalog, "k").unpriced) == (None, 1)


def test_copied_answers_of_a_fork_count_for_its_source_only(store: Store, catalog: Catalog) -> None:
    store.add_message("a", "user", "Do it.")
    store.add_messages("a", [_answer(prompt=10_000)])
    store.fork("a", "b")
    store.add_messages("b", [_answer(prompt=3)])
    source, fork = _entry(catalog, "a"), _entry(catalog, "b")
    assert (fork.forked_from, fork.forked_at) == ("a", 2)
    assert (source.forked_from, source.forked_at) == (None, 0)
    assert (source.input_tokens, fork.input_tokens) == (10_000, 3)
    assert fork.cost is not None
    assert source.cost is not None
    assert source.cost + fork.cost == pytest.approx(_stats_cost(store, "a", "b"), abs=1e-8)


def test_records_of_other_programs_are_not_counted_as_tokens(
    store: Store, catalog: Catalog
) -> None:
    body = {"role": "user", "content": "a question"}
    record = {"uuid": "1", "text": "words of the record " * 50}
    store.add_messages("plain", [body])
    store.add_messages("imported", [{**body, "claude_code": record}])
    tokens = {entry.key: entry.tokens for entry in catalog.list().entries}
    assert tokens["imported"] == tokens["plain"]
    estimates = []
    for key in ("plain", "imported"):
        totals = Totals()
        totals.add(store.info(key), store.get_history(key))
        estimates.append(totals.total.estimated)
    assert estimates[0] == estimates[1]


def test_failed_tool_calls_are_counted(store: Store, catalog: Catalog) -> None:
    store.add_messages("ok", [{"role": "tool", "content": "fine", "tool_call_id": "1"}])
    failed = {"role": "tool", "content": "no", "tool_call_id": "1", "stenolog": {"failed": True}}
    block = {"type": "tool_result", "tool_use_id": "2", "content": "no", "is_error": True}
    store.add_messages("bad", [failed, {"role": "user", "content": [block, block]}])
    assert (_entry(catalog, "ok").failed, _entry(catalog, "bad").failed) == (0, 3)
    assert _keys(catalog, failed=True) == ["bad"]
    assert _keys(catalog, failed=False) == ["ok"]
    # A fork copies the results. It has only the failures after them.
    store.fork("bad", "fork")
    assert _entry(catalog, "fork").failed == 0
    store.add_messages("fork", [failed])
    assert (_entry(catalog, "bad").failed, _entry(catalog, "fork").failed) == (3, 1)


def test_tags_and_titles_do_not_change_the_time_of_the_last_message(
    store: Store, catalog: Catalog
) -> None:
    store.add_messages("old", [_answer()], at=[START])
    store.add_messages("new", [_answer()], at=[START + timedelta(days=1)])
    store.set_meta("old", tags=["mine"])
    assert _entry(catalog, "old").last_message == START
    assert _keys(catalog) == ["old", "new"]
    assert _keys(catalog, sort="newest") == ["new", "old"]
    assert _keys(catalog, sort="oldest") == ["old", "new"]
    assert _keys(catalog, since=START + timedelta(hours=1)) == ["new"]
    assert _keys(catalog, until=START + timedelta(hours=1)) == ["old"]


def test_session_without_messages_has_the_time_of_its_creation(
    store: Store, catalog: Catalog
) -> None:
    store.set_meta("empty", title="Nothing yet")
    assert _entry(catalog, "empty").last_message == store.info("empty").created
    store.add_messages("empty", [_answer()], at=[datetime(2100, 1, 1, tzinfo=UTC)])
    assert _entry(catalog, "empty").last_message == datetime(2100, 1, 1, tzinfo=UTC)


def test_program_and_project_come_from_the_imported_transcript(
    store: Store, catalog: Catalog
) -> None:
    for key, folder in (("a", "/srv/app"), ("b", "/srv/app"), ("c", "/srv/site")):
        store.add_messages(key, [_answer()])
        _import(store, key, folder, program="codex" if key == "c" else "claude-code")
    store.add_messages("own", [_answer()])
    store.set_meta("own", cwd="/srv/me")
    entry = _entry(catalog, "a")
    assert (entry.program, entry.project) == ("claude-code", "/srv/app")
    assert (_entry(catalog, "own").program, _entry(catalog, "own").project) == ("", "/srv/me")
    assert sorted(_keys(catalog, program="claude-code")) == ["a", "b"]
    assert sorted(_keys(catalog, program="")) == ["own"]
    assert _keys(catalog, project="/srv/site") == ["c"]
    assert sorted(_keys(catalog, model=PRICED)) == ["a", "b", "c", "own"]


@pytest.mark.parametrize("sort", ["changed", "newest", "oldest", "cost", "tokens", "length"])
def test_every_order_is_complete_over_pages(store: Store, catalog: Catalog, sort: Sort) -> None:
    for number in range(7):
        answers = [_answer(prompt=10 * (number // 2)) for _ in range(1 + number % 3)]
        times = [START + timedelta(hours=number // 2)] * len(answers)
        store.add_messages(f"k{number}", answers, at=times)
    entries: list[Entry] = []
    after = None
    while True:
        page = catalog.list(sort=sort, limit=2, after=after)
        entries += page.entries
        after = page.after
        if after is None:
            break
    assert len({one.key for one in entries}) == len(entries) == 7
    values: list[Any] = [
        {
            "changed": one.updated,
            "newest": one.last_message,
            "oldest": one.last_message,
            "cost": one.cost,
            "tokens": one.input_tokens + one.output_tokens,
            "length": one.count,
        }[sort]
        for one in entries
    ]
    assert values == sorted(values, reverse=sort != "oldest")


def test_overview_counts_all_sessions_and_the_values_to_choose_from(
    store: Store, catalog: Catalog
) -> None:
    for number in range(5):
        key = f"web:{number}"
        store.add_messages(key, [_answer("gpt-4o" if number else "no-such-model")])
        _import(store, key, f"/srv/{number % 2}")
    store.set_meta("web:3", tags=["x"])
    found = catalog.overview(SessionFilter(project="/srv/0"), limit=2)
    assert (found.count, len(found.page.entries), found.failed) == (3, 2, 0)
    assert found.cost == pytest.approx(_stats_cost(store, "web:2", "web:4"), abs=1e-8)
    # Another project can be chosen instead; the other facets are those of the chosen project.
    projects = [(one.value, one.count) for one in found.facets["project"]]
    assert projects == [("/srv/0", 3), ("/srv/1", 2)]
    assert [(one.value, one.count) for one in found.facets["model"]] == [
        ("gpt-4o", 2),
        ("no-such-model", 1),
    ]
    assert [one.cost is None for one in found.facets["model"]] == [False, True]
    assert [(one.value, one.count) for one in found.facets["channel"]] == [("web", 3)]
    assert found.facets["tag"] == []
    assert [one.value for one in catalog.overview(SessionFilter()).facets["tag"]] == ["x"]
    assert len(catalog.overview(SessionFilter(), values=1).facets["project"]) == 1


def test_projects_have_their_newest_sessions(store: Store, catalog: Catalog) -> None:
    for number in range(9):
        key = f"k{number}"
        store.add_messages(key, [_answer()], at=[START + timedelta(days=number)])
        _import(store, key, f"/srv/{number % 3}")
    found = catalog.projects(SessionFilter(), size=2, limit=2)
    assert [one.group.value for one in found.projects] == ["/srv/2", "/srv/1"]
    assert [[one.key for one in two.entries] for two in found.projects] == [
        ["k8", "k5"],
        ["k7", "k4"],
    ]
    assert [one.group.count for one in found.projects] == [3, 3]
    assert found.after == 2
    rest = catalog.projects(SessionFilter(), size=2, limit=2, after=2)
    assert ([one.group.value for one in rest.projects], rest.after) == (["/srv/0"], None)


def test_search_groups_hits_by_session_and_puts_speech_first(
    store: Store, catalog: Catalog
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "grep", "arguments": "invoice"}}
    for number in range(3):
        result = {"role": "tool", "tool_call_id": "1", "content": "invoice invoice invoice"}
        asks = {"role": "assistant", "content": None, "tool_calls": [call]}
        store.add_messages("tools", [asks, result])
        store.add_message(f"talk{number}", "user", "Please find the invoice of last week for me.")
    store.add_message("tools", "user", "No, another invoice.")
    found = catalog.search_sessions("invoice", SessionFilter(), size=2)
    groups = {one.entry.key: one for one in found.sessions}
    assert set(groups) == {"tools", "talk0", "talk1", "talk2"}
    assert (found.count, found.session_count, found.exact) == (10, 4, True)
    assert [hit.role for hit in groups["tools"].hits] == ["user", "tool"]
    assert (groups["tools"].count, groups["talk0"].count) == (7, 1)
    roles = [hit.role for hit in catalog.search("invoice").hits]
    assert roles[:4] == ["user"] * 4
    pages = catalog.search_sessions("invoice", SessionFilter(), limit=3)
    rest = catalog.search_sessions("invoice", SessionFilter(), limit=3, after=pages.after or 0)
    keys = [one.entry.key for one in (*pages.sessions, *rest.sessions)]
    assert (len(keys), set(keys), rest.after) == (4, set(groups), None)
    only = catalog.search_sessions("invoice", SessionFilter(prefix="talk"))
    assert {one.entry.key for one in only.sessions} == {"talk0", "talk1", "talk2"}


def test_absurd_token_counts_do_not_break_the_catalog(store: Store, catalog: Catalog) -> None:
    most = 10**15
    store.add_messages("k", [_answer(prompt=most, answer=most) for _ in range(12)])
    for _ in range(3):
        store.add_messages("k", [_answer(prompt=most, answer=most) for _ in range(4_000)])
        entry = _entry(catalog, "k")
        assert (entry.problem, entry.input_tokens >= 12 * most) == (None, True)
    store.add_messages("ok", [_answer("x" * 5_000)])
    store.set_meta("ok", transcript={"program": 7, "folders": "/x"}, cwd=["/y"])
    entry = _entry(catalog, "ok")
    assert (entry.program, entry.project, len(entry.model)) == ("", "", 500)
    assert catalog.overview(SessionFilter()).count == 2
    assert _keys(catalog, sort="tokens") == ["k", "ok"]


def test_answers_without_a_price_are_priced_again_by_a_newer_price_list(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_messages("k", [_answer(), _answer("no-such-model")])
    store.add_messages("all", [_answer()])
    monkeypatch.setattr("stenolog.catalog.index.price_list_version", lambda: 0)
    monkeypatch.setattr("stenolog.catalog.answer_prices.load_prices", lambda: None)
    with open_catalog(store) as before:
        assert _entry(before, "k").cost is None
    monkeypatch.setattr("stenolog.catalog.answer_prices.load_prices", load_prices)
    monkeypatch.setattr("stenolog.catalog.index.price_list_version", lambda: 7)
    with open_catalog(store) as after:
        assert _entry(after, "k").cost == pytest.approx(_stats_cost(store, "k"), abs=1e-8)
        assert (_entry(after, "k").unpriced, _entry(after, "k").input_tokens) == (1, 2_000)
        assert _entry(after, "all").cost == pytest.approx(_stats_cost(store, "all"), abs=1e-8)


def test_new_messages_alone_are_read_when_a_session_grows(
    store: Store, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_messages("k", [_answer("no-such-model") for _ in range(50)])
    catalog.refresh()
    store.add_messages("k", [_answer()])
    read: list[int] = []
    history = type(store).get_history

    def counted(self: Store, key: str, **how: Any) -> Any:
        found = history(self, key, **how)
        read.append(len(found) if how.get("full") else 0)
        return found

    monkeypatch.setattr(type(store), "get_history", counted)
    assert _entry(catalog, "k").input_tokens == 51_000
    assert sum(read) == 1
