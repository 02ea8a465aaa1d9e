"""Tool calls and results as blocks for reading: diffs, shell commands, files, checklists. Pure.

The blocks follow from the shape of the arguments, not from the name of the tool. Pages, exports and
the terminal show the same blocks. Work and size are bounded for any input.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from json import JSONEncoder
from pathlib import PurePosixPath
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from stenolog.messages import as_json
from stenolog.transfer.export.code_blocks import LANGUAGES

MAX_BLOCK: Final = 100_000
"""Maximum number of characters of a block; longer text is cut."""
MAX_PREVIEW_LINES: Final = 20
"""Number of lines that are shown of a long text before it is unfolded."""
MAX_OPEN_LINES: Final = 40
"""Maximum number of lines of a text that is not folded."""
_MAX_DECODED: Final = 1_000_000
"""Maximum number of characters of JSON that are decoded."""
_MAX_DIFF_LINES: Final = 2_000
"""Maximum number of lines of all diffs of one call; further lines are only counted."""
_MAX_COMPARED: Final = 1_000
"""Maximum number of lines of one edit that are compared line by line."""
_MAX_LONG_LINES: Final = 1_000_000
"""Maximum number of lines of all edits on one page that have more than _MAX_COMPARED lines."""
_MAX_CHANGES: Final = 60
"""Maximum number of changed lines that the comparison looks for."""
_MAX_ITEMS: Final = 200
"""Maximum number of items of a checklist."""
_MAX_BLOCKS: Final = 50
"""Maximum number of blocks of one call."""
_CONTEXT: Final = 3
"""Number of unchanged lines that are shown around a change."""
_MAX_SUMMARY: Final = 120
"""Maximum length of the summary of a call or of an error."""

_OLD_AND_NEW: Final = (
    ("old_string", "new_string"),
    ("old_str", "new_str"),
    ("oldString", "newString"),
    ("old_text", "new_text"),
    ("oldText", "newText"),
    ("search", "replace"),
)
_PATHS: Final = (
    *("file_path", "filePath", "path", "notebook_path", "absolute_path", "target_file"),
    *("filename", "file_name", "file"),
)
_COMMANDS: Final = ("command", "cmd")
_CONTENTS: Final = ("content", "contents", "file_text", "new_source", "new_str", "insert_text")
_STEPS: Final = ("content", "step", "text", "title", "task", "description")
_MAIN: Final = (
    *(*_COMMANDS, "pattern", "query", *_PATHS, "url", "question", "description", "prompt"),
    *("message", "name", "key", "id"),
)
"""Arguments that tell most about a call, most telling first."""
_DONE: Final = frozenset({"completed", "complete", "done", "finished", "closed", "success"})
_ACTIVE: Final = frozenset({"in_progress", "in-progress", "active", "running", "started", "doing"})
_PATCH: Final = re.compile(
    r"\s{0,8}(?:\*\*\* Begin Patch|diff --git |Index: |--- [^\n]{1,500}\n\+\+\+ |@@ -\d)"
)
_PATCHED_FILE: Final = re.compile(
    r"(?m)^(?:\*\*\* (?:Add|Update|Delete) File: |\+\+\+ (?:b/)?)(.+)$"
)
_HEADS: Final = ("@@", "*** ", "diff --git ", "--- ", "+++ ", "index ", "Index: ", "new file ")
_SUFFIX_LANGUAGES: Final = {"htm": "html", "mjs": "js", "cjs": "js", "svg": "xml", "cfg": "ini"}
_SHELLS: Final = frozenset({"bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/bin/zsh"})
_ERROR_TAGS: Final = re.compile(r"</?tool_use_error>")
_EXIT_CODE: Final = re.compile(r"(?i)(?:exit code|process exited with code):? -?\d{1,4}")
_LAYOUT: Final = JSONEncoder(indent=2, ensure_ascii=False)

LineKind = Literal["added", "removed", "same", "head"]
BlockKind = Literal["diff", "shell", "code", "checklist", "text", "json"]
ItemState = Literal["done", "active", "open"]


class DiffLine(Struct, frozen=True):
    """A line of a diff, without its sign."""

    kind: LineKind
    text: str

    @property
    def sign(self) -> str:
        """The character in front of the line in a unified diff."""
        return {"added": "+", "removed": "-", "same": " ", "head": ""}[self.kind]


class ChecklistItem(Struct, frozen=True):
    """A step of a plan."""

    text: str
    state: ItemState


class ToolBlock(Struct, frozen=True, kw_only=True):
    """A part of the arguments or the result of a tool call."""

    kind: BlockKind
    label: str = ""
    """Name of the argument, path of the file, or description of the command; may be empty."""
    text: str = ""
    """Text of the block, for all kinds except diff and checklist."""
    language: str = ""
    """Name of the language of code, as in a Markdown fence."""
    lines: tuple[DiffLine, ...] = ()
    items: tuple[ChecklistItem, ...] = ()
    omitted: int = 0
    """Number of lines or items that are not in the block."""


class DiffBudget:
    """The number of lines that may still be compared, by default on one page."""

    def __init__(self, left: int = 20_000) -> None:
        self.left = left
        self._long_left = _MAX_LONG_LINES

    def take(self, count: int) -> bool:
        """Return whether this number of lines may be compared, and count them if so."""
        if count > min(self.left, _MAX_COMPARED):
            return False
        self.left -= count
        return True

    def take_long(self, count: int) -> bool:
        """Return whether an edit with this number of lines may be split, and count a long one."""
        if count > _MAX_COMPARED:
            self._long_left -= count
        return count <= _MAX_COMPARED or self._long_left >= 0


# --- summary ---------------------------------------------------------------------------------


def summary_of(arguments: Any) -> str:
    """Return the argument that tells most about a call, in one line; empty if there is none."""
    given = decoded(arguments)
    if isinstance(given, str):
        return _summary_of_text(given)
    if not isinstance(given, Mapping):
        return "" if given is None else _line(as_json(given))
    for name in _MAIN:
        value = given.get(name)
        if name in _COMMANDS and (command := _command(value)) is not None:
            return _line(command)
        if isinstance(value, str) and value.strip():
            return _line(value)
    steps = next(filter(None, map(_checklist, given.values())), ())
    if steps:
        done = sum(step.state == "done" for step in steps)
        return f"{done} of {len(steps)} done"
    texts = [value for value in given.values() if isinstance(value, str) and value.strip()]
    if texts:
        return _summary_of_text(texts[0])
    return _line(as_json(given)) if given else ""


def error_line(text: str) -> str:
    """Return the first line of an error that tells something; empty if there is none."""
    start = _ERROR_TAGS.sub("", text[:4_000])
    lines = list(islice((line.strip() for line in start.splitlines() if line.strip()), 2))
    if len(lines) == 2 and _EXIT_CODE.fullmatch(lines[0]):
        return _line(f"{lines[0]}: {lines[1]}")
    return _line(lines[0]) if lines else ""


def _summary_of_text(text: str) -> str:
    if _PATCH.match(text):
        files = list(islice(_PATCHED_FILE.finditer(text[:MAX_BLOCK]), 4))
        if files:
            more = "" if len(files) < 4 else ", …"
            return _line(", ".join(one[1].strip() for one in files[:3]) + more)
    return _line(text)


def _line(text: str) -> str:
    line = " ".join(text[: 4 * _MAX_SUMMARY].split())
    return line if len(line) <= _MAX_SUMMARY else line[: _MAX_SUMMARY - 1].rstrip() + "…"


# --- blocks ----------------------------------------------------------------------------------


def argument_blocks(arguments: Any, budget: DiffBudget | None = None) -> tuple[ToolBlock, ...]:
    """Return the arguments of a call as blocks."""
    given = decoded(arguments)
    return tuple(islice(_blocks(given, budget or DiffBudget()), _MAX_BLOCKS))


def result_blocks(result: Any, budget: DiffBudget | None = None) -> tuple[ToolBlock, ...]:
    """Return the result of a call as blocks. Text that is not JSON stays unchanged."""
    given = decoded(result)
    if isinstance(given, str) and not _PATCH.match(given):
        return (_text_block(_ERROR_TAGS.sub("", given) if len(given) < MAX_BLOCK else given),)
    return tuple(islice(_blocks(given, budget or DiffBudget()), _MAX_BLOCKS))


def decoded(value: Any) -> Any:
    """Return the value of a JSON text; other texts, and too long JSON, are returned unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    if len(value) > _MAX_DECODED:
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return value


