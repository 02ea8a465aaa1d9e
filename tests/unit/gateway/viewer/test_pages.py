"""The pages over HTTP: who gets them, with which headers, and what goes wrong."""

import hashlib
import json
import re
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from html.parser import HTMLParser
from itertools import count
from pathlib import Path
from urllib.parse import quote

import httpx2
import pytest

from stenolog.catalog import Catalog
from stenolog.catalog.entries import Entry
from stenolog.errors import DamagedStore
from stenolog.gateway.viewer import conversation_page
from stenolog.gateway.viewer.pages import CONTENT_SECURITY_POLICY
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from stenolog.transfer.transcripts.programs import PROGRAMS
from stenolog.transfer.transcripts.transcript_import import import_transcript
from support.gateway.served_gateway import Served
from support.transcripts import SAMPLES

_CLAUDE = "20c7a18b-7d9d-457e-bc34-7dfb461f0515"
_KEY = "a/b?c#d%2F"
_HOSTILE = "\"'><script>hurt()</script>"
_SECRET = "sk-ant-" + "a1B2" * 12
_PATH = "/s/a%2Fb%3Fc%23d%252F"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    where = tmp_path_factory.mktemp("sessions")
    with open_store(str(where)) as store:
        store.add_message(_KEY, "user", "Hello.")
        store.add_message(_KEY, "assistant", "Half \ud800 a character.")
        for key in ("cleared", "summarized", "replaced"):
            store.add_message(key, "user", f"A heron was {key}.")
        store.clear("cleared")
        store.add_message("secret", "user", f"It is {_SECRET}, keep it.")
        usage = {"prompt": 5, "answer": 6, "cached": 0}
        store.add_message("drawn", "user", _HOSTILE)
        store.add_full_message(
            "drawn", {"role": "assistant", "content": "x", "stenolog": {"usage": usage}}
        )
        store.checkpoint("summarized", summary="so", upto=1)
        store.set_history("replaced", [{"role": "user", "content": "An owl."}])
    with Served(where, ScriptedModel(["x"])) as gateway:
        yield gateway


def test_page_without_a_cookie_shows_only_the_sign_in_command(served: Served) -> None:
    for path in ("/", _PATH, "/notes", "/static/viewer.css", "/nothing"):
        found = httpx2.get(served.url + path, headers={"Accept": "text/html,*/*"})
        assert found.status_code == 401
        assert found.headers["content-type"] == "text/html; charset=utf-8"
        assert "steno open" in found.text
        assert "Hello" not in found.text
        assert "default-src 'none'" in found.headers["content-security-policy"]
        assert found.headers["www-authenticate"] == "Bearer"


def _own(served: Served) -> str:
    """Return the host and port at which browsers log in."""
    return served.browser_url.removeprefix("http://")


@contextmanager
def _browser(served: Served) -> Iterator[httpx2.Client]:
    """A browser that came in by a link."""
    with served.client() as client:
        link = client.post("/v1/login-links").json()["url"]
    # After an error that nobody expects the server ends the connection.
    headers = {
        "Accept": "text/html,*/*;q=0.8",
        "Connection": "close",
        "Host": _own(served),
    }
    with httpx2.Client(base_url=served.url, headers=headers) as made:
        made.get(link)
        yield made


def test_sign_in_page_allows_only_its_embedded_style_and_script(served: Served) -> None:
    found = httpx2.get(served.url, headers={"Accept": "text/html"})
    style = found.text.partition("<style>")[2].partition("</style>")[0]
    assert ".failure" in style
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = found.headers["content-security-policy"]
    assert f"style-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    # Its own script only, which copies the command.
    script = found.text.partition("<script>")[2].partition("</script>")[0]
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert found.text.count("<script") == 1
    looked = httpx2.head(served.url, headers={"Accept": "text/html"})
    assert (looked.status_code, looked.content) == (401, b"")


def test_used_login_link_shows_a_page_with_the_next_step(served: Served) -> None:
    headers = {"Accept": "text/html", "Host": _own(served)}
    found = httpx2.get(f"{served.url}/login?code=old", headers=headers)
    assert found.status_code == 403
    assert "This link is no longer valid" in found.text
    port = served.url.rpartition(":")[2]
    assert f"<pre>steno open --port {port}</pre>" in found.text
    assert f"<code>ssh -L {port}:127.0.0.1:{port} HOST</code>" in found.text
    assert "steno=" not in found.headers.get("set-cookie", "")


