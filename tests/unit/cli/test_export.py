"""`steno export`: documents to share, what they leave out, and that nothing in them is alive."""

import json
import os
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from stenolog.catalog.message_metadata import mark_model, mark_tool_outcome
from stenolog.gateway.viewer import hidden_messages
from stenolog.stores.open_store import open_store
from stenolog.transfer.export.code_blocks import fence_for, split_blocks
from support.cli import Steno
from support.transcripts import SAMPLES

KEY = "sk-proj-" + "Ab3dEf6hIj9lMn2pQr5tUv8x" * 2
pytestmark = pytest.mark.usefixtures("told")

PIXEL = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture
def told(place: Path) -> Path:
    """A session with tools, thoughts, an image, code and a secret."""
    call = {"id": "1", "function": {"name": "ls", "arguments": '{"path": "."}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"look at **this**: {KEY}\n\n```py\nif a < b: pass\n```"},
        mark_model(
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
            model="tiny",
            seconds=1.25,
        ),
        mark_tool_outcome(
            {"role": "tool", "tool_call_id": "1", "content": "a.txt"}, seconds=0.5, failed=True
        ),
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "# Files\nsee https://example.org/x?a=1&b=2"},
                {"type": "image_url", "image_url": {"url": PIXEL}},
                {"type": "image_url", "image_url": {"url": "https://example.org/spy.png"}},
            ],
        },
    ]
    with open_store("workspace") as store:
        store.add_messages("k", messages)
    return place


