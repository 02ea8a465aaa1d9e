"""Random calls on SQLite and the model at once, and on SQLite, JSONL and the model together."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

import stenolog
from stenolog import StenologError
from stenolog.records import Compacted, Message, Purged, SessionInfo, Trashed
from stenolog.stores.base import Store
from stenolog.testing.machine import StoreMachine


class SQLiteMachine(StoreMachine):
    """SQLite; a torn write is what a killed writer leaves at the end of the log."""

    tears: ClassVar[bool] = True

    def open(self, path: Path) -> Store:
        return stenolog.SQLiteStore(path / "sessions.db")

    def tear(self, path: Path, key: str, *, next_seq: int, kind: int, cut: float) -> int:  # noqa: ARG002 - of the hook
        log = path / "sessions.db-wal"
        if log.exists():
            text = log.read_bytes()
            frame = text[32 : 32 + 24 + 4096]
            torn = [frame[: int(len(frame) * cut)], frame, b"\0" * 5000, b"\xff" * 30][kind % 4]
            with log.open("ab") as end:
                end.write(torn)
        return 0


class TogetherMachine(StoreMachine):
    """SQLite and JSONL as one store."""

    def open(self, path: Path) -> Store:
        sqlite, jsonl = path / "sqlite" / "sessions.db", path / "jsonl"
        both = Together(stenolog.SQLiteStore(sqlite), stenolog.JSONLStore(jsonl))
        return cast(Store, both)


class Together:
    """Two stores of different engines: each call goes to both, and they must agree."""

    def __init__(self, one: Store, other: Store) -> None:
        self._one = one
        self._other = other

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            found = _outcome(self._one, name, arguments, options)
            expected = _outcome(self._other, name, arguments, self._translated(name, options))
            assert _same(found) == _same(expected), f"{name}{arguments} {options}"
            if isinstance(found, StenologError):
                raise found
            return found

        return call

    def _translated(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """Each engine gives out uids of its own; a deleted session is the one in the same place."""
        if name != "restore" or options.get("uid") is None:
            return options
        places = [trashed.uid for trashed in self._before]
        return {**options, "uid": self._other.list_trash()[places.index(options["uid"])].uid}

    def list_trash(self) -> list[Trashed]:
        self._before = self._one.list_trash()
        assert _same(self._before) == _same(self._other.list_trash())
        return self._before


def _outcome(store: Store, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        result = getattr(store, name)(*arguments, **options)
    except StenologError as error:
        return error
    return list(result) if isinstance(result, Iterator) else result


def _same(result: Any) -> Any:
    """What must be the same on all engines."""
    match result:
        case StenologError():
            return type(result)
        case Message():
            return result.seq, result.to_json(), result.hidden
        case SessionInfo():
            own = ("uid", "created", "updated", "archived", "generation", "bytes")
            return {
                name: getattr(result, name) for name in result.__struct_fields__ if name not in own
            }
        case Trashed():
            return result.key, result.count
        case Purged():
            return result.messages, result.first, result.last, result.not_reached
        case Compacted():
            return None
        case list():
            return [_same(one) for one in result]
        case dict():
            return sorted(result)
        case _:
            return result


@pytest.mark.parametrize(("machine", "runs"), [(SQLiteMachine, 20), (TogetherMachine, 12)])
def test_the_engines_do_what_the_model_does(
    machine: type[StoreMachine],
    runs: int,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    _run(machine, runs, capsys, caplog)


@pytest.mark.full
@pytest.mark.parametrize(("machine", "runs"), [(SQLiteMachine, 400), (TogetherMachine, 400)])
def test_the_engines_do_what_the_model_does_for_longer(
    machine: type[StoreMachine],
    runs: int,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    _run(machine, runs, capsys, caplog)


def _run(
    machine: type[StoreMachine],
    runs: int,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "stenolog")
    wanted = settings(
        max_examples=runs * 2,
        stateful_step_count=50,
        deadline=None,
        database=None,
        # The same runs each time: a failure here is a failure everywhere.
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    run_state_machine_as_test(machine, settings=wanted)
    with capsys.disabled():
        print(f"\n{machine.report()}")
    assert sum(length == 50 for length in machine.lengths) >= runs
    assert machine.ran.keys() >= {"add_messages", "undo", "fork", "delete", "purge", "switch"}
