"""Tests that every handle with `close` is a context manager that calls it."""

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stenolog
from stenolog.errors import StoreClosed
from stenolog.testing import ScriptedModel

HANDLES = [
    value
    for name in stenolog.__all__
    if inspect.isclass(value := getattr(stenolog, name)) and hasattr(value, "close")
]


@pytest.mark.parametrize("handle", HANDLES, ids=lambda handle: handle.__name__)
def test_every_handle_is_a_context_manager(handle: Any) -> None:
    if inspect.iscoroutinefunction(handle.close):
        assert hasattr(handle, "__aenter__")
        assert hasattr(handle, "__aexit__")
    else:
        assert hasattr(handle, "__enter__")
        assert hasattr(handle, "__exit__")


def test_open_sessions_closes_its_store(tmp_path: Path) -> None:
    with stenolog.open_sessions(tmp_path) as sessions:
        assert sessions.add_message("k", "user", "hello")
        store = sessions.store
    assert store is not None
    with pytest.raises(StoreClosed):
        store.info("k")


def test_session_manager_is_closed_by_its_with_block(tmp_path: Path) -> None:
    with stenolog.SessionManager(tmp_path) as sessions:
        assert sessions.add_message("k", "user", "hello")
    assert sessions.add_message("k", "user", "late") is None
    assert sessions.close().failed_writes == 0


def _instance(folder: Path) -> stenolog.AgentInstance:
    spec = stenolog.AgentSpec(sessions=str(folder), memory=False)
    return stenolog.AgentInstance.open(spec, model=ScriptedModel(["Hello."]))


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda instance: instance,
        lambda instance: stenolog.AgentRegistry([instance]),
        lambda instance: stenolog.AgentLoop(stenolog.AgentRegistry([instance])),
    ],
    ids=["instance", "registry", "loop"],
)
def test_agents_close_their_sessions(tmp_path: Path, wrapped: Callable[[Any], Any]) -> None:
    async def main() -> None:
        instance = _instance(tmp_path)
        async with wrapped(instance):
            assert instance.sessions.add_message("k", "user", "hello")
        assert instance.sessions.add_message("k", "user", "late") is None

    asyncio.run(main())
