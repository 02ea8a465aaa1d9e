"""Builds the wheel and installs it as a user does: alone, and with the extra `app`.

pip uses the settings of this machine, so `make test-install` works wherever `make dev` does.
"""

import os
import pwd
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import environment
import pytest

pytestmark = pytest.mark.install

ROOT = Path(__file__).resolve().parents[2]
PAGES_WITHOUT_EXTRAS = [
    "README.md",
    *(f"docs/{name}.md" for name in ("agent", "context", "library", "memory", "sessions")),
    "docs/reference/README.md",
]
ENGINES = """\
import asyncio, inspect, pydoc
import stenolog
from stenolog.providers import OpenAIChat
from stenolog.providers.local_model import LocalModel

def use(store):
    store.add_message("a", "user", "One.")
    store.add_message("a", "assistant", "Two.", once="2")
    assert [message.content for message in store.get_history("a")] == ["One.", "Two."]
    store.truncate_history("a", keep_last=1)
    store.undo("a")

for place in ("files", "jsonl:more", "memory:"):
    with stenolog.open_store(place) as store:
        use(store)
for sessions in (stenolog.open_sessions("loop"), stenolog.SessionManager("legacy")):
    with sessions:
        sessions.add_message("a", "user", "One.")
        assert len(sessions.get_history("a")) == 1

async def append():
    async with stenolog.AsyncStore(stenolog.open_store("asyncio")) as store:
        await asyncio.gather(*(store.add_message("a", "user", str(n)) for n in range(9)))
        assert len(await store.get_history("a")) == 9

asyncio.run(append())
with stenolog.open_store("files") as store, stenolog.open_catalog(store) as catalog:
    assert [entry.key for entry in catalog.list().entries] == ["a"]
assert "OpenAIChat" in pydoc.render_doc("stenolog.providers")

for extra, call in {
    "sqlite": lambda: stenolog.open_store("sqlite:steno.db"),
    "postgres": lambda: stenolog.open_store("postgresql://host/name"),
    "app": lambda: OpenAIChat("model"),
    "local": lambda: LocalModel("model.gguf"),
}.items():
    try:
        call()
    except stenolog.UsageError as error:
        assert "pip install" in str(error) and f"[{extra}]" in str(error), error
    else:
        raise AssertionError(extra)
print("done")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of this clone."""
    folder = tmp_path_factory.mktemp("wheel")
    with _home_of_user():
        _run(folder, sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, ROOT)
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def alone(wheel: Path) -> Path:
    """Return the Python of an environment with the wheel and what the wheel requires."""
    return _install(wheel.parent / "alone", str(wheel))


@pytest.fixture(scope="module")
def app(wheel: Path) -> Path:
    """Return the Python of an environment where the command that `steno` prints was run."""
    python = _install(wheel.parent / "app", str(wheel))
    command = _missing_packages_error(python.with_name("steno")).partition("Run: pip ")[2]
    with _home_of_user():
        _run(wheel.parent, "sh", "-c", f"{python} -m pip {command}")
    return python


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty folder."""
    path = tmp_path / "empty"
    path.mkdir()
    return path


def test_wheel_installs_msgspec_and_nothing_else(alone: Path) -> None:
    listed = _run(alone.parent, alone, "-m", "pip", "list", "--format=freeze")
    packages = {line.partition("==")[0] for line in listed.split()}
    assert packages - {"pip", "setuptools", "wheel"} == {"stenolog", "msgspec"}


@pytest.mark.parametrize("page", PAGES_WITHOUT_EXTRAS)
def test_examples_run_with_msgspec_alone(alone: Path, page: str, folder: Path) -> None:
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```", (ROOT / page).read_text())
    assert blocks
    _run(folder, alone, "-W", "error", "-c", "\n".join(blocks))


def test_engines_and_asyncio_run_with_msgspec_alone(alone: Path, folder: Path) -> None:
    assert _run(folder, alone, "-W", "error", "-c", ENGINES) == "done\n"


def test_steno_without_its_extra_says_in_one_line_what_to_install(alone: Path, wheel: Path) -> None:
    for script in ("steno", "stenolog"):
        error = _missing_packages_error(alone.with_name(script))
        assert error == f"steno needs the package click. Run: pip install '{wheel}[app]'\n"


def test_app_installs_packages_that_fit_together(app: Path) -> None:
    _run(app.parent, app, "-m", "pip", "check")


def test_steno_ask_and_list_run_with_the_extra_app(app: Path, folder: Path) -> None:
    steno = app.with_name("steno")
    answer = _run(folder, steno, "ask", "--model", "scripted", "--session", "a", "hello")
    assert answer.startswith("You said: hello")
    assert _run(folder, steno, "list").startswith("a\t2\t2\t")


@pytest.mark.parametrize(
    "words", [["view", "--no-open", "workspace"], ["serve", "--model", "scripted"]], ids=" ".join
)
def test_steno_view_and_serve_answer_with_the_extra_app(
    app: Path, folder: Path, words: list[str]
) -> None:
    steno = app.with_name("steno")
    _run(folder, steno, "ask", "--model", "scripted", "hello")
    with subprocess.Popen(
        [steno, *words, "--port", "0"], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
            assert found is not None
            with urlopen(f"{found[0]}/healthz", timeout=60) as response:
                assert response.status == 200
        finally:
            server.send_signal(signal.SIGTERM)
            server.stdout.read()
    assert server.returncode == 0


@contextmanager
def _home_of_user() -> Iterator[None]:
    """Let pip read the settings of the user. Tests have another home."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOME", pwd.getpwuid(os.getuid()).pw_dir)
        patched.delenv("XDG_CONFIG_HOME")
        yield


def _install(folder: Path, requirement: str) -> Path:
    """Create an environment and return its Python."""
    with _home_of_user():
        environment.main(folder, [requirement])
    return folder / "bin" / "python"


def _missing_packages_error(script: Path) -> str:
    ended = subprocess.run([script, "list"], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    return ended.stderr


def _run(folder: Path, *command: str | Path) -> str:
    """Run a command that must succeed, and return its output."""
    ended = subprocess.run(
        command, check=False, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    return ended.stdout
