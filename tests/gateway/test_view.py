"""`steno view` and `steno serve --read-only` show sessions, and not a byte of them changes."""

import asyncio
import os
import pty
import re
import shutil
import signal
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from stenolog.agent.instance import AgentInstance, AgentRegistry
from stenolog.agent.loop import AgentLoop
from stenolog.agent.spec import AgentSpec
from stenolog.gateway.access_token import Token
from stenolog.gateway.daemon import Daemon, NoChannels, listen
from stenolog.gateway.shared_state import Gateway
from stenolog.settings.values import Settings
from stenolog.stores.open_store import open_store
from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.clients import wait_until
from support.transcripts import SAMPLES
from support.viewing import Viewing, state_of

SESSIONS = 500
CLAUDE = "claude-code:20c7a18b-7d9d-457e-bc34-7dfb461f0515"
CHANGES: list[tuple[str, str, Any]] = [
    ("POST", "/v1/sessions/{}/messages", {"content": "Hello."}),
    ("POST", "/v1/sessions/new/messages", {"content": "Hello."}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello."}]}),
    ("PATCH", "/v1/sessions/{}", {"title": "Another"}),
    ("DELETE", "/v1/sessions/{}", None),
    ("POST", "/v1/sessions/{}/fork", {"new_key": "other"}),
    ("POST", "/v1/sessions/{}/undo", {}),
    ("POST", "/v1/sessions/{}/compact", {}),
    ("POST", "/v1/sessions/{}/restore", {}),
    ("POST", "/v1/sessions/{}/stop", {}),
    ("PUT", "/v1/sessions/{}", {}),
]


def keys_in(client: httpx2.Client) -> list[str]:
    found: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = client.get("/v1/sessions", params={"limit": 200, **after}).json()
        found += [one["key"] for one in page["entries"]]
        if page["after"] is None:
            return found
        after = {"after": page["after"]}


def message_counts(client: httpx2.Client) -> list[int]:
    return [entry["count"] for entry in client.get("/v1/sessions").json()["entries"]]


def is_found(client: httpx2.Client, words: str) -> bool:
    return bool(client.get("/v1/search", params={"q": words}).json()["hits"])


def look_at_everything(client: httpx2.Client, keys: list[str]) -> None:
    """Open all pages, search, and try every change."""
    assert client.get("/", params={"q": "question"}).status_code == 200
    assert client.get("/v1/search", params={"q": "question"}).status_code == 200
    for number, key in enumerate(keys):
        path = f"/s/{quote(key, safe='')}"
        page = client.get(path)
        assert page.status_code == 200
        assert 'id="say"' not in page.text
        assert "data-fork-at" not in page.text
        if number < 3:
            for more in (
                "/turns",
                "/context",
                "/fragment",
                "/export.html",
                "/export.jsonl",
            ):
                assert client.get(path + more).status_code == 200, more
    for method, address, body in CHANGES:
        asked = client.request(method, address.format(quote(keys[0], safe="")), json=body)
        assert (asked.status_code, asked.json()["error"]["code"]) == (403, "read_only"), address


@pytest.fixture(params=["jsonl", "sqlite"])
def workspace(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A workspace with sessions that nobody answered, as folder and address."""
    folder = tmp_path / "place"
    folder.mkdir()
    where = str(folder) if request.param == "jsonl" else f"sqlite:{folder / 'steno.db'}"
    count = SESSIONS if request.param == "jsonl" else 50
    with open_store(where) as store:
        for number in range(count):
            store.add_message(f"cli:{number}", "user", f"question {number}")
    return folder, where


class _Channels(NoChannels):
    """Chat apps that note whether they were started."""

    started = False

    async def start(self) -> None:
        self.started = True


@pytest.mark.parametrize("read_only", [False, True])
def test_read_only_daemon_resumes_nothing(read_only: bool, tmp_path: Path) -> None:
    channels = _Channels()

    async def main() -> None:
        agent = AgentInstance.open(
            AgentSpec(sessions=str(tmp_path)), model=ScriptedModel(["an answer"])
        )
        gateway = Gateway(AgentLoop(AgentRegistry([agent])), Settings(), read_only=read_only)
        token = Token(b"t" * 43)
        daemon = Daemon(gateway, token, listen("127.0.0.1", 0), channels)
        await daemon.start()
        tasks = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
        assert ("Daemon._resume_turns" in tasks) is not read_only
        await daemon.stop(hurry=asyncio.Event())

    asyncio.run(main())
    assert channels.started is not read_only


@pytest.mark.parametrize("command", ["view", "serve"])
def test_looking_changes_no_byte_of_a_workspace(
    command: str, workspace: tuple[Path, str], tmp_path: Path
) -> None:
    folder, where = workspace
    arguments = {
        "view": ["view", "--port", "0", where],
        "serve": ["serve", "--read-only", "--port", "0", "-w", where],
    }[command]
    before = state_of(folder)
    with Viewing(tmp_path / "home", *arguments) as viewing, viewing.client() as client:
        expected = SESSIONS if "sqlite" not in where else 50
        wait_until(lambda: len(keys_in(client)) == expected)
        look_at_everything(client, keys_in(client))
        hits = client.get("/v1/search", params={"q": "question"}).json()
        assert hits["count"] == expected
        assert state_of(folder) == before
    assert state_of(folder) == before


def test_view_finds_the_programs_of_the_home_folder(tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(SAMPLES / "claude-code" / "projects", home / ".claude" / "projects")
    shutil.copytree(SAMPLES / "codex" / "sessions", home / ".codex" / "sessions")
    shutil.copytree(SAMPLES / "gemini-cli", home / ".gemini" / "tmp")
    with open_store(str(home / "workspace")) as store:
        store.add_message("cli:default", "user", "question of the workspace")
    programs = [home / ".claude", home / ".codex", home / ".gemini", home / "workspace"]
    before = [state_of(place) for place in programs]
    with Viewing(home, "view", "--port", "0") as viewing, viewing.client() as client:
        keys = keys_in(client)
        assert {key.partition(":")[0] for key in keys} == {
            "claude-code",
            "codex",
            "gemini-cli",
            "workspace/cli",
        }
        look_at_everything(client, keys)
        hits = client.get("/v1/search", params={"q": "lighthouses"}).json()["hits"]
        assert hits
        assert [state_of(place) for place in programs] == before
        assert stat.S_IMODE(viewing.cache.stat().st_mode) == 0o700
        files = list(viewing.cache.iterdir())
        assert len(files) >= 2
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert [state_of(place) for place in programs] == before


def test_imported_conversations_are_counted_once(tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(SAMPLES / "claude-code" / "projects", home / ".claude" / "projects")
    command = [sys.executable, "-m", "stenolog", "import", "claude-code"]
    subprocess.run(command, env={"HOME": str(home)}, cwd=home, check=True)
    with open_store(str(home / "workspace")) as store:
        store.add_message("cli:default", "user", "question of the workspace")
    with Viewing(home, "view", "--port", "0") as viewing, viewing.client() as client:
        wait_until(lambda: sum(message_counts(client)) >= 72)
        counts = message_counts(client)
        assert (len(counts), sum(counts)) == (7, 72)
        assert CLAUDE in keys_in(client)
        # A link to the copy still works.
        assert client.get(f"/s/{quote(f'workspace/{CLAUDE}', safe='')}").status_code == 200


def test_view_says_where_it_looked(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stenolog", "view"]
    ended = subprocess.run(
        command, env={"HOME": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "~/.claude/projects" in ended.stderr
    assert "steno view PLACE" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_messages_of_a_running_program_appear_and_its_files_are_only_its_own(
    workspace: tuple[Path, str], tmp_path: Path
) -> None:
    folder, where = workspace
    script = (
        "import sys\nfrom stenolog.stores.open_store import open_store\n"
        f"store = open_store({where!r})\n"
        "for line in sys.stdin:\n"
        "    store.add_message('cli:0', 'user', line.strip())\n"
        "    print('stored', flush=True)\n"
    )
    with (
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as program,
        Viewing(tmp_path / "home", "view", "--port", "0", where) as viewing,
        viewing.client() as client,
    ):
        assert program.stdin is not None
        assert program.stdout is not None
        for words in ("one more", "and another"):
            program.stdin.write(f"{words}\n")
            program.stdin.flush()
            assert program.stdout.readline() == "stored\n"
            before = state_of(folder)
            assert words in client.get("/s/cli%3A0").text
            wait_until(partial(is_found, client, f'"{words}"'))
            assert state_of(folder) == before
        program.stdin.close()


def test_transcript_that_grows_is_followed_and_one_that_is_gone_vanishes(tmp_path: Path) -> None:
    place = tmp_path / "projects"
    shutil.copytree(SAMPLES / "claude-code" / "projects", place)
    later = next(place.rglob("20c7a18b*.jsonl"))
    shutil.copy(next((SAMPLES / "claude-code" / "earlier").rglob("20c7a18b*.jsonl")), later)
    home = tmp_path / "home"
    with Viewing(home, "view", "--port", "0", str(place)) as viewing, viewing.client() as client:
        wait_until(lambda: CLAUDE in keys_in(client))
        address = f"/v1/sessions/{quote(CLAUDE, safe='')}"
        assert client.get(address).json()["count"] == 20
        shutil.copy(next((SAMPLES / "claude-code" / "projects").rglob("20c7a18b*.jsonl")), later)
        wait_until(lambda: client.get(address).json()["count"] == 28)
        later.unlink()
        wait_until(lambda: CLAUDE not in keys_in(client))
        assert client.get(f"/s/{quote(CLAUDE, safe='')}").status_code == 404
        hits = client.get("/v1/search", params={"q": "harbour"}).json()["hits"]
        assert CLAUDE not in {hit["key"] for hit in hits}
        [index] = viewing.cache.glob("*.db")
    shutil.rmtree(place)
    other = tmp_path / "sessions"
    shutil.copytree(SAMPLES / "codex" / "sessions", other)
    with Viewing(home, "view", "--port", "0", str(other)) as viewing:
        assert not index.exists()
        assert len(list(viewing.cache.glob("*.places"))) == 1


@pytest.mark.parametrize("command", [["view"], ["serve", "--read-only", "-w"]])
def test_index_is_in_memory_if_the_cache_folder_cannot_be_used(
    command: list[str], tmp_path: Path
) -> None:
    with open_store(str(tmp_path / "place")) as store:
        store.add_message("cli:a", "user", "question")
    home = tmp_path / "home"
    home.mkdir()
    (home / ".cache").write_text("a file in place of the folder")
    arguments = [*command, str(tmp_path / "place"), "--port", "0"]
    with Viewing(home, *arguments) as viewing, viewing.client() as client:
        wait_until(partial(is_found, client, "question"))
    assert (home / ".cache").is_file()


def test_damaged_index_is_built_again(tmp_path: Path) -> None:
    place = SAMPLES / "codex" / "sessions"
    home = tmp_path / "home"
    for _ in range(2):
        with (
            Viewing(home, "view", "--port", "0", str(place)) as viewing,
            viewing.client() as client,
        ):
            wait_until(partial(is_found, client, "lighthouses"))
            [index] = viewing.cache.glob("*.db")
        index.write_bytes(b"not a database" * 1_000)


def test_serve_prints_a_link_on_a_terminal_that_signs_in_once(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "workspace")) as store:
        store.add_message("cli:a", "user", "hello")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "stenolog", "serve", "--read-only", "--port", "0"]
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "COLUMNS": "200"}
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs
    ) as process:
        os.close(theirs)
        said = b""
        while not (found := re.search(rb"(http://(steno-\S+?):\d+)(/login\?code=\S+)\r\n", said)):
            said += os.read(ours, 10_000)
        assert process.stdout is not None
        url = process.stdout.readline().decode().removeprefix("Listening at ").strip()
        for status in (303, 403):
            answered = httpx2.get(
                url + found[3].decode(), headers={"Host": found[2].decode()}, follow_redirects=False
            )
            assert answered.status_code == status
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    os.close(ours)
