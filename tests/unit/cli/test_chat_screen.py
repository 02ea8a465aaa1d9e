"""What a turn shows: finished lines once, what changes again and again, and the words for both."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rich.console import Console

from stenolog.agent.turn_events import (
    Answer,
    Event,
    ModelCalled,
    Notice,
    SummaryCreated,
    TextDelta,
    ThinkingDelta,
    ToolFinished,
    ToolStarted,
    UsageReported,
)
from stenolog.cli.chat_screen import (
    StatusLine,
    TurnScreen,
    duration_text,
    first_line,
    tool_call_text,
)
from stenolog.context.summarize import SummaryReport
from stenolog.errors import MaybeStored, NotStored
from stenolog.providers.chat_model import Usage

COMPACTION = SummaryReport(
    key="k", reason="tokens", first=1, last=8, count=8, tokens_before=900, tokens_after=300
)
DONE = Answer(key="k", text="Hello.", outcome="answered", seq=2)


class ScreenRecorder:
    """A screen whose lines are kept, and a clock that stands still."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.status = StatusLine("m")
        console = Console(width=60, color_system=None)
        self.screen = TurnScreen(console, self.status, show=self.show, clock=lambda: 5.0)

    def show(self, lines: Sequence[str]) -> None:
        self.lines += [line.rstrip() for line in lines]

    def show_events(self, *events: Event) -> None:
        for event in events:
            self.screen.show_event(event)


def test_only_the_last_block_of_an_answer_is_repainted() -> None:
    recorder = ScreenRecorder()
    recorder.show_events(TextDelta(text="One.\n\nTw"), TextDelta(text="o.\n\nThr"))
    assert recorder.lines == ["One."]
    assert [line.rstrip() for line in recorder.screen.live_lines(20)] == ["", "Two.", "", "Thr"]
    recorder.screen.finish(DONE)
    assert recorder.lines[:5] == ["One.", "", "Two.", "", "Thr"]
    assert recorder.screen.live_lines(20) == []


def test_live_text_shows_the_newest_lines() -> None:
    recorder = ScreenRecorder()
    recorder.show_events(TextDelta(text=" ".join(f"word{n}" for n in range(200))))
    assert len(recorder.screen.live_lines(3)) == 3
    assert "word199" in recorder.screen.live_lines(3)[-1]
    assert recorder.screen.live_lines(0) == []


def test_tool_is_shown_running_and_then_with_its_result() -> None:
    recorder = ScreenRecorder()
    recorder.show_events(
        TextDelta(text="Let me look."),
        ToolStarted(id="1", name="recall", arguments='{"q": "bike"}'),
    )
    assert recorder.lines == ["Let me look."]
    assert 'recall(q="bike") · 0.0 s' in recorder.screen.live_lines(5)[-1]
    recorder.show_events(
        ToolFinished(id="1", name="recall", text="a\nb", failed=False, seconds=0.31)
    )
    recorder.show_events(ToolFinished(id="2", name="now", text="no clock", failed=True, seconds=2))
    assert recorder.lines == [
        "Let me look.",
        "",
        '✓ recall(q="bike") · 0.3 s',
        "  a (+1 lines)",
        "✗ now() · 2.0 s",
        "  no clock",
    ]
    assert recorder.screen.live_lines(5) == []


def test_reasoning_is_a_spinner() -> None:
    recorder = ScreenRecorder()
    recorder.show_events(ThinkingDelta(text="Hm.\nWell"))
    assert "thinking" in recorder.screen.live_lines(5)[0]
    recorder.show_events(TextDelta(text="Yes."))
    assert recorder.screen.live_lines(5) == ["Yes."]
    recorder.screen.finish(DONE)
    assert recorder.lines[0] == "Yes."


