"""From stored messages to what a page shows of them."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from stenolog.catalog.message_metadata import mark_tool_outcome
from stenolog.gateway.viewer.message_views import message_views, prompt_line
from stenolog.gateway.viewer.safe_html import MAX_RENDERED, is_link_address, is_picture_url
from stenolog.records import Message
from stenolog.stores.in_memory import InMemoryStore
from stenolog.transfer.export.tool_views import MAX_BLOCK
from support.tool_samples import SECRET


def _stored(*bodies: dict[str, Any]) -> list[Message]:
    with InMemoryStore() as store:
        store.add_messages("s", bodies)
        return store.get_history("s")


def _call(id: str, name: str = "look", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_result_is_shown_at_its_call() -> None:
    made = message_views(
        _stored(
            {"role": "assistant", "content": "", "tool_calls": [_call("a"), _call("b", "<b>")]},
            {
                "role": "tool",
                "tool_call_id": "b",
                "content": '{"x": 1}',
                "stenolog": {"seconds": 2},
            },
            {"role": "tool", "tool_call_id": "a", "content": "no", "stenolog": {"failed": True}},
            {"role": "assistant", "content": "done"},
        )
    )
    assert [one.seq for one in made] == [1, 4]
    first, second = made[0].calls
    assert (first.name, first.failed) == ("look", True)
    assert (second.name, second.seconds, second.failed) == ("<b>", 2.0, False)
    assert second.result is not None
    assert "1" in second.result


def test_results_of_parallel_calls_in_several_messages_are_shown_at_their_calls() -> None:
    made = message_views(
        _stored(
            {"role": "assistant", "content": None, "tool_calls": [_call("a")]},
            {"role": "assistant", "content": None, "tool_calls": [_call("b")]},
            {"role": "tool", "tool_call_id": "b", "content": "second"},
            {"role": "tool", "tool_call_id": "a", "content": "first"},
        )
    )
    assert [one.seq for one in made] == [1, 2]
    assert "<pre>first</pre>" in str(made[0].calls[0].result)
    assert "<pre>second</pre>" in str(made[1].calls[0].result)


def test_file_that_was_read_is_coloured_but_an_error_is_not() -> None:
    read = '{"file_path": "/srv/a.py"}'
    failed = {"stenolog": {"failed": True}}
    [message] = message_views(
        _stored(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [_call("a", "Read", read), _call("b", "Read", read)],
            },
            {"role": "tool", "tool_call_id": "a", "content": "     1→import os"},
            {"role": "tool", "tool_call_id": "b", "content": "import failed", **failed},
        )
    )
    code, error = message.calls
    assert "<span" in str(code.result)
    assert "1→" not in str(code.result)
    assert "<pre>import failed</pre>" in str(error.result)


def test_result_without_its_call_is_a_separate_message() -> None:
    [one] = message_views(_stored({"role": "tool", "tool_call_id": "x", "content": "<i>alone</i>"}))
    assert one.kind == "tool"
    assert "&lt;i&gt;alone" in one.html


def test_result_after_the_shown_messages_is_found() -> None:
    call, result = _stored(
        {"role": "assistant", "content": None, "tool_calls": [_call("a")]},
        {"role": "tool", "tool_call_id": "a", "content": "late"},
    )
    [one] = message_views([call], [result])
    assert "<pre>late</pre>" in str(one.calls[0].result)


def test_content_parts_of_other_providers_are_read() -> None:
    made = message_views(
        _stored(
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "text", "text": "Look."},
                    {"type": "tool_use", "id": "a", "name": "look", "input": {"at": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}],
            },
            {"role": "user", "content": {"not": "known"}},
            {"role": 5, "content": None},
            {"no": "role"},
        )
    )
    assert [one.seq for one in made] == [1, 3, 4, 5]
    assert made[0].thoughts == ("<p>hm</p>\n",)
    assert "<pre>x</pre>" in str(made[0].calls[0].result)
    assert made[2].kind == "other"


def test_pictures_are_shown_or_linked_or_neither() -> None:
    address = "data:image/png;base64,iVBORw0KGgo="
    content = [
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "image_url", "image_url": {"url": "https://a.example/x.png"}},
        {"type": "image_url", "image_url": {"url": "javascript:alert(1)"}},
        {"type": "image", "source": {"media_type": "image/gif", "data": "R0lGOD=="}},
        {"type": "image"},
        {"type": "text", "text": "What is this?"},
    ]
    [message] = _stored({"role": "user", "content": content})
    [one] = message_views([message])
    told = [(is_picture_url(url), is_link_address(url)) for url in one.pictures]
    assert told == [(True, False), (False, True), (False, False), (True, False), (False, False)]
    assert prompt_line(message.to_dict()) == "What is this?"


def test_interrupted_answer_is_marked_once() -> None:
    mark = {"interrupted": "stopped"}
    cut, plain = message_views(
        _stored(
            {"role": "assistant", "content": "Half an [interrupted]", "stenolog": mark},
            {"role": "assistant", "content": "It reads [interrupted]"},
        )
    )
    assert (cut.html, cut.interrupted) == ("<p>Half an</p>\n", "stopped")
    assert "[interrupted]" in plain.html


def test_results_of_responses_items_are_shown_at_their_calls() -> None:
    made = message_views(
        _stored(
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "find", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "rain"},
            {"type": "function_call_output", "call_id": "b", "output": "wind"},
            {"type": "function_call_output", "call_id": "c", "output": "<i>alone</i>"},
        )
    )
    assert [one.seq for one in made] == [1, 2, 5]
    assert [one.calls[0].name for one in made[:2]] == ["look", "find"]
    assert "<pre>rain</pre>" in str(made[0].calls[0].result)
    assert "<pre>wind</pre>" in str(made[1].calls[0].result)
    assert "&lt;i&gt;alone" in made[2].html


def test_tools_that_the_provider_runs_are_shown_with_their_results() -> None:
    use = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": "found"}
    image = {"type": "image_generation_call", "id": "i", "result": "iVBORw0KGgo="}
    said = {"type": "text", "text": "Done."}
    first, second = message_views(
        _stored({"role": "assistant", "content": [use, found, said]}, image)
    )
    assert first.html == "<p>Done.</p>\n"
    assert "<pre>found</pre>" in str(first.calls[0].result)
    assert is_picture_url(second.pictures[0])


def test_parts_that_cannot_be_shown_are_named() -> None:
    parts = [{"type": "redacted_thinking", "data": "c2VjcmV0"}, {"type": "place", "name": "Porto"}]
    first, second, third = message_views(
        _stored(
            {"role": "assistant", "content": parts},
            {"role": "assistant", "content": None, "refusal": "I cannot."},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]},
        )
    )
    assert first.thoughts == ("<p>[redacted_thinking]</p>\n",)
    assert first.html == "<p>[place]</p>\n"
    assert second.html == "<p>I cannot.</p>\n"
    assert "<pre></pre>" in third.html


def test_result_of_an_unexpected_type_is_shown_once() -> None:
    [one] = message_views(
        _stored({"role": "tool", "tool_call_id": "x", "content": {"sky": "rain"}})
    )
    assert one.html.count("rain") == 1


def test_secrets_are_covered_in_every_part_of_a_message() -> None:
    secret = "sk-proj-" + "Ab3dEf6hIj9lMn2pQr5tUv8x" * 2
    shown = f'data-secret="{secret}"'
    link = f"[x](https://user:{secret}@host.example/) and {secret}"
    arguments = {"command": f"export KEY={secret}", "password": "hunter2"}
    made = message_views(
        _stored(
            {"role": "user", "content": f"```bash\nexport KEY={secret}\n```\n{link}"},
            {
                "role": "assistant",
                "content": None,
                "reasoning": secret,
                "tool_calls": [_call("a", "run", arguments)],
            },
            {"role": "tool", "tool_call_id": "a", "content": secret, "stenolog": {"failed": True}},
            {"role": "tool", "tool_call_id": "z", "content": {"token": secret}},
        )
    )
    call = made[1].calls[0]
    for html in (made[0].html, made[1].thoughts[0], call.arguments, call.result, made[2].html):
        assert shown in str(html)
        assert secret not in str(html).replace(shown, "")
    assert 'data-secret="hunter2"' in call.arguments
    assert secret not in call.line + call.error
    assert "export KEY=••••••" in call.line


def test_message_cannot_forge_the_placeholder_of_a_secret() -> None:
    [one] = message_views(_stored({"role": "user", "content": "x0x x1x \ue0000\ue001"}))
    assert "button" not in one.html.replace('<button type="button" class="copy', "")


def test_pictures_of_a_result_are_shown_at_its_call() -> None:
    image = {"type": "image", "source": {"media_type": "image/png", "data": "iVBORw0KGgo="}}
    [one] = message_views(
        _stored(
            {"role": "assistant", "content": None, "tool_calls": [_call("a")]},
            {"role": "tool", "tool_call_id": "a", "content": [image]},
        )
    )
    assert one.pictures == ()
    assert is_picture_url(one.calls[0].pictures[0])


def test_tool_calls_are_escaped_and_folded() -> None:
    hostile = "</pre></details><script>alert(1)</script>"
    arguments: list[Any] = [
        {"command": hostile},
        {"path": hostile, "old_string": hostile, "new_string": f"{hostile}\n{hostile}"},
        {"path": f"{hostile}.py", "content": hostile},
        {"todos": [{"content": hostile, "status": hostile}]},
        {hostile: f"{hostile}\n{hostile}"},
        hostile,
    ]
    for given in arguments:
        for result in (hostile, "\n".join([hostile] * 50), hostile * 1_000):
            [one] = message_views(
                _stored(
                    {"role": "assistant", "tool_calls": [_call("a", hostile, given)]},
                    {"role": "tool", "tool_call_id": "a", "content": result},
                )
            )
            html = one.calls[0].arguments + (one.calls[0].result or "")
            assert "<script" not in html
            assert html.count("<pre") == html.count("</pre>")
            assert html.count("<details") == html.count("</details>")


def test_secret_at_the_end_of_a_preview_is_covered_as_a_whole() -> None:
    secret = "sk-ant-api03-" + "A1b2C3d4" * 12
    for length in range(3_976, 4_004, 2):
        text = "a " * (length // 2) + secret + " b" * 5_000
        [made] = message_views(
            _stored(
                {"role": "assistant", "content": "", "tool_calls": [_call("a")]},
                {"role": "tool", "tool_call_id": "a", "content": text},
            )
        )
        html = str(made.calls[0].result)
        assert html.count('class="secret"') == 1
        assert html.count(secret) == 1


def test_number_that_is_a_secret_is_covered_in_json() -> None:
    [made] = message_views(_stored({"role": "user", "content": {"password": 123456}}))
    assert 'data-secret="123456"' in made.html
    assert made.html.count("••••••") == 1
    assert '"password"</span>' in made.html


def test_text_that_is_not_searched_for_secrets_is_covered_as_a_whole() -> None:
    secret = "sk-ant-api03-" + "A1b2C3d4" * 12
    long_text = "word " * 19_000
    text = f"{secret} {long_text}"
    edit = {"old_string": text, "new_string": text.replace(" ", "\n")}
    first, *others, newest = message_views(
        _stored(
            {"role": "assistant", "content": "", "tool_calls": [_call("a", "edit", edit)]},
            {"role": "tool", "tool_call_id": "a", "content": text},
            {"role": "user", "content": text},
            {"role": "user", "content": {"text": text}},
            *[{"role": "user", "content": long_text}] * 11,
        )
    )
    [call] = first.calls
    for html in (call.arguments, call.result, *(view.html for view in others)):
        assert secret not in re.sub('data-secret="[^"]*"', "", str(html))
    assert str(call.result).count("<pre>") == 1  # there is no rest to unfold
    assert f'data-secret="{text}" data-kind="unsearched text"' in others[0].html
    assert "<p>word word" in newest.html


def test_text_after_the_shown_part_is_not_shown_instead_of_secrets() -> None:
    secret = "sk-ant-api03-" + "A1b2C3d4" * 12
    text = (f"{secret} " * 1_000)[: MAX_RENDERED - 1] + " the end is not masked"
    [made] = message_views(_stored({"role": "user", "content": text}))
    assert "not masked" not in made.html
    assert '<p class="cut">21 more characters are not shown.</p>' in made.html


def test_message_of_a_program_is_folded_to_a_line_with_its_secrets_covered() -> None:
    command = f"<command-name>/login</command-name><command-args>{SECRET}</command-args>"
    bodies = [(command, "command"), ("", "compaction"), ("So far.", "summary"), ("Hello.", "")]
    messages = _stored(
        *({"role": "user", "content": text, "stenolog": {"kind": kind}} for text, kind in bodies)
    )
    command_view, summary, prompt = message_views(messages)
    assert (command_view.kind, summary.kind, prompt.kind) == ("program", "program", "user")
    assert command_view.program_line.startswith("/login ")
    assert SECRET[:8] not in command_view.program_line
    assert (summary.is_summary, prompt.is_summary, prompt.program_line) == (True, False, "")


def test_hidden_messages_are_marked_unless_all_are_shown_in_their_places() -> None:
    with InMemoryStore() as store:
        store.add_message("s", "user", "Hello.")
        store.clear("s")
        history = store.get_history("s", full=True)
    assert [view.hidden_mark for view in message_views(history)] == [True]
    assert [view.hidden_mark for view in message_views(history, mark_hidden=False)] == [False]


def test_control_sequences_are_not_shown_and_hide_no_secret() -> None:
    secret = "sk-ant-api03-" + "A1b2C3d4" * 12
    text = f"\x1b[32m{secret}\x1b[0m and \u202e{secret[:30]}\x9b1m{secret[30:]}\x07"
    [asked, made] = message_views(
        _stored(
            {"role": "user", "content": text},
            {"role": "assistant", "content": "", "tool_calls": [_call("a", "run", {"note": text})]},
            {"role": "tool", "tool_call_id": "a", "content": f"a\n{text}"},
        )
    )
    for html in (asked.html, made.calls[0].arguments, made.calls[0].result):
        assert str(html).count(f'data-secret="{secret}"') == 2
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]|32m", str(html))


def test_no_part_of_a_secret_is_in_the_line_of_a_call() -> None:
    secret = "ghp_" + "A1b2C3d4" * 5
    for length in range(70, 130):
        text = "a " * (length // 2) + "b" * (length % 2) + " " + secret + " end"
        [made] = message_views(
            _stored(
                {"role": "assistant", "tool_calls": [_call("a", "run", {"command": text})]},
                mark_tool_outcome(
                    {"role": "tool", "tool_call_id": "a", "content": text}, seconds=1.0, failed=True
                ),
            )
        )
        [call] = made.calls
        assert call.failed
        for line in (call.line, call.error):
            assert secret[:8] not in line
            assert len(line) <= 120


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("limit", "body"),
    [
        (2_000, lambda text: _calling({"todos": [{"content": text, "status": "pending"}]})),
        (MAX_BLOCK, lambda text: _calling({"command": text})),
        (MAX_BLOCK, lambda text: _calling({"path": "a.py", "content": text})),
        (MAX_BLOCK, lambda text: _calling({"old_string": "", "new_string": text})),
        (MAX_BLOCK, lambda text: _calling({"note": f"a\n{text}"})),
        (120, lambda text: _calling({"path": text, "content": "a"})),
        (120, lambda text: _calling({text: "a\nb"})),
        (MAX_RENDERED, lambda text: {"role": "user", "content": text}),
        (MAX_RENDERED, lambda text: {"role": "user", "content": {"a": text}}),
        (MAX_BLOCK, lambda text: {"role": "tool", "tool_call_id": "x", "content": text}),
    ],
)
def test_no_cut_shows_part_of_a_secret(limit: int, body: Callable[[str], dict[str, Any]]) -> None:
    secret = "ghp_" + "A1b2C3d4" * 5
    for length in (-38, -25, -12):
        filler = ("word " * (limit // 5 + 1))[: limit + length - 1]
        [made] = message_views(_stored(body(f"{filler} {secret} {'word ' * 100}")))
        html = f"{made.html} {[call.arguments for call in made.calls]}"
        assert "word" in html
        assert secret[:9] not in re.sub('data-secret="[^"]*"', "", html)


def _calling(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [_call("a", "run", arguments)]}


def test_no_part_of_a_secret_is_in_the_line_of_an_error() -> None:
    secret = "ghp_" + "A1b2C3d4" * 5
    call = {"role": "assistant", "tool_calls": [_call("a")]}
    for length in range(3_960, 4_000, 4):
        result = {"role": "tool", "tool_call_id": "a", "content": f"{' ' * length}{secret} and"}
        [made] = message_views(_stored(call, mark_tool_outcome(result, seconds=1.0, failed=True)))
        assert secret[:9] not in made.calls[0].error