def laid_out(value: Any) -> str:
    """Return a value as indented JSON, cut at a little more than MAX_BLOCK characters."""
    pieces, size = list[str](), 0
    try:
        for piece in _LAYOUT.iterencode(value):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BLOCK:  # guard: layout-bounded
                break
    except (TypeError, ValueError, RecursionError):
        return cut(as_json(value))
    return cut("".join(pieces))


def cut(text: str) -> str:
    """Return the start of a text, with a note if more follows."""
    return text if len(text) <= MAX_BLOCK else text[:MAX_BLOCK] + "\n… cut"


def _blocks(given: Any, budget: DiffBudget) -> Iterator[ToolBlock]:
    match given:
        case None:
            return
        case str() if _PATCH.match(given):
            yield _patch(given, "")
        case str():
            if given:
                yield _text_block(given)
        case Mapping():
            yield from _fields(given, budget)
        case list() if steps := _checklist(given):
            yield _steps_block(steps, len(given))
        case _:
            yield ToolBlock(kind="json", text=laid_out(given))


def _fields(given: Mapping[str, Any], budget: DiffBudget) -> Iterator[ToolBlock]:
    """Yield the blocks of an object. Each field is shown once."""
    left = dict(given)
    path_name = next((name for name in _PATHS if isinstance(left.get(name), str)), "")
    path = left[path_name] if path_name else ""
    edits = [*_edit_of(left), *_edits_in(left)]
    room = _MAX_DIFF_LINES
    for old, new in edits:
        diff, omitted = _compare(old, new, room, budget)
        room -= len(diff)
        yield ToolBlock(kind="diff", label=_line(path), lines=tuple(diff), omitted=omitted)
    contents = [] if edits or not path else [name for name in _CONTENTS if _is_text(left, name)]
    for name in contents[:1]:
        text = cut(left.pop(name))
        yield ToolBlock(kind="code", label=_line(path), text=text, language=language_of(path))
    if edits or contents:
        left.pop(path_name, None)
    elif not path:
        for name in _COMMANDS:
            if (command := _command(left.get(name))) is not None:
                del left[name]
                yield ToolBlock(kind="shell", label=_caption(left), text=cut(command))
    for name, value in list(left.items()):
        if isinstance(value, str) and _PATCH.match(value):
            yield _patch(value, name)
        elif steps := _checklist(value):
            yield _steps_block(steps, len(value))
        elif isinstance(value, str) and "\n" in value.strip("\n"):
            yield _text_block(value, name)
        else:
            continue
        del left[name]
    if left or not given:
        yield ToolBlock(kind="json", text=laid_out(left))


