"""`steno memory`: notes listed, found, shown, forgotten, brought back, deleted."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stenolog.cli import main
from stenolog.memory.notes import Draft, Kind, Notes
from stenolog.memory.scopes import Scope
from stenolog.stores.open_store import open_store
from support.cli import InTerminal, Steno

ANN = Scope(who="telegram:1")
TUTOR = Scope(agent="tutor", who="telegram:1")
TEAM = Scope(who="slack:C42")

pytestmark = pytest.mark.usefixtures("place")

Ids = dict[str, str]


@pytest.fixture(params=["./workspace", "sqlite:steno.db"])
def workspace(request: pytest.FixtureRequest, place: Path) -> str:
    """A place of each kind that keeps notes."""
    del place
    return str(request.param)


@pytest.fixture
def ids(workspace: str) -> Ids:
    """Notes of two users and of a second agent, by a word for each."""
    with open_store(workspace, namespace="notes") as store:
        notes = Notes(store)
        [old] = notes.add(ANN, [_learnt("Eats meat.", 1, quote="I eat meat")])
        [day] = notes.add(ANN, [_learnt("They talked.\nLong.", 1, 2, kind="daily")])
        [new] = notes.add(ANN, [_learnt("Eats no meat.", 3, supersedes=(old.id,))])
        [two, _] = notes.add(TUTOR, [_core("Learns \x1b[31mSpanish."), _core("Is patient.")])
        [team] = notes.add(TEAM, [_core("Meets on Mondays.")])
    return {"old": old.id, "day": day.id, "new": new.id, "tutor": two.id, "team": team.id}


def _core(text: str) -> Draft:
    return Draft(kind="core", text=text)


def _learnt(
    text: str,
    *seqs: int,
    kind: Kind = "core",
    quote: str = "",
    supersedes: tuple[str, ...] = (),
) -> Draft:
    return Draft(
        kind=kind,
        text=text,
        about="diet" if kind == "core" else "",
        quote=quote,
        session="telegram:1",
        uid="u",
        seqs=seqs,
        supersedes=supersedes,
    )


def _texts(workspace: str, scope: Scope = ANN) -> list[str]:
    with open_store(workspace, namespace="notes") as store:
        return [note.text for note in Notes(store).list(scope)]


@pytest.fixture
def memory(workspace: str) -> Steno:
    """Run `steno memory …` on that workspace."""

    def run(*arguments: str) -> Result:
        words = ["memory", *arguments, "-w", workspace]
        return CliRunner().invoke(main, words, prog_name="steno")

    return run


# --- looking ---------------------------------------------------------------------------------


def test_memory_list_prints_current_notes(memory: Steno, ids: Ids) -> None:
    result = memory("list")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert [(row[0], row[1], *row[3:]) for row in rows[:3]] == [
        (ids["team"], "core", "in force", "slack:C42", "Meets on Mondays."),
        (ids["day"], "daily", "in force", "telegram:1", "They talked.\\nLong."),
        (ids["new"], "core", "in force", "telegram:1", "Eats no meat."),
    ]
    assert [row[5] for row in rows[3:]] == ["Learns Spanish.", "Is patient."]


def test_list_accepts_filters(memory: Steno, ids: Ids) -> None:
    def found(*options: str) -> list[str]:
        return [
            json.loads(line)["id"]
            for line in memory("list", "--json", *options).stdout.splitlines()
        ]

    assert found("--who", "slack:C42") == [ids["team"]]
    assert found("--who", "telegram:1", "--agent", "main") == [ids["day"], ids["new"]]
    assert len(found("--agent", "tutor")) == 2
    assert found("--kind", "daily") == [ids["day"]]
    assert found("--who", "telegram:1", "--agent", "main", "--all")[0] == ids["old"]
    nobody = memory("list", "--who", "nobody")
    assert (nobody.exit_code, nobody.stdout, nobody.stderr) == (0, "", "No matching notes.\n")


def test_ambiguous_id_is_reported_in_one_sentence(memory: Steno, ids: Ids, workspace: str) -> None:
    several = memory("forget", ids["tutor"].partition("-")[0])
    assert several.exit_code == 2
    assert "Several notes start with" in several.stderr
    assert len(_texts(workspace, TUTOR)) == 2


# --- forgetting ------------------------------------------------------------------------------


def test_undo_restores_a_forgotten_note(memory: Steno, ids: Ids, workspace: str) -> None:
    result = memory("forget", ids["new"][:7], ids["day"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.splitlines() == [
        f"Forgotten: {ids['new']} “Eats no meat.”",
        f"In force again: {ids['old']} “Eats meat.”",
        f"Forgotten: {ids['day']} “They talked.\\nLong.”",
        f"Undo with `steno memory undo --who telegram:1 -w {shlex.quote(workspace)}`.",
    ]
    assert _texts(workspace) == ["Eats meat."]
    undo = ("undo", "--who", "telegram:1", "--agent", "main")
    assert memory(*undo).stderr == f"In force again: {ids['day']} “They talked.\\nLong.”\n"
    assert memory(*undo).stderr.splitlines() == [
        f"In force again: {ids['new']} “Eats no meat.”",
        f"Superseded again: {ids['old']} “Eats meat.”",
    ]
    nothing = memory(*undo)
    assert nothing.exit_code == 1
    assert "There is no forgotten note of 'telegram:1'" in nothing.stderr


def test_undo_requires_a_unique_user(memory: Steno, ids: Ids) -> None:
    assert ids
    result = memory("undo")
    assert result.exit_code == 2
    assert "slack:C42, telegram:1, telegram:1 (agent tutor). Select one" in result.stderr
    assert "with --agent" in memory("undo", "--who", "telegram:1").stderr
    nobody = memory("undo", "--who", "nobody")
    assert (nobody.exit_code, nobody.stderr) == (1, "Error: There are no notes of nobody here.\n")


def test_note_purge_requires_yes_without_a_terminal(
    memory: Steno, ids: Ids, workspace: str, place: Path
) -> None:
    refused = memory("forget", ids["old"], "--purge")
    assert (refused.exit_code, "add --yes" in refused.stderr) == (2, True)
    assert memory("list", "--all", "--who", "telegram:1").stdout.count("Eats meat.") == 1
    done = memory("forget", ids["old"], "--purge", "--yes")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [
        f"Deleted permanently: {ids['old']}",
        "Not deleted: the session 'telegram:1' still contains the original messages (seq 1).",
        f"Not deleted: the note {ids['day']} was made of the same messages.",
    ]
    assert _texts(workspace) == ["They talked.\nLong.", "Eats no meat."]
    files = [path.read_bytes() for path in place.rglob("*") if path.is_file()]
    assert b"Eats meat." not in b"".join(files)


def test_closed_stdin_is_rejected_with_one_sentence(ids: Ids, workspace: str) -> None:
    before = _texts(workspace)
    program = "from stenolog.cli import main; main(prog_name='steno')"
    given = ["memory", "forget", ids["old"], "--purge", "-w", workspace]
    command = ["sh", "-c", 'exec "$0" -c "$@" <&-', sys.executable, program, *given]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, "add --yes" in result.stderr) == (2, True), result.stderr
    assert "Traceback" not in result.stderr
    assert _texts(workspace) == before


@pytest.mark.parametrize(("answer", "left"), [("y\n", 1), ("\n", 2), ("n\n", 2)])
def test_note_purge_asks_in_a_terminal(
    ids: Ids, workspace: str, in_terminal: InTerminal, answer: str, left: int
) -> None:
    command = ("memory", "forget", ids["new"], "--purge", "-w", workspace)
    code, shown = in_terminal(*command, typed=answer)
    assert "Delete this note permanently? [y/N]" in shown
    assert (code == 0) == (left == 1)
    assert ("Eats no meat." in _texts(workspace)) == (left == 2)


# --- places ----------------------------------------------------------------------------------


def test_notes_are_formatted_in_a_terminal(
    ids: Ids, in_terminal: InTerminal, workspace: str
) -> None:
    code, shown = in_terminal(
        "memory", "list", "--all", "-w", workspace, NO_COLOR="1", COLUMNS="80"
    )
    assert code == 0
    assert "telegram:1 (agent tutor)\n" in shown
    assert f"  {ids['old']}" in shown
    assert "Eats meat.  (superseded)" in shown
    assert "\x1b" not in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
