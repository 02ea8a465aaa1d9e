"""kill -9 of a running agent, at random moments of turns with tools; a strict model over real HTTP.

After each kill a new process goes on with what was left, gets some messages again and some new
ones. In the end every message that was acknowledged is there once, answered once or closed with a
mark; nothing that must not be done twice was; and no request was one that a provider refuses.
"""

import socket
from pathlib import Path

import pytest

from stenolog.testing.model_server import ModelServer
from support.crash.agent_trial import WHERE, kill_agents
from support.crash.reporting import Say


@pytest.mark.parametrize("engine", WHERE)
def test_an_agent_killed_five_times_answers_every_message_once(
    quick_disk: Path, say: Say, seed: int, engine: str
) -> None:
    kill_agents(quick_disk, engine, say, rounds=5, seed=seed)


@pytest.mark.full
@pytest.mark.parametrize("engine", WHERE)
def test_an_agent_killed_twenty_five_times_answers_every_message_once(
    tmp_path: Path, say: Say, seed: int, engine: str
) -> None:
    struck = kill_agents(tmp_path, engine, say, rounds=25, seed=seed)
    assert [moment for moment in ("in a tool", "before the answer") if not struck[moment]] == []


def test_request_cut_off_by_a_killed_client_does_not_count_as_invalid() -> None:
    with ModelServer() as server:
        port = int(server.url.split(":")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as client:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n"
            client.sendall(head + b'{"model":')
        assert server.wait_until(lambda: server.left + server.refused > 0)
        assert server.refusals == []