def _caption(given: dict[str, Any]) -> str:
    """Return a description that fits into a line, and remove it from the fields."""
    text = given.get("description")
    if not isinstance(text, str) or not text or _line(text) != text:
        return ""
    del given["description"]
    return text


def _is_text(given: Mapping[str, Any], name: str) -> bool:
    return isinstance(given.get(name), str)


def _text_block(text: str, label: str = "") -> ToolBlock:
    return ToolBlock(kind="text", label=_line(label), text=cut(text))


def _command(value: Any) -> str | None:
    """Return a shell command; only the script of `["bash", "-lc", script]`."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        return None
    if len(value) == 3 and value[0] in _SHELLS and value[1].startswith("-"):
        return str(value[2])
    return " ".join(value)


def language_of(path: str) -> str:
    """Return the language of a file by the suffix of its name; empty if it is not known."""
    name = PurePosixPath(path[-200:].replace("\\", "/")).name.lower()
    suffix = name.rpartition(".")[2]
    suffix = _SUFFIX_LANGUAGES.get(suffix, suffix)
    return suffix if suffix in LANGUAGES else ""


# --- checklists ------------------------------------------------------------------------------


def _checklist(value: Any) -> tuple[ChecklistItem, ...]:
    """Return the items of a list of steps with a status; empty if the value is none."""
    if not isinstance(value, list) or not value:
        return ()
    items = []
    for one in value[:_MAX_ITEMS]:
        if not isinstance(one, Mapping):
            return ()
        text = next((one[name] for name in _STEPS if isinstance(one.get(name), str)), None)
        state = _state(one)
        if text is None or state is None:
            return ()
        items.append(ChecklistItem(text[:2_000], state))
    return tuple(items)


def _state(item: Mapping[str, Any]) -> ItemState | None:
    status = item.get("status")
    if isinstance(status, str):
        low = status.lower()
        return "done" if low in _DONE else "active" if low in _ACTIVE else "open"
    for name in ("done", "completed"):
        if isinstance(item.get(name), bool):
            return "done" if item[name] else "open"
    return None


def _steps_block(steps: tuple[ChecklistItem, ...], count: int) -> ToolBlock:
    return ToolBlock(kind="checklist", items=steps, omitted=count - len(steps))


# --- diffs -----------------------------------------------------------------------------------


def _edit_of(given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the old and new text of an edit, and remove them from the fields."""
    for old, new in _OLD_AND_NEW:
        if _is_text(given, old) and _is_text(given, new):
            yield given.pop(old), given.pop(new)
            return