def test_browsers_get_errors_as_pages(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("<b>secret</b>")

    def damaged(*_: object) -> str:
        raise DamagedStore("the log of <i>s</i> is damaged")

    with _browser(served) as browser:
        nowhere = browser.get("/no/such/page<b>")
        assert (nowhere.status_code, "<h1>Not found</h1>" in nowhere.text) == (
            404,
            True,
        )
        gone = browser.get("/s/no%3Cb%3Ebody").text
        assert "<h1>Not found</h1>" in gone
        assert "&#39;no&lt;b&gt;body&#39;: there is no such session" in gone
        for failing, told in ((broken, "Internal error"), (damaged, "&lt;i&gt;s&lt;/i&gt; is dam")):
            monkeypatch.setattr("stenolog.gateway.viewer.conversation_page.damage_html", failing)
            found = browser.get(_PATH)
            assert found.status_code == 500
            assert found.headers["content-type"] == "text/html; charset=utf-8"
            assert told in found.text
            assert "steno doctor" in found.text
            assert "secret" not in found.text
            program = browser.get(_PATH, headers={"Accept": "application/json"})
            assert program.status_code == 500
            assert program.json()["error"]["message"]


def test_programs_get_errors_as_json(served: Served) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong", "Accept": "text/html"}):
        found = httpx2.get(served.url + "/v1/sessions", headers=headers)
        assert found.status_code == 401
        assert found.json()["error"]["code"] == "invalid_api_key"


def test_session_with_any_key_has_pages(served: Served) -> None:
    with served.client() as client:
        assert _PATH in client.get("/").text
        for rest in (
            "",
            "?full=true",
            "?at=1",
            "?only=failed",
            "/fragment",
            "/fragment?tools=false&thinking=false",
            "/outline",
            "/turns",
            "/turns?page=9",
            "/context",
        ):
            found = client.get(_PATH + rest)
            assert found.status_code == 200, rest
            assert found.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
            assert found.headers["cache-control"] == "no-store"
        lines = client.get(f"{_PATH}/export.jsonl")
        assert lines.headers["content-disposition"] == 'attachment; filename="a-b-c-d-2F.jsonl"'
        assert len(lines.text.splitlines()) == 2
        for suffix, kind in (("md", "text/markdown"), ("html", "text/html")):
            document = client.get(f"{_PATH}/export.{suffix}")
            assert document.headers["content-type"].startswith(kind)
            assert document.headers["content-disposition"].startswith("attachment;")
        assert client.get(f"{_PATH}/export.pdf").status_code == 404


def test_hidden_search_result_says_hidden_as_the_terminal_does(served: Served) -> None:
    with served.client() as client:
        found = client.get("/?q=heron").text
    labels = re.findall(r"message \d+ · ([^·]+) · <time", found)
    assert sorted(labels) == ["hidden"] * 3


def test_every_field_is_escaped(served: Served) -> None:
    with served.client() as client:
        path = f"/v1{_PATH.replace('/s/', '/sessions/')}"
        client.patch(path, json={"title": _HOSTILE, "tags": [_HOSTILE]})
        for page in (
            "/",
            "/?q=" + quote(_HOSTILE),
            _PATH,
            f"{_PATH}/turns",
            "/notes?q=" + _HOSTILE,
        ):
            text = client.get(page).text
            assert _HOSTILE not in text, page
            assert "<script>h" not in text, page
        client.patch(path, json={"title": None, "tags": []})


class _Drawn(HTMLParser):
    """Finds what the drawing of the turns is given."""

    turns = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del tag
        found = dict(attrs)
        if found.get("id") == "chart":
            self.turns = found["data-turns"] or ""


def test_prompt_cannot_leave_the_data_of_the_chart(served: Served) -> None:
    with served.client() as client:
        drawn = _Drawn()
        drawn.feed(client.get("/s/drawn/turns").text)
    [turn] = json.loads(drawn.turns)
    assert turn["label"].endswith(f" — {_HOSTILE}")
    assert (turn["input_tokens"], turn["output_tokens"]) == (5, 6)


def test_every_page_has_the_content_security_policy(served: Served) -> None:
    with served.client() as client:
        for path in ("/", _PATH, "/notes", f"{_PATH}/fragment", "/s/nobody"):
            found = client.get(path)
            policy = found.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert " style=" not in found.text
            assert "<script>" not in found.text
        assert client.get("/static/viewer.js").headers["content-type"].startswith("text/javascript")
        for name in ("uPlot.iife.min.js", "turns.js"):
            found = client.get(f"/static/{name}")
            assert (found.status_code, len(found.content) > 1_000) == (200, True), name
            assert found.headers["content-type"].startswith("text/javascript"), name
        assert client.get("/static/uPlot.min.css").headers["content-type"].startswith("text/css")
        for name in ("..%2Fserving.py", "%2E%2E%2Fserving.py", "nothing.js", "serving.py"):
            assert client.get(f"/static/{name}").status_code == 404, name


def test_errors_of_pages_are_pages(served: Served) -> None:
    with _browser(served) as browser:
        for path, status in {
            "/s/nobody": 404,
            "/s/%": 400,
            "/?after=nonsense": 400,
            "/?agent=nobody": 404,
            f"{_PATH}?at=-1": 400,
            "/s/nobody/context": 404,
            "/s/nobody/fragment": 404,
            "/s/nobody/outline": 404,
            "/s/nobody/find?q=x": 404,
            "/s/nobody/turns": 404,
            "/s/nobody/export.jsonl": 404,
        }.items():
            found = browser.get(path)
            assert found.status_code == status, path
            assert found.headers["content-type"] == "text/html; charset=utf-8"
            assert "default-src 'none'" in found.headers["content-security-policy"]


@pytest.mark.slow
def test_page_does_not_wait_for_a_catalog_that_is_being_built(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = threading.Event()
    whole = Catalog.entry

    def slow(catalog: Catalog, key: str) -> Entry | None:
        made.wait(20)
        return whole(catalog, key)

    with served.client() as client:
        assert 'id="state"' in client.get(_PATH).text
        monkeypatch.setattr(Catalog, "entry", slow)
        try:
            for rest in ("", "/turns", "/context", "/fragment?after=0"):
                found = client.get(_PATH + rest)
                assert (found.status_code, 'id="state"' in found.text) == (200, False), rest
            assert "Hello." in client.get(_PATH).text
        finally:
            made.set()


def test_page_has_the_title_and_state_of_its_catalog_entry(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        store.add_message("telegram:1", "user", "Where is the owl?")
    with Served(tmp_path, ScriptedModel(["x"])) as served, served.client() as client:
        client.get("/")  # which waits for the index
        text = client.get("/s/telegram%3A1").text
    assert '<h1 id="title">Where is the owl?</h1>' in text
    assert 'id="state"' in text


@pytest.mark.parametrize(
    ("program", "fork", "source", "last_copied"),
    [
        ("claude-code", "9e1eb1be-32e7-4220-a0bf-a63df7f38f75", f"claude-code:{_CLAUDE}", 28),
        (
            "codex",
            "01a1e437-98be-7321-aa57-4921f92b0243",
            "codex:01a1e437-7030-7230-8002-8dfe870f6794",
            16,
        ),
    ],
)
def test_imported_fork_leads_to_the_message_that_it_continues(
    tmp_path: Path, program: str, fork: str, source: str, last_copied: int
) -> None:
    with open_store(str(tmp_path)) as store:
        reader = PROGRAMS[program]()
        folder = "projects" if program == "claude-code" else "sessions"
        for file in reader.find(SAMPLES / program / folder):
            import_transcript(reader, file, store)
        assert store.info(f"{program}:{fork}").count > 2
    with Served(tmp_path, ScriptedModel(["x"])) as served, served.client() as client:
        page = client.get(f"/s/{program}%3A{fork}").text
        assert f"forked from {source} at message {last_copied}</a>" in page
        [link] = re.findall(r'href="(/s/[^"]*)"[^>]*>forked from', page)
        assert f'id="m{last_copied}"' in client.get(unescape(link)).text
        # Without its source, the number is unknown.
        assert client.delete(f"/v1/sessions/{quote(source)}").status_code == 200
        assert f"forked from {source}</a>" in client.get(f"/s/{program}%3A{fork}").text


def test_export_contains_hidden_messages_only_on_request(served: Served) -> None:
    with served.client() as client:
        for suffix in ("md", "html", "jsonl"):
            path = f"/s/replaced/export.{suffix}"
            for asked, is_there in (("", False), ("?full=true", True)):
                text = client.get(path + asked).text
                assert ("An owl." in text, "A heron was" in text) == (True, is_there), suffix


def test_page_to_share_has_summarized_messages_unless_they_are_left_out(served: Served) -> None:
    with served.client() as client:
        for asked, is_there in (("", True), ("?full=true", True), ("?full=false", False)):
            text = client.get(f"/s/summarized/export.html{asked}").text
            assert ("A heron was summarized." in text) is is_there
        assert "A heron was" not in client.get("/s/summarized/export.md").text


def test_documents_are_redacted_and_jsonl_is_exported_as_stored(served: Served) -> None:
    with served.client() as client:
        for suffix, is_there in (("md", False), ("html", False), ("jsonl", True)):
            assert (_SECRET in client.get(f"/s/secret/export.{suffix}").text) is is_there


@pytest.mark.parametrize("where", ["{}/s", "sqlite:{}/s.db"])
def test_page_of_a_damaged_session_shows_a_notice(tmp_path: Path, where: str) -> None:
    place = where.format(tmp_path)
    with open_store(place) as store:
        for number in range(1, 4):
            store.add_message("hurt", "user", f"word{number}")
        store.add_message("whole", "user", "Hello.")
    for path in [one for one in tmp_path.rglob("*") if one.is_file()]:
        path.write_bytes(path.read_bytes().replace(b"word2", b"#ord2"))
    with Served(place, ScriptedModel(["x"])) as served, served.client() as client:
        whole, hurt = client.get("/s/whole").text, client.get("/s/hurt").text
        more = client.get("/s/hurt/fragment?after=0").text
    command = f"<code>steno doctor {place}</code>"
    told = f"1 message is damaged and cannot be read. For details, run {command}"
    assert 'id="damage" class="damage" role="alert" hidden>' in whole
    assert f'id="damage" class="damage" role="alert">{told}</p>' in hurt
    assert 'at=2#lost2"' in hurt
    assert 'id="lost2"' in hurt
    for text in (hurt, more):
        marker = text.index("Message 2 is damaged and cannot be read")
        assert text.index('id="m1"') < marker < text.index('id="m3"')


def test_search_in_a_session_stops_at_its_time_limit(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served.client() as client:
        whole = client.get("/s/drawn/find", params={"q": "x"}).json()
        assert whole["complete"]
        # A clock on which each message takes four seconds.
        ticks = count(0.0, 4.0)
        monkeypatch.setattr(conversation_page, "monotonic", lambda: next(ticks))
        found = client.get("/s/drawn/find", params={"q": "x"}).json()
        assert not found["complete"]


def test_fork_whose_source_cannot_be_read_has_a_page(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        store.add_message("gone", "user", "Hello.")
        for key, source in (("broken", "gone"), ("long", "💬" * 400)):
            store.add_message(key, "user", f"The fork {key}.")
            store.set_meta(key, transcript={"forked_from": source, "forked_after": "id"})
    [log] = (tmp_path / "sessions").glob("gone*.jsonl")
    log.unlink()
    log.mkdir()  # reading it fails
    with Served(tmp_path, ScriptedModel(["x"])) as served, served.client() as client:
        for key in ("broken", "long"):
            page = client.get(f"/s/{key}")
            assert (page.status_code, f"The fork {key}." in page.text) == (200, True), page.text


def _page(served: Served, address: str) -> str:
    with served.client() as client:
        return client.get(address).text


def test_session_of_another_program_shows_hidden_messages_in_their_places(tmp_path: Path) -> None:
    with open_store(str(tmp_path)) as store:
        reader = PROGRAMS["claude-code"]()
        for file in reader.find(SAMPLES / "claude-code" / "projects"):
            import_transcript(reader, file, store)
    with Served(tmp_path, ScriptedModel(["x"])) as served:
        address = f"/s/claude-code%3A{_CLAUDE}"
        page = _page(served, address)
        assert page.count('<article class="message') == 21
        assert page.count('<article class="message user"') == 3
        assert page.count('class="divider"') == 0
        assert ">Model's view</button>" in page
        model_view = _page(served, f"{address}?full=false")
        assert model_view.count('<article class="message') == 7
        assert 'data-filter="full=false"' in model_view


def test_read_only_page_shows_hidden_messages_and_another_page_only_on_request(
    served: Served, tmp_path: Path
) -> None:
    with open_store(str(tmp_path)) as store:
        store.add_message("summarized", "user", "A heron was summarized.")
        store.checkpoint("summarized", summary="so", upto=1)
    assert 'id="m1"' not in _page(served, "/s/summarized")
    with Served(tmp_path, ScriptedModel(["x"]), read_only=True) as read_only:
        page = _page(read_only, "/s/summarized")
    assert 'id="m1"' in page
    assert "data-show-hidden" not in page


def test_tool_without_a_result_is_running_only_in_a_running_session(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    with open_store(str(tmp_path)) as store:
        for text in ("First.", "Second."):
            store.add_message("s", "user", text)
            body = {"role": "assistant", "content": None, "tool_calls": [call]}
            store.add_full_message("s", body)

        def states(served: Served) -> list[str]:
            return re.findall(r"· (no result|running)", _page(served, "/s/s"))

        with Served(tmp_path, ScriptedModel([]), read_only=True) as served:
            assert states(served) == ["no result", "no result"]
            with store.lease("s", ttl=600):
                assert states(served) == ["no result", "running"]
