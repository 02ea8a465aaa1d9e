"""A chat request whose messages cannot be stored fails, and its retry is answered once."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stenolog.agent.spec import AgentSpec
from stenolog.testing.scripted_model import ScriptedModel
from support.full_disks import LONG, Disk, full_disk
from support.gateway.chat_turns import HOURS, chat
from support.gateway.served_gateway import Served

SPEC = AgentSpec(memory=False, consolidation=False)
each_engine = pytest.mark.parametrize("engine", ["jsonl", "sqlite"])
each_mode = pytest.mark.parametrize("stream", [False, True], ids=["complete", "streamed"])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with full_disk(tmp_path, "limit") as disk:
        yield disk


def _served(engine: str, disk: Disk, model: Any, **options: Any) -> Served:
    where = f"sqlite:{disk.folder / 'steno.db'}" if engine == "sqlite" else str(disk.folder)
    return Served(where, model, spec=SPEC, ttl=HOURS, **options)


def _ask(client: Any, text: str, *, stream: bool) -> Any:
    body = {"messages": [{"role": "user", "content": text}], "stream": stream}
    headers = {"X-Session-Key": "work", "Idempotency-Key": "k1"}
    return client.post("/v1/chat/completions", json=body, headers=headers)


def _stored(served: Served) -> list[str]:
    history = served.loop.registry.agent().store.get_history("work")
    return [str(message.content)[:9] for message in history]


def _answer_and_fill(disk: Disk) -> Callable[[Any, Any], str]:
    """Return a model that fills the disk before its first answer to `said 1`."""
    fills = [disk.fill]

    def answer(messages: Any, _: Any) -> str:
        last = messages[-1]["content"]
        if last == "said 1" and fills:
            fills.pop()()
            return LONG
        return f"to {last}"

    return answer


@each_engine
@each_mode
def test_question_that_is_not_stored_gets_503_and_is_not_asked(
    engine: str, disk: Disk, *, stream: bool
) -> None:
    model = ScriptedModel(lambda messages, _: f"to {messages[-1]['content']}")
    with _served(engine, disk, model) as served, served.client() as client:
        chat(served, client, "Hello.")
        disk.fill()
        failed = _ask(client, "said 1", stream=stream)
        assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")
        assert failed.json()["error"]["code"] == "not_stored"
        said = client.post("/v1/sessions/work/messages", json={"content": "said 2"})
        assert (said.status_code, said.headers["retry-after"]) == (503, "1")
        assert "the message is not stored" in said.text
        disk.free()
        assert len(model.asked) == 1
        assert _ask(client, "said 1", stream=stream).status_code == 200
        served.quiet()
        assert _stored(served) == ["Hello.", "to Hello.", "said 1", "to said 1"]


@each_engine
@each_mode
def test_question_whose_answer_is_not_stored_is_answered_once_by_its_retry(
    engine: str, disk: Disk, *, stream: bool
) -> None:
    with (
        _served(engine, disk, ScriptedModel(_answer_and_fill(disk))) as served,
        served.client() as client,
    ):
        chat(served, client, "Hello.")
        failed = _ask(client, "said 1", stream=stream)
        if stream:
            assert failed.status_code == 200
            assert "and so on" in failed.text
            assert "[DONE]" not in failed.text
            assert '"code":"not_answered"' in failed.text.strip().split("\n")[-1]
        else:
            assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")
        disk.free()
        for _ in range(2):
            answer = _ask(client, "said 1", stream=stream).text
            pieces = re.findall(r'"content":"(.*?)"', answer)
            assert "".join(pieces) == "to said 1"
            assert ("data: [DONE]" in answer) == stream
        served.quiet()
        assert _stored(served) == ["Hello.", "to Hello.", "said 1", "to said 1"]