def _edits_in(given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the edits of a list; it stays a field unless all its items are edits."""
    listed = given.get("edits")
    if not isinstance(listed, list) or not 0 < len(listed) <= _MAX_BLOCKS:
        return
    found = [list(_edit_of(dict(one))) if isinstance(one, Mapping) else [] for one in listed]
    if all(found):
        del given["edits"]
        for one in found:
            yield from one


def _patch(text: str, label: str) -> ToolBlock:
    """Return the lines of a patch or unified diff."""
    shown = cut(text.strip("\n")).split("\n")
    lines = tuple(_patch_line(line) for line in shown[:_MAX_DIFF_LINES])
    label = "" if label in ("input", "patch", "diff") else label
    return ToolBlock(kind="diff", label=_line(label), lines=lines, omitted=len(shown) - len(lines))


def _patch_line(line: str) -> DiffLine:
    if line.startswith(_HEADS):
        return DiffLine("head", line)
    kinds: dict[str, LineKind] = {"+": "added", "-": "removed"}
    kind = kinds.get(line[:1], "same")
    return DiffLine(kind, line[1:] if line[:1] in ("+", "-", " ") else line)


def _compare(old: str, new: str, room: int, budget: DiffBudget) -> tuple[list[DiffLine], int]:
    """Return at most `room` lines of the diff of two texts, and the number of omitted ones."""
    count = old.count("\n", 0, MAX_BLOCK) + new.count("\n", 0, MAX_BLOCK) + 2
    if room <= 0 or not budget.take_long(count):
        return [], count
    before, after = _split(old), _split(new)
    head = _common(before, after)
    tail = _common(before[head:][::-1], after[head:][::-1])
    changed_before = before[head : len(before) - tail]
    changed_after = after[head : len(after) - tail]
    same = [DiffLine("same", line) for line in before[:head]]
    made = [*same, *_changes(changed_before, changed_after, budget)]
    made += [DiffLine("same", line) for line in before[len(before) - tail :]]
    lines = list(_near_changes(made))
    shown = lines[: max(0, room)]
    return shown, len(lines) - len(shown)


def _split(text: str) -> list[str]:
    lines = cut(text).split("\n")
    return lines[:-1] if lines and not lines[-1] else lines


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the number of equal lines at the start."""
    pairs = zip(first, second, strict=False)
    return next(
        (number for number, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second))
    )


