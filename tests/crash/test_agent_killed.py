"""Tests that an agent killed at random moments of turns with tools loses and repeats nothing.

The model is strict and runs over real HTTP. After each kill a new process resumes, and gets some
messages again and some new ones. In the end every acknowledged message is stored once, and answered
once or closed with an interruption mark. No tool that must not be repeated ran twice, and no
request was one that a provider rejects.
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
        assert server.wait_until(lambda: server.disconnect_count + server.rejected_count > 0)
        assert server.request_faults == []
