"""Transcripts of commands: the files beside this one. STENO_UPDATE=1 writes their output anew.

A line `$ steno …` is run in this process, `$ COLUMNS=80 steno …` in a terminal of this width, and
`$ echo … | steno …` with this input. Any other line with `$` is run by a shell. Below a command is
what it prints: stdout, stderr with `! ` before each line and without click's lines about usage, and
the exit code if it is not 0. A line with `#:` says what the commands below it show.
"""

import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from stenolog.cli import main
from stenolog.memory.notes import Draft, Notes
from stenolog.memory.scopes import Scope
from stenolog.stores.open_store import open_store
from support.cli import InTerminal
from support.installations import write_metadata
from support.terminal import Terminal
from support.transcripts import SAMPLES

HERE = Path(__file__).parent
UPDATE = bool(os.environ.get("STENO_UPDATE"))
FIRST = datetime(2026, 1, 5, 9, 30, tzinfo=UTC)
PAGES = sorted(page.stem for page in HERE.glob("*.txt"))

DOLLARS = {"claude-sonnet-4-5-20250929": (4, 0.5, 16), "gpt-4o": (2.5, 1.25, 10)}
"""Prices of a million tokens: of the prompt, of its cached part, and of the answer."""

WITHOUT_JSON = ("chat", "hook", "open", "serve", "token", "view")
"""Commands that talk, serve, or print one line for another program."""


@pytest.fixture
def place(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to stand in, with a small workspace of fixed times."""
    umask = os.umask(0o022)
    with monkeypatch.context() as zone:
        zone.setenv("TZ", "UTC")
        time.tzset()
        yield _fill(here, monkeypatch)
    time.tzset()
    os.umask(umask)


def _fill(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(write_metadata(here / "installed"))  # from an index
    monkeypatch.setenv("SAMPLES", str(SAMPLES))
    monkeypatch.setenv("LC_ALL", "C")  # `ls` sorts by the locale
    # Another version of genai-prices may have other prices.
    monkeypatch.setattr("stenolog.catalog.indexing.price_answer", _price)
    monkeypatch.setattr("stenolog.cli.stats.load_prices", lambda: _price)
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
        Notes(store).add(Scope(who="telegram:123"), [draft], once="golden")
    with open_store("torn") as store:
        store.add_messages("cli:torn", said[:1], at=times[:1])
    with (here / "torn/sessions/cli%3Atorn.jsonl").open("ab") as log:
        log.write(b'{"kind":"mess')
    rule = 'action = "delete"\ntag = "old"\n'
    (here / "keep.toml").write_text(f"[retention.old]\n{rule}")
    (here / "old").mkdir()
    (here / "old" / "old.json").write_text('[{"role": "user", "content": "from before"}]')
    return here


@pytest.mark.parametrize("name", PAGES)
def test_commands_print_what_the_transcript_has(
    name: str, place: Path, in_terminal: InTerminal
) -> None:
    page = HERE / f"{name}.txt"
    lines = (line for line in page.read_text().splitlines() if line.startswith(("$ ", "#: ")))
    outputs = (f"{line}\n{_fixed(_output(line, in_terminal), place)}" for line in lines)
    current = f"{''.join(outputs).rstrip()}\n"
    if UPDATE:
        page.write_text(current)
    assert page.read_text() == current, "the output changed: see it with STENO_UPDATE=1"


def _price(model: str, usage: Mapping[str, int]) -> float | None:
    if model not in DOLLARS:
        return None
    counts = usage["prompt"] - usage["cached"], usage["cached"], usage["answer"]
    return sum(rate * count for rate, count in zip(DOLLARS[model], counts, strict=True)) / 1e6


def _output(line: str, in_terminal: InTerminal) -> str:
    """Run a line, and return what belongs below it, and an empty line."""
    if line.startswith("#: "):
        return ""
    words = line.removeprefix("$ ")
    match = re.fullmatch(r"(?:echo (.*) \| )?((?:[A-Z_]+=\S+ )*)steno (.*)", words)
    if match is None:
        shell = subprocess.run(["sh", "-c", words], stdout=subprocess.PIPE, text=True, check=True)
        return f"{shell.stdout}\n"
    environment = dict(text.split("=", 1) for text in match[2].split())
    arguments = shlex.split(os.path.expandvars(match[3]))
    if "COLUMNS" in environment:
        code, shown = in_terminal(*arguments, **{"NO_COLOR": "1", "LINES": "100", **environment})
        if "\x1b[?25l" in shown:  # a progress bar hides the cursor and is removed at the end
            terminal = Terminal(rows=100, columns=int(environment["COLUMNS"]))
            terminal.feed(shown.replace("\n", "\r\n"))
            shown = f"{terminal.all}\n"
    else:
        said = shlex.split(match[1])[0] if match[1] else None
        ended = CliRunner(env=environment).invoke(main, arguments, prog_name="steno", input=said)
        assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
        code, errors = ended.exit_code, re.sub(r"\AUsage: .*\nTry .*\n\n", "", ended.stderr)
        shown = ended.stdout + "".join(f"! {error}\n" for error in errors.splitlines())
    return f"{shown}exit code {code}\n\n" if code else f"{shown}\n"


def _fixed(text: str, place: Path) -> str:
    """The text without what is another at each run: places, times of now, uids."""
    text = text.replace(str(place), "/HERE").replace(str(SAMPLES), "/SAMPLES")
    text = re.sub(r"(?!2026-01-05)\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "NOW", text)
    text = re.sub(r"(?!2026-01-05)\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d [A-Z]+)?", "NOW", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT\d{6}\.\d+Z", "NOW", text)
    text = re.sub(r"\b(?=\w*\d)[0-9a-f]{12,64}\b", "HEX", text)
    text = re.sub(r"about [\d,]+ → [\d,]+ tokens", "about N → M tokens", text)
    text = re.sub(r"about [\d,]+ tokens", "about N tokens", text)
    text = re.sub(r'"(input_tokens|tokens|tokens_before|tokens_after)": \d+', r'"\1": 0', text)
    text = re.sub(r"from byte [\d,]+ to", "from byte N to", text)
    return re.sub(r"(?m)[ \t]+$", "", text)


def test_every_command_and_its_json_are_in_a_transcript() -> None:
    text = "\n".join((HERE / f"{name}.txt").read_text() for name in PAGES)
    for name, command in _commands(main, ()):
        lines = re.findall(rf"(?m)^\$ (?:.* )?steno {name}\b.*$", text)
        assert lines, name
        has_json = any("--json" in param.opts for param in command.params)
        assert has_json != (name in WITHOUT_JSON), name
        assert not has_json or any("--json" in line for line in lines), name


def test_every_help_lists_the_exit_codes() -> None:
    for name, command in _commands(main, ()):
        assert "Exit codes: 0" in " ".join(str(command.help).split()), name


def _commands(group: click.Group, words: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, (*words, name))
        elif command is not None:
            yield " ".join((*words, name)), command
