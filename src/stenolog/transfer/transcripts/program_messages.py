"""Messages that neither the user nor the model wrote, and their description in one line. Pure.

Readers of transcripts store the kind of such a message in its metadata. Viewer, exports and
`steno show` fold each of these messages into its line.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from stenolog.catalog.message_metadata import FIELD, identity_of
from stenolog.catalog.searchable_text import program_from
from stenolog.messages import TextPart, has_text, read_message
from stenolog.records import Message, SessionInfo

Kind = Literal["injected", "command", "interruption", "notification", "summary", "compaction"]
"""Kind of a message that neither the user nor the model wrote.

injected: text that the program added. command: a command of the program, or its output.
interruption: the user stopped the answer. notification: a background task ended. summary: written
by a compaction. compaction: the place of a compaction, without text.
"""
KIND: Final = "kind"
_TAG: Final = re.compile(r"\s*<([A-Za-z][\w-]*)")
_LABELS: Final = {
    "bash-stderr": "Output",
    "bash-stdout": "Output",
    "environment_context": "Environment",
    "ide_opened_file": "File open in the editor",
    "ide_selection": "Selection in the editor",
    "local-command-caveat": "Note about commands",
    "local-command-stderr": "Output",
    "local-command-stdout": "Output",
    "permissions": "Permissions",
    "session_context": "Environment",
    "skills_instructions": "Skills",
    "subagent_notification": "Subagent notification",
    "system-reminder": "Reminder",
    "task-notification": "Task notification",
    "user_instructions": "Instructions",
}
"""Description of a text by its first tag. Other tags are described by their names."""
_ANY_TAG: Final = re.compile(r"</?[A-Za-z][^<>]*>")
_SKILL_FOLDER: Final = re.compile(r"Base directory for this skill: (?:\S*/)?([^/\s]+)")
_INSTRUCTION_FILE: Final = re.compile(r"# (\S+) instructions")
_ATTACHMENT: Final = re.compile(r"\[(?!Request)(.+)\]", re.DOTALL)


def kind_of(body: Mapping[str, Any]) -> str:
    """Return the kind of a message; empty if the user or the model wrote it."""
    metadata = body.get(FIELD)
    kind = metadata.get(KIND) if isinstance(metadata, Mapping) else None
    return kind if isinstance(kind, str) else ""


def is_prompt(body: Mapping[str, Any]) -> bool:
    """Return whether the user wrote this message: it is no tool result and has no kind."""
    return has_text(body) and not kind_of(body)


def is_in_place(info: SessionInfo) -> bool:
    """Return whether the hidden messages of a session are shown by default, in their places.

    This is the case for sessions of other programs: readers want to see what happened, not what the
    program would send to the model next. `is_shown` tells which of the messages.
    """
    return bool(program_from(info.meta))


def is_shown(message: Message) -> bool:
    """Return whether a session of another program shows this message by default.

    A hidden message that was not imported was added and hidden in stenolog, for example by /clear.
    """
    # guard: cleared-not-shared
    return not message.hidden or identity_of(message.to_dict()) is not None


def program_line(body: Mapping[str, Any]) -> str:
    """Return a description of a message with a kind in one line, which may be long.

    Returns an empty text for messages without a kind, and for messages that only mark a place.
    """
    kind = kind_of(body)
    if not kind:
        return ""
    parts = list(read_message(body))
    texts = [part.text for part in parts if isinstance(part, TextPart) and part.text.strip()]
    if not texts:
        return "" if all(isinstance(part, TextPart) for part in parts) else "Attachment"
    if kind == "summary":
        return "Compaction: summary of the earlier messages"
    if kind == "interruption":
        return "Interrupted"
    is_system = body.get("role") in ("system", "developer")
    lines = (_describe(text, is_system=is_system) for text in texts)
    return ", ".join(dict.fromkeys(lines))


def _describe(text: str, *, is_system: bool) -> str:
    if (name := _element(text, "command-name")) is not None:
        return _join(name, _element(text, "command-args") or "")
    if (command := _element(text, "bash-input") or _element(text, "command")) is not None:
        return f"! {command}"
    if (result := _element(text, "summary")) is not None and _TAG.match(text):
        return _join(result, _element(text, "result") or "", separator=": ")
    if tag := _TAG.match(text):
        label = _LABELS.get(tag[1], _capitalize(tag[1].replace("_", " ").replace("-", " ")))
        content = _ANY_TAG.sub(" ", text) if label == "Output" else ""
        if tag[1] == "skill":
            content = _element(text, "name") or ""
        return _join(label, " ".join(content.split()), separator=": ")
    if skill := _SKILL_FOLDER.match(text):
        return f"Skill: {skill[1]}"
    if file := _INSTRUCTION_FILE.match(text):
        return f"Instructions: {file[1]}"
    if attachment := _ATTACHMENT.fullmatch(text.strip()):
        return _capitalize(" ".join(attachment[1].split()))
    return "Instructions" if is_system else " ".join(text.split())


def _element(text: str, name: str) -> str | None:
    """Return the content of the first XML element with this name in one line; None without one."""
    _, start, rest = text.partition(f"<{name}>")
    content, end, _ = rest.partition(f"</{name}>")
    return " ".join(content.split()) if start and end else None


def _join(first: str, second: str, *, separator: str = " ") -> str:
    return separator.join(filter(None, (first, second)))


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]