class _Elements(HTMLParser):
    """The elements of a page, with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


# --- control sequences -----------------------------------------------------------------------

_ESC = "\x1b"
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.mark.parametrize("form", ["openai", "markdown", "html"])
def test_no_control_sequence_is_exported_and_none_hides_a_secret(steno: Steno, form: str) -> None:
    text = (
        f"{_ESC}[32m{KEY}{_ESC}[0m {_ESC}]0;title\x07{_ESC}{KEY} {KEY[:9]}\x9b1m{KEY[9:]} \u202eend"
    )
    arguments = json.dumps({"command": f"echo {text}", "note": {"deep": [text]}, text: 1})
    call = {"id": "1", "function": {"name": f"ls{_ESC}[1m", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": text},
        {"role": "tool", "tool_call_id": "1", "content": json.dumps({"stdout": text})},
        {"role": "tool", "tool_call_id": "2", "content": f"not JSON: {text}"},
    ]
    with open_store("workspace") as store:
        store.add_messages("colours", messages)
        store.set_meta("colours", title=text)
    output = steno("export", "colours", "--format", form).stdout
    for shown in (output, *(output.split("\n") if form != "openai" else _decoded(output))):
        assert not _CONTROLS.search(shown)
        assert KEY[12:28] not in shown
        assert "[32m" not in shown or "u001b[32m" in shown
    kept = steno("export", "colours", "--format", form, "--no-redact").stdout
    assert KEY in kept
    assert form == "openai" or not _CONTROLS.search(kept)


def _decoded(lines: str) -> list[str]:
    """Return the JSON lines with their escapes decoded, except in JSON texts."""
    return [json.dumps(json.loads(line), ensure_ascii=False) for line in lines.splitlines()]


def test_openai_export_without_redaction_and_jsonl_keep_control_sequences(steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_message("colours", "user", f"{_ESC}[32mred\u202e")
    for options in (["jsonl"], ["openai", "--no-redact"]):
        line = steno("export", "colours", "--format", *options).stdout
        assert json.loads(line)["content"] == f"{_ESC}[32mred\u202e"


def test_no_text_is_lost_after_a_cut_control_sequence(steno: Steno) -> None:
    quoted = "He said “stop” and “go”: TRANSFER 100.".encode().decode("latin-1")
    with open_store("workspace") as store:
        store.add_message("cut", "user", quoted)
        store.add_message("cut", "assistant", f"a {_ESC}_ cut and more\nthe rest")
    for arguments in (["export", "cut", "--format", "markdown"], ["show", "cut"]):
        shown = steno(*arguments).stdout
        assert "TRANSFER 100." in shown
        assert "cut and more\nthe rest" in shown


# --- the page --------------------------------------------------------------------------------


def test_html_page_has_every_part_and_a_link_to_each_message(
    steno: Steno,
) -> None:
    page = steno("export", "k", "--format", "html").stdout
    found = _Elements(page)
    ids = [attributes["id"] for tag, attributes in found.found if tag == "article"]
    links = [attributes["href"] for tag, attributes in found.found if tag == "a"]
    assert ids == ["m1", "m2", "m4"]
    assert [f"#{one}" for one in ids] == [one for one in links if str(one).startswith("#")]
    pictures = [attributes["src"] for tag, attributes in found.found if tag == "img"]
    assert pictures == [PIXEL]
    assert "<strong>this</strong>" in page
    assert '<span class="k">if</span>' in page
    assert '<details class="tool failed">' in page
    text = " ".join(found.text.split())
    assert "ls . · 500 ms · failed a.txt" in text
    assert "Thinking hm" in text
    assert "tiny 1.2 s" in text
    assert "prefers-color-scheme: dark" in page


def test_a_page_has_totals_an_outline_and_the_times_of_the_messages(steno: Steno) -> None:
    began = datetime(2026, 3, 1, 8, 30, tzinfo=UTC)
    usage = {"prompt": 1_200, "answer": 30, "cached": 0}
    bodies: list[dict[str, Any]] = [
        {"role": "user", "content": "First?"},
        {"role": "assistant", "content": "| a |\n|---|\n| b |", "stenolog": {"usage": usage}},
        {"role": "user", "content": "Second?"},
    ]
    with open_store("workspace") as store:
        for number, body in enumerate(bodies):
            store.add_messages("t", [body], at=[began + timedelta(minutes=4 * number)])
    page = steno("export", "t", "--format", "html").stdout
    text = " ".join(_Elements(page).text.split())
    assert "2026-03-01 08:30 – 2026-03-01 08:38 UTC" in text
    assert "Messages 3 Turns 2 Input tokens 1,200 Output tokens 30 Prompts" in text
    assert "Prompts First? 2026-03-01 08:30 Second? 2026-03-01 08:38" in text
    assert "<td>b</td>" in page
    assert "08:30 – 2026-03-01 08:38" in steno("export", "t", "--format", "markdown").stdout


def test_html_page_loads_nothing(steno: Steno) -> None:
    page = steno("export", "k", "--format", "html").stdout
    found = _Elements(page)
    loads = {"script", "link", "iframe", "object", "embed", "base", "form", "video", "audio"}
    assert not loads & {tag for tag, _ in found.found}
    sources = [attributes["src"] for _, attributes in found.found if "src" in attributes]
    assert sources == [PIXEL]
    assert "url(" not in page
    assert "@import" not in page
    policy = next(one for _, one in found.found if "http-equiv" in one)
    assert str(policy["content"]).startswith("default-src 'none'; style-src 'sha256-")
    assert "button" not in {tag for tag, _ in found.found}


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))",
    '[x](https://a/"onmouseover="alert(1))',
    "`</code></pre><script>alert(1)</script>`",
    "```\n</code></pre><script>alert(1)</script>",
    "**<script>alert(1)</script>**",
    "# <svg onload=alert(1)>",
    "</article></main><script>alert(1)</script>",
    "<!-- ",
    '" onclick="alert(1)',
    "https://a/'onmouseover='alert(1)",
]


@pytest.mark.quick(5)
@pytest.mark.parametrize("text", HOSTILE)
def test_field_content_is_escaped_in_html(steno: Steno, text: str) -> None:
    call = {"id": text, "function": {"name": text, "arguments": text}}
    with open_store("workspace") as store:
        store.add_messages(
            text,
            [
                {"role": text, "content": text, text: text},
                {"role": "user", "content": [{"type": text, "text": text}, text, {text: text}]},
                {"role": "assistant", "content": None, "tool_calls": [call, text, {text: 1}]},
                {"role": "tool", "tool_call_id": text, "content": text, "reasoning": text},
                {"role": "user", "content": [{"image_url": {"url": f"data:image/png,{text}"}}]},
                mark_model({"role": "assistant", "content": text}, model=text, seconds=1),
            ],
        )
        store.set_meta(text, title=text)
        store.set_summary(text, text)
    result = steno("export", "--format", "html", "--", text)
    assert result.exit_code == 0, result.stderr
    found = _Elements(result.stdout)
    tags = {tag for tag, _ in found.found}
    assert tags <= {
        *("html", "head", "meta", "title", "style", "body", "main", "h1", "p", "details"),
        *("summary", "article", "header", "span", "a", "pre", "code", "strong", "section"),
        *("dl", "dt", "dd", "div", "small", "nav", "ol", "li", "b", "br", "i", "time"),
    }
    for tag, attributes in found.found:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert (attributes.get("href") or "#").startswith(("#", "https://")), attributes
    assert result.stdout.rstrip().endswith("</html>")
    assert [one["id"] for tag, one in found.found if tag == "article"] == [
        f"m{seq}" for seq in range(1, 7)
    ]


# --- secrets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["html", "markdown"])
def test_secrets_are_replaced_and_counted(steno: Steno, form: str) -> None:
    result = steno("export", "k", "--format", form)
    assert KEY not in result.stdout
    assert "redacted" in result.stdout
    assert "Replaced 1 secret. Use --no-redact to keep them.\n" in result.stderr
    as_it_is = steno("export", "k", "--format", form, "--no-redact")
    assert KEY in as_it_is.stdout
    assert "taken out" not in as_it_is.stderr


def test_secret_is_found_in_every_field(steno: Steno) -> None:
    call = {"id": "1", "function": {"name": "x", "arguments": json.dumps({"key": KEY})}}
    broken = f"{KEY[:20]}\u200e\x08{KEY[20:]}"
    with open_store("workspace") as store:
        store.add_messages(
            "s",
            [
                {"role": "user", "content": f"{'word ' * 13}{KEY}"},
                {"role": "user", "content": broken},
                {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": KEY},
                {"role": "tool", "content": [{"type": "text", "text": KEY}, {"data": KEY}]},
                {"role": "user", "content": "", "extra": {"deep": [KEY]}},
            ],
        )
        store.set_summary("s", f"The key is {KEY}.")
    for form in ("html", "markdown"):
        result = steno("export", "s", "--format", form)
        assert KEY[:24] not in result.stdout, form
        assert KEY[-12:] not in result.stdout, form
        assert "Replaced 8 secrets" in result.stderr


@pytest.mark.parametrize("said", [f"It is: {'x' * 20} {KEY}", f"{KEY[:9]}\u200e{KEY[9:]} it is"])
def test_no_part_of_a_secret_is_in_the_title(steno: Steno, said: str) -> None:
    with open_store("workspace") as store:
        store.add_message("t", "user", said)
    for form in ("html", "markdown"):
        shown = steno("export", "t", "--format", form).stdout
        assert KEY[:16] not in shown, form


# --- Markdown --------------------------------------------------------------------------------


def test_markdown_has_a_heading_and_an_anchor_for_each_message(steno: Steno) -> None:
    shown = steno("export", "k", "--format", "markdown").stdout
    assert shown.startswith("# look at")
    assert re.findall(r'(?m)^## <a id="(m\d)"></a>\d · (\w+)$', shown) == [
        ("m1", "user"),
        ("m2", "assistant"),
        ("m3", "tool"),
        ("m4", "assistant"),
    ]
    assert "```py\nif a < b: pass\n```" in shown
    assert '<details><summary>ls .</summary>\n\n```json\n{\n  "path": "."\n}\n```' in shown


@pytest.mark.parametrize("form", ["markdown", "html"])
def test_documents_name_the_source_of_a_fork(steno: Steno, form: str) -> None:
    assert steno("fork", "k", "copy", "--at", "2").exit_code == 0
    assert "forked from k at message 2" in steno("export", "copy", "--format", form).stdout
    assert "forked from" not in steno("export", "k", "--format", form).stdout
    with open_store("workspace") as store:
        store.add_message("other", "user", "hello")
        store.set_meta("other", transcript={"forked_from": f"<b>{KEY}", "forked_after": "id"})
    document = steno("export", "other", "--format", form).stdout
    assert "forked from" in document
    assert "<b>" not in document
    assert KEY not in document


def test_markdown_has_unknown_fields_but_not_the_original_record_of_a_program(
    steno: Steno,
) -> None:
    body = {"role": "user", "content": "hello", "claude_code": {"uuid": "u1"}, "other": 2}
    with open_store("workspace") as store:
        store.add_messages("imported", [body])
    text = steno("export", "imported", "--format", "markdown").stdout
    assert "claude_code" not in text
    assert "u1" not in text
    assert '{"other": 2}' in text
    assert '"claude_code"' in steno("export", "imported").stdout, "jsonl is exactly as stored"


def test_anthropic_blocks_are_exported_as_calls_and_results(steno: Steno) -> None:
    image = {"type": "image", "source": {"media_type": "image/png", "data": "iVBORw0KGgo="}}
    use = {"type": "tool_use", "id": "1", "name": "login", "input": {"password": KEY}}
    results = [{"type": "tool_result", "tool_use_id": "1", "content": "welcome", "is_error": True}]
    with open_store("workspace") as store:
        store.add_message("a", "user", [image, {"type": "text", "text": "What is this?"}])
        thinking = {"type": "thinking", "thinking": "Let me see."}
        store.add_message("a", "assistant", [thinking, use])
        store.add_message("a", "user", results)
    shown = steno("export", "a", "--format", "markdown").stdout
    assert shown.startswith("# What is this?\n")
    assert "<details><summary>Thinking</summary>\n\n```\nLet me see.\n```" in shown
    assert '```json\n{\n  "password": "[redacted' in shown
    assert "<details><summary>login · result</summary>\n\n```\nwelcome\n```" in shown
    assert "failed" in shown
    assert "data:image/png;base64,iVBORw0KGgo=" in steno("export", "a", "--format", "html").stdout
    assert KEY not in shown


def test_markdown_message_cannot_break_the_document(steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_message("m", "user", "open:\n````\ncode that never ends")
        store.add_message("m", "user", "<!-- hide all <details> `<b>`")
        store.add_full_message("m", {"role": "tool", "content": "```\n</details>"})
        store.add_message("m", "user", "the end")
    shown = steno("export", "m", "--format", "markdown").stdout
    assert "```\ncode that never ends\n```" in shown
    assert "&lt;!-- hide all &lt;details> <code>&#60;b&#62;</code>" in shown
    assert "````\n```\n</details>\n````" in shown
    assert [block.text for block in split_blocks(shown) if block.is_code] == [
        "code that never ends",
        "```\n</details>",
    ]


def test_code_fence_is_longer_than_any_in_the_text() -> None:
    assert fence_for("no code") == "```"
    assert fence_for("a ```` b") == "`````"


# --- what is hidden, lines, files ------------------------------------------------------------


def test_page_has_summarized_messages_behind_a_divider(steno: Steno) -> None:
    result = steno("export", "telegram:123", "--format", "html")
    head, divider, rest = re.split(
        r'(<details class="earlier".*?</details>)', result.stdout, flags=re.DOTALL
    )
    assert "2 of them hidden" in head
    assert "<summary" in divider
    assert "2 messages replaced by a summary" in divider
    assert 'class="message user hidden-one"' in divider
    assert "message 1" in divider
    assert "message 3" not in divider
    assert "They counted to two." in head
    assert "message 3" in rest
    assert "are hidden" not in result.stderr


def test_page_with_only_visible_messages(steno: Steno) -> None:
    result = steno("export", "telegram:123", "--format", "html", "--visible-only")
    assert "message 1" not in result.stdout
    assert "They counted to two." in result.stdout
    assert "and 2 hidden, not shown" in result.stdout
    assert "2 messages are hidden. Use --all to include all messages." in result.stderr


def test_page_has_messages_that_the_user_removed_only_on_request(place: Path, steno: Steno) -> None:
    with open_store(place / "workspace") as store:
        store.add_message("telegram:123", "user", "Oh, forget that.")
        store.pop("telegram:123")
        store.add_message("cleared", "user", "Secret plans.")
        store.clear("cleared")
        store.add_message("cleared", "user", "Hello.")
    text = steno("export", "telegram:123", "--format", "html").stdout
    assert "message 1" in text
    assert "forget that" not in text
    assert "2 of them hidden, 1 more not shown" in text
    assert "Secret plans" not in steno("export", "cleared", "--format", "html").stdout
    whole = steno("export", "telegram:123", "--format", "html", "--all").stdout
    assert "forget that" in whole
    assert whole.count('<details class="earlier"') == 2


def test_page_of_a_compacted_transcript_has_all_messages(steno: Steno) -> None:
    # A compaction of Codex keeps the prompts in view, and hides the answers between them.
    assert steno("import", "--from", "codex", str(SAMPLES / "codex")).exit_code == 0
    key = "codex:01a1e437-f8fe-7d63-b58e-5b07d6b939fb"
    result = steno("export", key, "--format", "html")
    assert "13 of them hidden</small>" in result.stdout
    # They are in their places, not behind dividers.
    assert '<details class="earlier"' not in result.stdout
    assert "hidden from the model" not in result.stdout
    assert "are hidden" not in result.stderr
    markdown = steno("export", key, "--format", "markdown")
    assert markdown.stdout.count('<a id="m') == 17
    assert "are hidden" not in markdown.stderr


def test_messages_cleared_after_an_import_are_shown_only_on_request(
    place: Path, steno: Steno
) -> None:
    assert steno("import", "--from", "codex", str(SAMPLES / "codex")).exit_code == 0
    key = "codex:01a1e437-f8fe-7d63-b58e-5b07d6b939fb"
    commands = [
        ["show", key],
        *(["export", key, "--format", name] for name in ("html", "markdown")),
    ]
    with open_store(place / "workspace") as store:
        store.add_message(key, "user", "Secret plans.")
        store.clear(key)
        for number in range(30):  # there is no undo step of /clear any more
            seq = store.add_message(key, "user", f"{number}")
            store.admin.hide(key, seq, seq)
        store.add_message(key, "user", "Go on.")
    for command in commands:
        result = steno(*command)
        assert "Secret plans." not in result.stdout
        assert "Go on." in result.stdout
        assert "31 messages are hidden. Use --all" in result.stderr
        assert "Secret plans." in steno(*command, "--all").stdout
    # The imported messages are still in their places.
    assert steno(*commands[2]).stdout.count('<a id="m') == 18


@pytest.mark.parametrize("format_", ["html", "markdown"])
def test_messages_of_a_program_are_folded_lines_without_secrets(
    place: Path, steno: Steno, format_: str
) -> None:
    command = f"<command-name>/login</command-name><command-args>{'x ' * 20}{KEY}</command-args>"
    with open_store(place / "workspace") as store:
        for text, kind in ((command, "command"), ("", "compaction"), ("Done.", "summary")):
            body = {"role": "user", "content": text, "stenolog": {"kind": kind}}
            store.add_full_message("told", body)
        store.add_message("told", "user", "A prompt.")
    shown = steno("export", "told", "--format", format_).stdout
    assert "/login x x" in shown
    assert "Compaction: summary of the earlier messages" in shown
    assert KEY[:12] not in shown
    assert shown.count("<details") == 2
    if format_ == "html":
        assert shown.count('<article class="message program') == 2
        assert shown.count('<article class="message user') == 1
        assert "<h1>A prompt.</h1>" in shown
    else:
        assert shown.count("\n## ") == 1
        assert shown.startswith("# A prompt.\n")


def test_secrets_in_summarized_messages_are_replaced(place: Path, steno: Steno) -> None:
    with open_store(place / "workspace") as store:
        store.add_message("old", "user", f"The key is {KEY}.")
        store.checkpoint("old", summary=f"They use {KEY}.", upto=1)
        store.add_message("old", "user", "Hello.")
    result = steno("export", "old", "--format", "html")
    assert "1 message replaced by a summary" in result.stdout
    assert KEY not in result.stdout
    assert "Replaced 2 secrets." in result.stderr


@pytest.mark.parametrize("limit", ["MAX_SUMMARIZED", "MAX_SUMMARIZED_BYTES"])
def test_page_leaves_out_very_many_summarized_messages(
    steno: Steno, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_messages, limit, 1)
    result = steno("export", "telegram:123", "--format", "html")
    assert "message 1" not in result.stdout
    assert "and 2 hidden, not shown" in result.stdout
    assert "2 messages are hidden. Use --all to include all messages." in result.stderr
    whole = steno("export", "telegram:123", "--format", "html", "--all").stdout
    assert "message 1" in whole


def test_openai_format_has_only_known_fields(steno: Steno) -> None:
    lines = steno("export", "k", "--format", "openai").stdout.splitlines()
    fields = [set(json.loads(line)) for line in lines]
    assert fields == [
        {"role", "content"},
        {"role", "content", "tool_calls"},
        {"role", "content", "tool_call_id"},
        {"role", "content"},
    ]
    assert KEY not in lines[0]
    assert KEY in steno("export", "k", "--format", "openai", "--no-redact").stdout


_OTHER_FORMATS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "anthropic": (
        [
            {"role": "user", "content": [{"type": "text", "text": "How deep?"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "depth"}]},
        ],
        "message 2 of 'other' in the format openai: a part of its content has the type 'tool_use'",
    ),
    "responses input": (
        [{"role": "user", "content": [{"type": "input_text", "text": "How deep?"}]}],
        "message 1 of 'other' in the format openai: a part of its content has the type",
    ),
    "responses item": (
        [
            {"role": "user", "content": "How deep?"},
            {"type": "function_call", "call_id": "c", "name": "depth", "arguments": "{}"},
        ],
        "message 2 of 'other' in the format openai: it is an item of type 'function_call'",
    ),
    "object": ([{"role": "user", "content": {"a": 1}}], "its content is no text"),
    "other role": ([{"role": "human", "content": "a"}], "its role is 'human'"),
    "no role": ([{"content": "a"}], "it has no role"),
}


@pytest.mark.parametrize("name", _OTHER_FORMATS)
def test_openai_format_refuses_messages_of_other_formats_and_writes_nothing(
    told: Path, steno: Steno, name: str
) -> None:
    messages, reason = _OTHER_FORMATS[name]
    with open_store("workspace") as store:
        store.add_messages("other", messages)
    for options in (["-o", "other.jsonl"], []):
        result = steno("export", "other", "--format", "openai", *options)
        assert result.exit_code == 1
        assert reason in result.stderr
        assert "Use the format jsonl" in result.stderr
        assert result.stdout == ""
    assert not [path.name for path in told.iterdir() if "other" in path.name]
    (told / "kept").write_text("before")
    assert steno("export", "other", "--format", "openai", "-o", "kept", "--force").exit_code == 1
    assert (told / "kept").read_text() == "before"
    result = steno("export", "--all", "--format", "openai", "-o", "all", "--prefix", "other")
    assert (result.exit_code, list((told / "all").iterdir())) == (3, [])


def test_file_is_private_complete_and_formatted_by_suffix(told: Path, steno: Steno) -> None:
    result = steno("export", "k", "-o", "k.html")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "Wrote 4 messages to k.html." in result.stderr
    assert (told / "k.html").read_text() == steno("export", "k", "--format", "html").stdout
    assert (told / "k.html").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in told.iterdir() if "k.html" in path.name] == ["k.html"]
    assert steno("export", "k", "-o", "k.md").exit_code == 0
    assert (told / "k.md").read_text().startswith("# ")
    assert steno("export", "k", "-o", "k.md", "--format", "jsonl", "--force").exit_code == 0
    assert (told / "k.md").read_text() == steno("export", "k").stdout


def test_lone_surrogate_is_exported_in_every_format(steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_message("h", "user", "half \ud800 of it")
    for form in ("html", "markdown"):
        assert "half ? of it" in steno("export", "h", "--format", form).stdout
    line = steno("export", "h", "--format", "openai", "--redact").stdout
    assert json.loads(line)["content"] == "half \ud800 of it"


def test_every_format_replaces_the_same_secrets(steno: Steno) -> None:
    text = '{"p\\u0061ssword":"hunter2"}'
    call = {"id": "1", "function": {"name": "f", "arguments": text}}
    with open_store("workspace") as store:
        store.add_message("s", "user", text)
        store.add_full_message("s", {"role": "assistant", "content": None, "tool_calls": [call]})
        store.add_full_message("s", {"role": "tool", "tool_call_id": "1", "content": text})
        store.add_full_message("s", {"role": "user", "content": [{"type": "text", "text": text}]})
    for form in ("html", "markdown", "openai", "jsonl"):
        result = steno("export", "s", "--format", form, "--redact")
        assert "hunter2" not in result.stdout, form
        assert result.stderr.splitlines()[-1].startswith("Replaced 4 secrets"), form


def test_json_text_is_unchanged_in_a_document(steno: Steno) -> None:
    said = '{\n  "a": 1.10,\n  "token": "t-1",\n  "a": 1e5,\n  "limit": {"tokens": 5000}\n}'
    with open_store("workspace") as store:
        store.add_full_message("j", {"role": "tool", "content": said})
    shown = steno("export", "j", "--format", "markdown").stdout
    assert said.replace("t-1", "[redacted: token]") in shown


def test_export_writes_to_a_pipe_and_follows_a_link(told: Path, steno: Steno) -> None:
    pipe, real, link = told / "pipe", told / "real.md", told / "link.md"
    os.mkfifo(pipe)
    # Both ends: who writes waits for nobody, and what is written fits into the pipe.
    reader = os.open(pipe, os.O_RDWR)
    try:
        assert steno("export", "k", "-o", str(pipe), "--force").exit_code == 0
        assert os.read(reader, 20).startswith(b'{"role":"user"')
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    real.write_text("before")
    link.symlink_to(real)
    assert steno("export", "k", "-o", str(link)).exit_code == 1
    assert steno("export", "k", "-o", str(link), "--force").exit_code == 0
    assert link.is_symlink()
    assert "before" not in real.read_text()


# --- all sessions ----------------------------------------------------------------------------


def test_all_sessions_are_written_to_a_folder_with_an_index(told: Path, steno: Steno) -> None:
    with open_store("workspace") as store:
        store.add_message("../../etc/passwd", "user", "../up & <b>down</b>")
        store.add_message("same", "user", "../up & <b>down</b>")
        keys = store.list_sessions()
    result = steno("export", "--all", "--format", "html", "-o", "out")
    assert result.exit_code == 0, result.stderr
    files = sorted(path.name for path in (told / "out").iterdir())
    assert len(files) == len(keys) + 1
    assert all(re.fullmatch(r"index\.html|[a-z0-9_-]+-[0-9a-f]{10}\.html", one) for one in files)
    assert f"Wrote {len(keys)} sessions with" in result.stderr
    index = _Elements((told / "out" / "index.html").read_text())
    links = [attributes["href"] for tag, attributes in index.found if tag == "a"]
    assert sorted(map(str, links)) == [one for one in files if one != "index.html"]
    assert "../up & <b>down</b>" in index.text
    assert {tag for tag, _ in index.found}.isdisjoint({"b", "script"})
    for path in (told / "out").iterdir():
        assert KEY not in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600
    again = steno("export", "--all", "--format", "html", "-o", "out", "--json")
    assert json.loads(again.stdout)["sessions"] == len(keys)
    assert sorted(path.name for path in (told / "out").iterdir()) == files


def test_export_of_all_sessions_does_not_overwrite_link_targets(told: Path, steno: Steno) -> None:
    own = told / "own.txt"
    own.write_text("mine")
    command = ("export", "--all", "--format", "html", "-o", "out")
    assert steno(*command).exit_code == 0
    files = [path for path in (told / "out").iterdir() if path.name != "index.html"]
    for path in files:
        path.unlink()
        path.symlink_to(own)
    assert steno(*command).exit_code == 0
    assert own.read_text() == "mine"
    assert all(path.is_file() and not path.is_symlink() for path in files)


def test_title_and_file_name_are_redacted_unless_the_user_keeps_secrets(
    told: Path, steno: Steno
) -> None:
    for options, is_kept in ((["--no-redact"], True), ([], False)):
        assert (
            steno("export", "--all", "--format", "html", "-o", "all", "--force", *options).exit_code
            == 0
        )
        assert (KEY in (told / "all" / "index.html").read_text()) == is_kept
        names = " ".join(path.name for path in (told / "all").iterdir())
        assert ("sk-proj-" in names) == is_kept
        for path in (told / "all").iterdir():
            path.unlink()
