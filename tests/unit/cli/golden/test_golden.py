"""What every command prints, as files beside this one; STENO_UPDATE=1 writes them anew."""

import os
import re
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from stenolog.cli import main
from stenolog.memory.notes import Draft, Notes
from stenolog.memory.scopes import Scope
from stenolog.stores.open_store import open_store
from support.installations import write_metadata

HERE = Path(__file__).parent
UPDATE = bool(os.environ.get("STENO_UPDATE"))
FIRST = datetime(2026, 1, 5, 9, 30, tzinfo=UTC)

CASES = {
    "ask": [
        "ask hello --model scripted --session cli:new",
        "ask hello --model scripted --session cli:new --json",
        "hello | ask --model scripted --session cli:new",
        "ask hello --model nobody/knows",
    ],
    "archive": ["archive telegram:123 --dry-run", "archive --all", "archive --all --json"],
    "backup": ["backup copies", "backup copies"],
    "chat": ["hello | chat cli:new --model scripted", "chat cli:new -c"],
    "config": [
        "config path",
        "config path --json",
        "config init",
        "config init",
        "config show",
    ],
    "copy": ["copy workspace sqlite:copy.db"],
    "delete": [
        "delete telegram:123",
        "delete telegram:123 cli:default --dry-run",
        "delete telegram:123 cli:default --yes",
        "delete slack:C42 --yes --json",
        "delete telegram:123 --yes",
    ],
    "doctor": [
        "doctor",
        "doctor --json",
        "doctor torn",
        "doctor torn --repair",
        "doctor torn",
        "doctor elsewhere",
    ],
    "export": [
        "export telegram:123",
        "export telegram:123 -o talk.md",
        "export telegram:123 -o talk.md",
        "export telegram:123 -o talk.html --all --json",
        "export telegram:123 -o talk.pdf",
    ],
    "fork": [
        "fork telegram:123 telegram:other --at 4",
        "fork telegram:123 telegram:third --json",
        "fork telegram:123 telegram:third",
        "fork telegram:123 telegram:fourth --at 99",
    ],
    "hook": ["hook -w postgresql://ada:secret@localhost/db", "hook install claude-code"],
    "import": [
        "import old --dry-run",
        "import old --json",
        "import old",
        "show old",
        "import elsewhere",
    ],
    "list": ["list", "list --json", "list --prefix tele", "list --prefix nothing"],
    "memory": [
        "memory list",
        "memory list --json",
        "memory search tea",
        "memory show {note}",
        "memory forget {note} --dry-run --json",
        "memory forget {note}",
        "memory undo --who telegram:123",
        "memory forget {note} --json",
        "memory undo --who telegram:123 --json",
    ],
    "open": ["open --print", "open telegram:123"],
    "purge": [
        "purge telegram:123",
        "purge telegram:123 --before 3 --dry-run",
        "purge telegram:123 --before 3 --yes",
        "purge slack:C42 --yes --json",
        "purge --scope telegram:123 --dry-run",
        "purge --scope telegram:123 --yes",
        "purge --scope telegram:123 --yes",
    ],
    "rename": [
        "rename telegram:123 'Counting to four'",
        "rename telegram:123 '' --json",
        "rename nobody x",
    ],
    "restore": [
        "restore --list",
        "delete telegram:123 --yes",
        "restore --list",
        "restore --list --json",
        "restore telegram:123 --as telegram:back",
        "restore telegram:123",
    ],
    "retention": [
        "retention list",
        "retention run",
        "retention list --config keep.toml",
        "tag telegram:123 +old",
        "retention run --config keep.toml --dry-run",
        "retention run --config keep.toml",
        "retention run --config keep.toml --json",
    ],
    "search": [
        "search message",
        "search message --role assistant --json",
        "search message --prefix slack",
    ],
    "serve": ["serve --model nobody/knows --port 0", "serve --port 99999"],
    "show": [
        "show telegram:123",
        "show telegram:123 --all",
        "show telegram:123:2",
        "show cli:default",
        "show telegram:123 --json",
        "show telegram:124",
    ],
    "stats": ["stats", "stats --json", "stats --since 2026-01-06"],
    "summarize": [
        "summarize telegram:123 --model scripted --dry-run",
        "summarize telegram:123 --model scripted",
        "summarize telegram:123 --model scripted --json",
        "summarize nobody --model scripted",
    ],
    "tag": [
        "tag telegram:123",
        "tag telegram:123 +fun +work",
        "tag telegram:123",
        "tag telegram:123 -work --json",
        "tag telegram:123 work",
    ],
    "tail": ["tail telegram:123", "tail telegram:123 -n 1 --json", "tail nobody"],
    "token": ["token --config missing.toml"],
    "undo": ["undo telegram:123", "undo telegram:123", "undo slack:C42 --json"],
    "view": ["view nowhere --no-open", "view --port 99999"],
}
"""What is run one after the other, for each command; words before a bar are its stdin."""


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder to stand in, with a small workspace of fixed times; the id of a note in it."""
    for name in list(os.environ):
        if name.endswith("_API_KEY") or name.startswith(("STENO_", "OLLAMA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(write_metadata(tmp_path / "installed"))  # from an index
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    times = [FIRST + timedelta(minutes=number) for number in range(6)]
    roles = ["user", "assistant"] * 3
    said = [
        {"role": role, "content": f"message {number}"} for number, role in enumerate(roles, start=1)
    ]
    call = {"id": "1", "function": {"name": "ls", "arguments": '{"path": "."}'}}
    with open_store("workspace") as store:
        for one, at in zip(said, times, strict=True):
            store.add_messages("telegram:123", [one], at=[at])
        store.checkpoint("telegram:123", summary="They counted to two.", upto=2)
        # At other times: what was said at the same moment stands in any order.
        later = [at + timedelta(hours=1) for at in times[:2]]
        store.add_messages("slack:C42", said[:2], at=later)
        store.clear("slack:C42")
        asked = {"role": "assistant", "content": None, "tool_calls": [call]}
        found = {"role": "tool", "tool_call_id": "1", "content": "a.txt\nb.txt"}
        store.add_messages("cli:default", [asked, found], at=times[:2])
    with open_store("workspace", namespace="notes") as store:
        draft = Draft(kind="core", text="likes tea", at=FIRST)
        [made] = Notes(store).add(Scope(who="telegram:123"), [draft], once="golden")
    with open_store("torn") as store:
        store.add_messages("cli:torn", said[:1], at=times[:1])
    with (tmp_path / "torn/sessions/cli%3Atorn.jsonl").open("ab") as log:
        log.write(b'{"kind":"mess')
    rule = 'action = "delete"\ntag = "old"\n'
    (tmp_path / "keep.toml").write_text(f"[retention.old]\n{rule}")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "old.json").write_text('[{"role": "user", "content": "from before"}]')
    return made.id


@pytest.mark.parametrize("name", CASES)
def test_command_output_matches_its_golden_file(name: str, note: str, tmp_path: Path) -> None:
    shown = "\n".join(_run(line.format(note=note)) for line in CASES[name])
    page = HERE / f"{name}.txt"
    current = _fixed(shown, tmp_path)
    if UPDATE:
        page.write_text(current)
    assert page.read_text() == current, "the output changed: see it with STENO_UPDATE=1"


def test_every_command_has_golden_files() -> None:
    assert CASES.keys() == set(main.list_commands(click.Context(main)))
    assert {page.stem for page in HERE.glob("*.txt")} == CASES.keys()


def _run(line: str) -> str:
    said, _, command = line.rpartition(" | ")
    ended = CliRunner().invoke(main, shlex.split(command), prog_name="steno", input=said or None)
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return "".join(_section(line, ended.stdout, ended.stderr, ended.exit_code))


def _section(line: str, stdout: str, stderr: str, code: int) -> Iterator[str]:
    yield f"$ steno {line}\n"
    yield stdout
    yield "".join(f"! {words}\n" for words in stderr.splitlines())
    if code:
        yield f"exit code {code}\n"


def _fixed(text: str, place: Path) -> str:
    """The text without what is another at each run: places, times of now, uids, speeds."""
    text = text.replace(str(place), "/HERE")
    text = re.sub(r"(?!2026-01-05)\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "NOW", text)
    text = re.sub(r"(?!2026-01-05)\d{4}-\d\d-\d\d \d\d:\d\d", "NOW", text)
    text = re.sub(r"\b(?=\w*\d)[0-9a-f]{12,64}\b", "HEX", text)
    text = re.sub(r"\([\d,]+ per second\)", "(N per second)", text)
    text = re.sub(r"about [\d,]+ → [\d,]+ tokens", "about N → M tokens", text)
    text = re.sub(r"about [\d,]+ tokens", "about N tokens", text)
    text = re.sub(r'"(input_tokens|tokens|tokens_before|tokens_after)": \d+', r'"\1": 0', text)
    text = re.sub(r"from byte [\d,]+ to", "from byte N to", text)
    return re.sub(r"(?m)[ \t]+$", "", text)
