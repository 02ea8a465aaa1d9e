"""The sessions API, asked as a client asks it: over the whole application, on real stores."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import pytest
from httpx2 import Response

from stenolog.errors import ModelRefused, ModelUnavailable
from stenolog.providers.chat_model import Delta
from stenolog.testing.scripted_model import ScriptedModel
from support import temporary_folders
from support.gateway.sessions_api import KEY, Api, segment, serving

ODD_KEYS: Final = (
    "a/b",
    "a/messages",
    "..",
    ".",
    "../../etc/passwd",
    "%2F",
    "%",
    "ü",
    "a b",
    " ",
    "+",
    "a?b#c",
    "\0",
    "x" * 1024,
    "ü" * 512,
)


class Endless:
    """A model that says a word and never comes to an end."""

    name = "endless"

    def __init__(self) -> None:
        self.began = threading.Event()

    async def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """One word, and then nothing."""
        del messages, tools, schema, max_tokens
        yield Delta(text="Well")
        self.began.set()
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def api() -> Iterator[Api]:
    with temporary_folders.folder() as folder, serving(folder) as found:
        yield found


# --- keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ODD_KEYS, ids=lambda key: repr(key)[:24])
def test_key_may_contain_any_text(api: Api, key: str) -> None:
    told = api("POST", "/messages", key=key, json={"content": "Hello"})
    assert (told["session"], told["outcome"], told["seq"]) == (key, "answered", 2)
    assert api.store.list_sessions() == [key]
    assert api("GET", "", key=key)["key"] == key
    assert len(api("GET", "/messages", key=key)["messages"]) == 2
    assert api("POST", "/fork", key=key, json={"new_key": "b:1"}, status=201)["forked_from"] == key
    deleted = api("DELETE", "", key=key)
    assert (deleted["key"], deleted["count"]) == (key, 2)
    assert api.store.list_sessions() == ["b:1"]
    api("POST", "/restore", key=key, json={"uid": deleted["uid"]})
    assert sorted(api.store.list_sessions()) == sorted(["b:1", key])


def test_path_without_a_key_is_not_found(api: Api) -> None:
    for path in ("/v1/sessions/", "/v1/sessions//messages", "/v1/sessions//", "/v1/sessions/a/b"):
        assert api.error("GET", path, status=404)[0] == "not_found"
    api.store.add_message("a", "user", "Hello")
    assert api.error("GET", "/v1/sessions/a/", status=404)[0] == "not_found"
    assert api.error("GET", "/v1/%73essions", status=404)[0] == "not_found"


@pytest.mark.parametrize(
    ("segment", "words"),
    [
        ("%FF", "encoded UTF-8"),
        ("%C3", "encoded UTF-8"),
        ("%", "hex"),
        ("a%zz", "hex"),
        ("%ED%A0%80", "8"),
    ],
)
def test_invalid_key_segment_is_rejected(api: Api, segment: str, words: str) -> None:
    code, message = api.error("GET", f"/v1/sessions/{segment}", status=400)
    assert code == "usage_error"
    assert words in message


def test_too_long_key_is_rejected(api: Api) -> None:
    assert api.error("GET", "", key="x" * 1025, status=400)[0] == "usage_error"
    assert api.error("POST", "/messages", key="ü" * 513, status=400, json={"content": "a"})[0] == (
        "usage_error"
    )
    assert api.store.list_sessions() == []


# --- reading ---------------------------------------------------------------------------------


def test_list_can_be_paged_to_its_end(api: Api) -> None:
    for number in range(120):
        api.store.add_message(f"chat:{number:03}", "user", f"Question {number}")
    seen: list[str] = []
    after: str | None = None
    pages = 0
    while True:
        page = api("GET", "/v1/sessions", params={} if after is None else {"after": after})
        seen += [entry["key"] for entry in page["entries"]]
        pages += 1
        after = page["after"]
        if after is None:
            break
    assert pages == 3
    assert seen == [f"chat:{number:03}" for number in reversed(range(120))]


def test_the_list_has_all_fields_and_filters(api: Api) -> None:
    api("POST", "/messages", key="cli:ann", json={"content": "Where is the key?"})
    api.store.add_message("web:bob", "user", "Hello")
    api("PATCH", "", key="web:bob", json={"tags": ["new"]})
    [entry] = api("GET", "/v1/sessions", params={"channel": "cli"})["entries"]
    assert set(entry) == {
        *("key", "uid", "title", "prompt", "state", "visible", "count", "tokens", "created"),
        *("updated", "tags", "agent", "channel", "lost", "damaged", "problem", "sender"),
        *("last_message", "program", "project", "model", "input_tokens", "output_tokens", "cost"),
        *("unpriced", "failed", "forked_from", "forked_at"),
    }
    assert (entry["title"], entry["state"], entry["count"]) == ("Where is the key?", "idle", 2)

    def keys(**wanted: str) -> list[str]:
        return [one["key"] for one in api("GET", "/v1/sessions", params=wanted)["entries"]]

    assert keys(prefix="web:") == keys(tag="new") == keys(state="interrupted") == ["web:bob"]
    assert keys(tag="null") == keys(prefix="zz") == keys(state="running") == []


def test_messages_can_be_paged_to_their_end(api: Api) -> None:
    said = [{"role": "user", "content": f"Line {number}"} for number in range(2_500)]
    api.store.add_messages(KEY, said)
    seen: list[Any] = []
    sizes: list[int] = []
    after = 0
    while True:
        page = api("GET", "/messages", key=KEY, params={"after": after, "limit": 1_000})
        seen += page["messages"]
        sizes.append(len(page["messages"]))
        if page["after"] is None:
            break
        after = page["after"]
    assert sizes == [1_000, 1_000, 500]
    assert [one["message"] for one in seen] == said
    assert [one["seq"] for one in seen] == list(range(1, 2_501))

    newest = api("GET", "/messages", key=KEY, params={"last": 150})
    assert (len(newest["messages"]), newest["after"]) == (100, 2_450)
    rest = api("GET", "/messages", key=KEY, params={"last": 150, "after": 2_450})
    assert ([one["seq"] for one in rest["messages"]], rest["after"]) == (
        list(range(2_451, 2_501)),
        None,
    )


def test_page_of_long_messages_is_limited_in_size(api: Api) -> None:
    for _ in range(3):
        api.store.add_message(KEY, "user", "x" * 5_000_000)
    first = api("GET", "/messages", key=KEY)
    assert ([one["seq"] for one in first["messages"]], first["after"]) == ([1, 2], 2)
    second = api("GET", "/messages", key=KEY, params={"after": 2})
    assert ([one["seq"] for one in second["messages"]], second["after"]) == ([3], None)


def test_hidden_messages_are_returned_on_request(api: Api) -> None:
    api.store.add_message(KEY, "user", "first")
    api.store.add_message(KEY, "user", "second")
    api.store.truncate_history(KEY, 1)
    [shown] = api("GET", "/messages", key=KEY)["messages"]
    assert (shown["seq"], shown["hidden"]) == (2, False)
    every = api("GET", "/messages", key=KEY, params={"full": "true"})["messages"]
    assert [(one["seq"], one["hidden"]) for one in every] == [(1, True), (2, False)]


def test_lone_surrogates_and_huge_numbers_are_returned_unchanged(api: Api) -> None:
    said = {"role": "user", "content": "half a \ud83d pair", "number": int("9" * 400)}
    api.store.add_full_message(KEY, said)
    api.store.set_summary(KEY, "so far \udc00")
    api.store.set_meta(KEY, title="\ud800", huge=int("7" * 400))
    [shown] = api("GET", "/messages", key=KEY)["messages"]
    assert shown["message"] == said
    session = api("GET", "", key=KEY)
    assert (session["title"], session["summary"]) == ("?", "so far \udc00")
    assert session["meta"] == {"title": "\ud800", "huge": int("7" * 400)}


def test_search_results_can_be_paged(api: Api) -> None:
    for number in range(5):
        api.store.add_message(f"a:{number}", "user", f"the red boat {number}")
    api.store.add_message("b:1", "assistant", "a red car")
    found = api("GET", "/v1/search", params={"q": "red boat", "limit": 3, "newest": "1"})
    assert [hit["key"] for hit in found["hits"]] == ["a:4", "a:3", "a:2"]
    assert not found["exact"]
    more = api(
        "GET",
        "/v1/search",
        params={"q": "red boat", "limit": 3, "newest": "1", "after": found["after"]},
    )
    assert ([hit["key"] for hit in more["hits"]], more["after"]) == (["a:1", "a:0"], None)
    where = {"q": "red", "role": "assistant", "since": "2020-01-01T00:00:00Z"}
    assert api("GET", "/v1/search", params=where)["count"] == 1
    assert api("GET", "/v1/search", params={**where, "until": "2020-01-02T00:00:00Z"})["hits"] == []
    assert "q" in api.error("GET", "/v1/search", status=400)[1]
    _, words = api.error(
        "GET", "/v1/search", params={"q": "x", "since": "2020-01-01T00:00:00"}, status=400
    )
    assert "timezone" in words


# --- talking ---------------------------------------------------------------------------------


def test_content_parts_are_stored_unchanged(api: Api) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "x", "number": int("9" * 30)}]
    api("POST", "/messages", key=KEY, json={"content": parts})
    [first, _] = api("GET", "/messages", key=KEY)["messages"]
    mark: dict[str, object] = {"received": {}}
    assert first["message"] == {"role": "user", "content": parts, "stenolog": mark}


def test_command_returns_the_session_to_continue_in(api: Api) -> None:
    api("POST", "/messages", key=KEY, json={"content": "Hello"})
    told = api("POST", "/messages", key=KEY, json={"content": "/fork side"})
    assert (told["outcome"], told["session"]) == ("command", "cli:side:default")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"content": ""},
        {"content": []},
        {"content": 1},
        {"content": [1]},
        {"content": "a", "id": 3},
        {"content": "a", "id": "x" * 300},
        {"content": "a", "id": "ü" * 200},
        {"content": "a", "titel": "b"},
    ],
    ids=str,
)
def test_invalid_message_is_rejected_and_not_stored(api: Api, body: dict[str, Any]) -> None:
    assert api.error("POST", "/messages", key=KEY, json=body, status=400)[0] == "usage_error"
    assert api.store.list_sessions() == []


def test_failed_model_is_reported_without_secrets_and_the_message_is_kept() -> None:
    error = ModelUnavailable("http://me:hunter22@models.test/v1 refuses sk-very-secret")
    said = {"content": "Hello", "id": "1"}
    with (
        temporary_folders.folder() as folder,
        serving(folder, ScriptedModel([error, "At last."])) as api,
    ):
        code, words = api.error("POST", "/messages", key=KEY, json=said, status=503)
        assert code == "service_unavailable"
        assert "models.test" in words
        assert "the message is stored" in words
        assert "hunter22" not in words
        assert "very-secret" not in words
        assert api.store.info(KEY).count == 1
        assert api("POST", "/messages", key=KEY, json=said)["answer"] == "At last."
        assert api.store.info(KEY).count == 2


def test_rejection_by_the_model_is_a_bad_gateway() -> None:
    with (
        temporary_folders.folder() as folder,
        serving(folder, ScriptedModel([ModelRefused("no such model")])) as api,
    ):
        code, words = api.error("POST", "/messages", key=KEY, json={"content": "a"}, status=502)
        assert code == "bad_gateway"
        assert words.startswith("no such model")


@contextmanager
def talking(api: Api, model: Endless) -> Iterator[Callable[[], Response]]:
    """While an answer is being made that does not end by itself; what is answered then."""
    with ThreadPoolExecutor(1) as pool:
        where = f"/v1/sessions/{segment(KEY)}/messages"
        saying = pool.submit(api.client.post, where, json={"content": "Hello"})
        assert model.began.wait(30)
        try:
            yield lambda: saying.result(30)
        finally:
            # Stop directly: if the API fails, a stop request would fail, too.
            assert api.client.portal is not None
            api.client.portal.call(api.gateway.loop.stop, KEY)


def test_changes_are_rejected_during_an_answer() -> None:
    model = Endless()
    with temporary_folders.folder() as folder, serving(folder, model) as api:
        with talking(api, model) as ended:
            for method, path, body in (
                ("DELETE", "", None),
                ("POST", "/compact", None),
                ("POST", "/fork", {"new_key": "other"}),
            ):
                code, words = api.error(method, path, key=KEY, json=body, status=409)
                assert code == "busy"
                assert "stop" in words
            assert api("GET", "", key=KEY)["state"] == "running"
            [entry] = api("GET", "/v1/sessions", params={"state": "running"})["entries"]
            assert entry["key"] == KEY
            assert api("PATCH", "", key=KEY, json={"title": "Now"})["title"] == "Now"
            assert api("POST", "/stop", key=KEY) == {"stopped": True}
            assert ended().json()["outcome"] == "interrupted"
        assert api("POST", "/stop", key=KEY) == {"stopped": False}
        assert api.store.list_sessions() == [KEY]
        assert api("DELETE", "", key=KEY)["key"] == KEY


def test_stop_works_while_the_concurrency_limit_is_reached() -> None:
    model = Endless()
    with temporary_folders.folder() as folder, serving(folder, model, max_turns=1) as api:
        with talking(api, model) as ended:
            response = api.client.get("/v1/sessions")
            assert response.status_code == 429
            assert response.json()["error"]["type"] == "rate_limit_error"
            assert response.headers["retry-after"]
            assert api("POST", "/stop", key=KEY) == {"stopped": True}
            ended()
        assert [one["key"] for one in api("GET", "/v1/sessions")["entries"]] == [KEY]


# --- changing --------------------------------------------------------------------------------


def test_patch_changes_only_title_and_tags(api: Api) -> None:
    api.store.add_message(KEY, "user", "Hello")
    api.store.set_meta(KEY, chat_model="small", nested={"a": [1]}, tags=["old"])
    found = api("PATCH", "", key=KEY, json={"title": "A talk"})
    assert (found["title"], found["tags"]) == ("A talk", ["old"])
    found = api("PATCH", "", key=KEY, json={"tags": ["x", "y", "x"]})
    assert (found["title"], found["tags"]) == ("A talk", ["x", "y"])
    assert api.store.info(KEY).meta == {
        "chat_model": "small",
        "nested": {"a": [1]},
        "tags": ["x", "y"],
        "title": "A talk",
    }
    assert api("PATCH", "", key=KEY, json={})["title"] == "A talk"
    found = api("PATCH", "", key=KEY, json={"title": None, "tags": []})
    assert (found["title"], found["tags"]) == ("Hello", [])
    assert api.store.info(KEY).meta == {"chat_model": "small", "nested": {"a": [1]}}


def test_list_and_session_have_the_same_title(api: Api) -> None:
    api.store.add_message(KEY, "user", "Where is the key?")
    api.store.set_meta("empty", agent="main")
    for title in (None, "  Two\n words "):
        api("PATCH", "", key=KEY, json={"title": title})
        listed = {one["key"]: one["title"] for one in api("GET", "/v1/sessions")["entries"]}
        assert listed == {key: api("GET", "", key=key)["title"] for key in (KEY, "empty")}
        assert listed == {KEY: "Two words" if title else "Where is the key?", "empty": ""}


def test_requests_for_an_unknown_session_do_not_create_it(api: Api) -> None:
    for method, path, body in (
        ("GET", "", None),
        ("GET", "/messages", None),
        ("PATCH", "", {"title": "x"}),
        ("DELETE", "", None),
        ("POST", "/undo", None),
        ("POST", "/compact", None),
        ("POST", "/fork", {"new_key": "other"}),
        ("POST", "/restore", {}),
        ("POST", "/archive", None),
    ):
        code, words = api.error(method, path, key="nobody", json=body, status=404)
        assert code == "no_such_session"
        assert "nobody" in words
    assert api.store.list_sessions() == []


def test_last_deleted_session_or_the_given_uid_is_restored(api: Api) -> None:
    api.store.add_message(KEY, "user", "first life")
    first = api("DELETE", "", key=KEY)
    api.store.add_message(KEY, "user", "second life")
    second = api("DELETE", "", key=KEY)
    assert first["uid"] != second["uid"]
    assert api("POST", "/restore", key=KEY)["uid"] == second["uid"]
    body = {"uid": first["uid"]}
    assert api.error("POST", "/restore", key=KEY, json=body, status=409)[0] == "session_exists"
    found = api("POST", "/restore", key=KEY, json={**body, "as_key": "a/b"})
    assert (found["key"], found["uid"]) == ("a/b", first["uid"])


def test_the_trash_is_listed_with_the_last_deleted_first(api: Api) -> None:
    assert api("GET", "/v1/trash") == {"sessions": [], "count": 0}
    for key in ("a", "b"):
        api.store.add_message(key, "user", "Hi")
        api("DELETE", "", key=key)
    found = api("GET", "/v1/trash")
    assert [one["key"] for one in found["sessions"]] == ["b", "a"]
    assert found["count"] == 2


def test_archive_moves_summarized_messages(api: Api) -> None:
    for number in range(4):
        api.store.add_message(KEY, "user", f"{number}")
    assert api("POST", "/archive", key=KEY)["archived"] == 0
    api.store.checkpoint(KEY, summary="Numbers.", upto=3)
    assert api("POST", "/archive", key=KEY)["archived"] == 3
    assert len(api("GET", "/messages?full=true", key=KEY)["messages"]) == 4


def test_sessions_are_filtered_and_sorted(api: Api) -> None:
    usage = {"prompt": 10, "answer": 1, "cached": 0}
    for key, prompt in (("a", 10), ("b", 5_000), ("c", 20)):
        marks = {"model": "gpt-4o", "usage": {**usage, "prompt": prompt}}
        api.store.add_messages(key, [{"role": "assistant", "content": "x", "stenolog": marks}])
    api.store.set_meta("a", transcript={"program": "codex", "folders": ["/srv"]})

    def keys(query: str) -> list[str]:
        return [one["key"] for one in api("GET", f"/v1/sessions?{query}")["entries"]]

    assert keys("sort=cost") == ["b", "c", "a"]
    assert keys("") == ["a", "c", "b"]
    assert keys("program=codex&project=/srv&model=gpt-4o") == ["a"]
    assert keys("failed=true") == []
    assert keys("until=2020-01-01T00:00:00Z") == []
    assert "must be a time" in str(api("GET", "/v1/sessions?until=0.5", status=400))
    [entry] = api("GET", "/v1/sessions?prefix=b")["entries"]
    assert (entry["input_tokens"], entry["model"], entry["failed"]) == (5_000, "gpt-4o", 0)
    assert entry["cost"] > 0


def test_fork_ends_at_the_given_seq(api: Api) -> None:
    for number in range(3):
        api.store.add_message(KEY, "user", f"{number}")
    made = api("POST", "/fork", key=KEY, json={"new_key": "side", "at": 2}, status=201)
    assert (made["key"], made["forked_from"], made["count"]) == ("side", KEY, 2)
    taken = api.error("POST", "/fork", key=KEY, json={"new_key": "side"}, status=409)
    assert taken[0] == "session_exists"
    beyond = {"new_key": "far", "at": 9}
    assert api.error("POST", "/fork", key=KEY, json=beyond, status=400)[0] == "usage_error"


@pytest.mark.parametrize("store", ["jsonl", "sqlite"])
def test_undo_reverts_a_summary(store: str) -> None:
    with temporary_folders.folder() as folder, serving(folder, store=store) as api:
        for _ in range(10):
            api("POST", "/messages", key=KEY, json={"content": "word " * 200})
        before = api("GET", "/messages", key=KEY)["messages"]
        done = api("POST", "/compact", key=KEY)
        assert done["compacted"] > 0
        session = api("GET", "", key=KEY)
        assert session["visible"] == len(before) - done["compacted"]
        assert session["summary"]
        assert done["last"] == session["floor"]
        undone = api("POST", "/undo", key=KEY)
        assert (undone["op"], undone["shown"]) == ("checkpoint", done["compacted"])
        assert api("GET", "/messages", key=KEY)["messages"] == before
        assert api.error("POST", "/undo", key=KEY, status=409)[0] == "nothing_to_undo"
        assert api("DELETE", "", key=KEY)["count"] == len(before)


def test_short_session_is_not_summarized_by_compact(api: Api) -> None:
    api("POST", "/messages", key=KEY, json={"content": "Hello"})
    assert api("POST", "/compact", key=KEY)["compacted"] == 0


# --- what is wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("limit=0", "limit"),
        ("limit=501", "limit"),
        ("limit=ten", "limit"),
        ("limt=10", "limt"),
        ("limit=1&limit=2", "more than once"),
        ("state=asleep", "state"),
        ("after=nowhere", "after"),
        ("prefix=%FF", "UTF-8"),
        ("&".join(f"p{number}=1" for number in range(101)), "more than 100"),
    ],
)
def test_invalid_query_is_rejected(api: Api, query: str, words: str) -> None:
    code, message = api.error("GET", f"/v1/sessions?{query}", status=400)
    assert code == "usage_error"
    assert words in message


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"hello", "not JSON"),
        (b'{"content": "a"', "not JSON"),
        (b'["content"]', "object"),
        (b'{"content": [{"n": NaN}]}', "not JSON"),
        (b'{"content": [{"n": NaN, "s": "\\ud800"}]}', "not JSON"),
        (b'{"content": [{"n": 1e999}]}', "range"),
        (b'{"content": "\xff"}', "UTF-8"),
        (b'{"content": [{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}", "deep"),
        (b'{"content": [{"a":' + b"[" * 300 + b"]" * 300 + b"}]}", "deep"),
        (b'{"content": "\\ud800", "x": ' + b"[" * 100_000, "deep"),
        (b'{"content": [{"n": ' + b"9" * 5_000 + b"}]}", "range"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_invalid_body_is_rejected(api: Api, body: bytes, words: str) -> None:
    headers = {"Content-Type": "application/json"}
    _, message = api.error("POST", "/messages", key=KEY, content=body, headers=headers, status=400)
    assert words in message
    assert api.store.list_sessions() == []


def test_body_of_another_media_type_is_rejected(api: Api) -> None:
    body = json.dumps({"content": "Hello"}).encode()
    for given in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=x"):
        headers = {"Content-Type": given}
        code, _ = api.error("POST", "/messages", key=KEY, content=body, headers=headers, status=415)
        assert code == "unsupported_media_type"
    assert api.error("POST", "/messages", key=KEY, content=body, status=415)[0]
    twice = [("Content-Type", "application/json"), ("Content-Type", "text/plain")]
    _, words = api.error("POST", "/messages", key=KEY, content=body, headers=twice, status=400)
    assert "more than one" in words
    assert api.store.list_sessions() == []
    good = {"Content-Type": 'application/json; charset="UTF-8"'}
    api("POST", "/messages", key=KEY, content=body, headers=good)


def test_wrong_method_response_lists_the_allowed_methods(api: Api) -> None:
    response = api.client.put(f"/v1/sessions/{segment(KEY)}")
    assert response.status_code == 405
    assert {"GET", "PATCH", "DELETE"} <= set(response.headers["allow"].split(", "))
    assert response.json()["error"]["code"] == "method_not_allowed"


def test_unknown_agent_is_not_found(api: Api) -> None:
    assert api("GET", "/v1/sessions", params={"agent": "main"})["entries"] == []
    assert "'other'" in api.error("GET", "/v1/sessions?agent=other", status=404)[1]


def test_unsupported_calls_of_a_session_manager_are_reported() -> None:
    with temporary_folders.folder() as folder, serving(folder, store="legacy") as api:
        assert api("POST", "/messages", key=KEY, json={"content": "Hi"})["outcome"] == "answered"
        assert len(api("GET", "/messages", key=KEY)["messages"]) == 2
        assert api("PATCH", "", key=KEY, json={"title": "x"})["title"] == "x"
        assert api("GET", "", key=KEY)["title"] == "x"
        assert [one["key"] for one in api("GET", "/v1/sessions")["entries"]] == [KEY]
        assert len(api("GET", "/v1/search?q=Hi")["hits"]) == 1
        for method, path, body in (
            ("DELETE", "", None),
            ("POST", "/fork", {"new_key": "other"}),
            ("POST", "/restore", {}),
        ):
            words = api.error(method, path, key=KEY, json=body, status=400)[1]
            assert "SessionManager keeps sessions as plain JSON files" in words