def test_status_line_shows_the_tokens_of_a_turn() -> None:
    recorder = ScreenRecorder()
    recorder.show_events(
        ModelCalled(model="big", tokens=400, budget=1_000, recalled=2),
        UsageReported(usage=Usage(prompt=390, answer=10)),
        ModelCalled(model="big", tokens=850, budget=1_000),
        UsageReported(usage=Usage(prompt=840, answer=20)),
        TextDelta(text="Hello."),
    )
    recorder.screen.finish(DONE)
    words = "big · context 85% (≈850 of 1,000) · 1,230 tokens in, 30 out · 2 recalled"
    assert recorder.status.text() == words
    assert recorder.status.is_nearly_full
    assert f"{words} · 0.0 s".split() == " ".join(recorder.lines[1:]).split()


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Notice(text="the answer was cut off"), "! the answer was cut off."),
        (
            SummaryCreated(report=COMPACTION),
            "⊟ 8 messages (seq 1–8) were summarized: about 900 → 300 tokens. Use /undo to "
            "restore them.",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_notices_name_the_next_step(event: Event, words: str) -> None:
    recorder = ScreenRecorder()
    recorder.show_events(event)
    assert " ".join(recorder.lines) == words


def test_summary_after_the_answer_is_reported() -> None:
    recorder = ScreenRecorder()
    recorder.show_events(TextDelta(text="Hello."))
    recorder.screen.finish(DONE)
    before = len(recorder.lines)
    recorder.show_events(SummaryCreated(report=COMPACTION))
    assert recorder.lines[before].startswith("⊟ 8 messages")
    assert recorder.lines[-1] == ""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (DONE, "Hello."),
        (Answer(key="k", text="**done**", outcome="command"), "done"),
        (
            Answer(key="k", text="the server is down", outcome="failed"),
            "The server is down. Your message is saved; use /retry to try again.",
        ),
        (
            Answer(
                key="k", text="the disk is full", outcome="failed", saved=False, error=NotStored("")
            ),
            "The disk is full. Your message was not saved; send it again.",
        ),
        (
            Answer(key="k", text="no answer", outcome="failed", saved=False, error=MaybeStored("")),
            "No answer. Your message may not be saved; send it again.",
        ),
        (Answer(key="k", text="Old.", outcome="again"), "Old. This message was already answered."),
        (
            Answer(key="k", text="", outcome="elsewhere"),
            "Another process is answering in this session; the answer appears there.",
        ),
    ],
    ids=lambda value: getattr(value, "outcome", ""),
)
def test_every_outcome_has_a_text(answer: Answer, said: str) -> None:
    recorder = ScreenRecorder()
    recorder.screen.finish(answer)
    status = "m · 0.0 s" if answer.outcome == "answered" else ""
    assert " ".join(" ".join(recorder.lines).split()) == f"{said} {status}".strip()


def test_stopped_answer_is_shown_once() -> None:
    recorder = ScreenRecorder()
    recorder.show_events(TextDelta(text="Half of"))
    recorder.screen.finish(Answer(key="k", text="Half of [interrupted]", outcome="interrupted"))
    assert recorder.lines[:3] == [
        "Half of",
        "",
        "Stopped. The answer so far is saved; /retry asks for another",
    ]


def test_manual_summary_is_reported_once() -> None:
    recorder = ScreenRecorder()
    recorder.show_events(SummaryCreated(report=COMPACTION))
    recorder.screen.finish(Answer(key="k", text=f"{COMPACTION}.", outcome="command"))
    assert " ".join(recorder.lines).count("8 messages") == 1


def test_tool_names_and_results_cannot_control_the_terminal() -> None:
    recorder = ScreenRecorder()
    evil = "\x1b[2J\x1b]0;x\x07\r"
    recorder.show_events(
        ToolStarted(id="1", name=f"t{evil}", arguments=evil),
        ToolFinished(id="1", name=f"t{evil}", text=f"{evil}x", failed=False, seconds=0),
        ThinkingDelta(text=f"{evil}\n"),
        Notice(text=evil),
    )
    assert not set("\x1b\x07\r") & set("".join(recorder.lines))


@pytest.mark.parametrize(
    ("function", "given", "short"),
    [
        (lambda text: tool_call_text("f", text), "", "f()"),
        (lambda text: tool_call_text("f", text), '{"a": 1, "b": "x"}', 'f(a=1, b="x")'),
        (lambda text: tool_call_text("f", text), "no json", "f(no json)"),
        (lambda text: tool_call_text("f", text), '{"a": "' + 90 * "x" + '"}', f'f(a="{38 * "x"}…)'),
        (first_line, "\n\n  one \ntwo\n", "one (+1 lines)"),
        (first_line, " \n", ""),
        (duration_text, 0.04, "0.0 s"),
        (duration_text, 9.96, "10 s"),
        (duration_text, 185, "3 min 5 s"),
    ],
)
def test_long_values_are_shortened(
    function: Callable[[Any], str], given: object, short: str
) -> None:
    assert function(given) == short


def test_interrupted_answer_is_reported_once() -> None:
    recorder = ScreenRecorder()
    recorder.show_events(
        TextDelta(text="Half of"), Notice(text="x; the text so far is kept, /retry asks again")
    )
    recorder.screen.finish(Answer(key="k", text="Half of [interrupted]", outcome="interrupted"))
    assert recorder.lines[:3] == ["Half of", "", "! x; the text so far is kept, /retry asks again."]
    assert "Stopped" not in " ".join(recorder.lines)


def test_waiting_input_does_not_reset_the_token_count() -> None:
    recorder = ScreenRecorder()
    recorder.show_events(
        ModelCalled(model="m", tokens=10, budget=100),
        UsageReported(usage=Usage(prompt=7, answer=1)),
    )
    TurnScreen(Console(), recorder.status, show=lambda _: None)
    recorder.show_events(UsageReported(usage=Usage(prompt=5, answer=2)))
    assert recorder.status.text() == "m · context 10% (≈10 of 100) · 12 tokens in, 3 out"
