"""Streams of events, byte for byte."""

from pathlib import Path

from stenolog.testing.scripted_model import ScriptedModel
from support.gateway.served_gateway import Served


def test_sse_events_end_with_an_empty_line(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hi."}], "stream": True}
    with Served(tmp_path, ScriptedModel(["Yes."])) as gateway, gateway.client() as client:
        sent = client.post("/v1/chat/completions", json=body).content
        assert b"\r" not in sent
        events = sent.split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        assert len(events) > 3