def _changes(before: list[str], after: list[str], budget: DiffBudget) -> list[DiffLine]:
    """Return the diff of two lists of lines; without comparison if that takes too long."""
    if before and after and budget.take(len(before) + len(after)):
        found = _shortest_diff(before, after)
        if found is not None:
            return found
    removed = [DiffLine("removed", line) for line in before]
    return [*removed, *(DiffLine("added", line) for line in after)]


def _shortest_diff(before: list[str], after: list[str]) -> list[DiffLine] | None:
    """Return the shortest diff (Myers), or None if it has more than _MAX_CHANGES changes.

    Takes at most about 2 * _MAX_CHANGES * (len(before) + len(after)) steps.
    """
    reach = {1: 0}
    history: list[dict[int, int]] = []
    for changes in range(_MAX_CHANGES + 1):
        history.append(dict(reach))
        for diagonal in range(-changes, changes + 1, 2):
            down = diagonal == -changes or (
                diagonal != changes and reach[diagonal - 1] < reach[diagonal + 1]
            )
            x = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            y = x - diagonal
            while x < len(before) and y < len(after) and before[x] == after[y]:
                x, y = x + 1, y + 1
            reach[diagonal] = x
            if x >= len(before) and y >= len(after):
                return _walk_back(before, after, history)
    return None


def _walk_back(
    before: list[str], after: list[str], history: list[dict[int, int]]
) -> list[DiffLine]:
    lines: list[DiffLine] = []
    x, y = len(before), len(after)
    for changes in range(len(history) - 1, -1, -1):
        reach = history[changes]
        diagonal = x - y
        down = diagonal == -changes or (
            diagonal != changes and reach[diagonal - 1] < reach[diagonal + 1]
        )
        start = reach[diagonal + 1] if down else reach[diagonal - 1]
        from_x = start if changes else 0
        from_y = start - (diagonal + 1 if down else diagonal - 1) if changes else 0
        while x > from_x and y > from_y:
            x, y = x - 1, y - 1
            lines.append(DiffLine("same", before[x]))
        if changes and down:
            lines.append(DiffLine("added", after[from_y]))
        elif changes:
            lines.append(DiffLine("removed", before[from_x]))
        x, y = from_x, from_y
    return lines[::-1]


def _near_changes(lines: Sequence[DiffLine]) -> Iterator[DiffLine]:
    """Yield the lines of a diff; long runs of unchanged lines are replaced by their number."""
    at = 0
    while at < len(lines):
        end = at
        while end < len(lines) and lines[end].kind == "same":
            end += 1
        if end == at:
            yield lines[at]
            at += 1
            continue
        lead = _CONTEXT if at > 0 else 0
        trail = _CONTEXT if end < len(lines) else 0
        hidden = end - at - lead - trail
        if hidden <= _CONTEXT or end - at == len(lines):
            yield from lines[at:end]
        else:
            yield from lines[at : at + lead]
            yield DiffLine("head", f"… {hidden:,} unchanged lines")
            yield from lines[end - trail : end]
        at = end


# --- text forms ------------------------------------------------------------------------------


def diff_text(lines: Iterable[DiffLine]) -> str:
    """Return a diff as text, as in a unified diff."""
    return "\n".join(line.sign + line.text for line in lines)


def checklist_text(items: Iterable[ChecklistItem]) -> str:
    """Return a checklist as a Markdown task list."""
    return "\n".join(
        f"- [{'x' if item.state == 'done' else ' '}] {' '.join(item.text.split())}"
        + (" (in progress)" if item.state == "active" else "")
        for item in items
    )
