"""Tool calls and results as blocks for reading: diffs, shell commands, files, checklists.

The fields of the arguments determine the blocks; the name of the tool does not matter. Pages,
exports and the terminal show the same blocks. Run time and size are bounded for any input. All
functions are pure.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice, takewhile
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
_MAX_DECODED_CHARS: Final = 1_000_000
"""Maximum number of characters of JSON that are decoded."""
_MAX_DIFF_LINES: Final = 2_000
"""Maximum number of lines of all diffs of one call; further lines are only counted."""
_MAX_COMPARED_LINES: Final = 1_000
"""Maximum number of lines of one edit that are compared line by line."""
_MAX_LONG_LINES: Final = 1_000_000
"""Maximum total number of lines of all edits on a page that are longer than _MAX_COMPARED_LINES."""
_MAX_CHANGES: Final = 60
"""Maximum number of changed lines that the comparison looks for."""
_MAX_ITEMS: Final = 200
"""Maximum number of items of a checklist."""
_MAX_BLOCKS: Final = 50
"""Maximum number of blocks of one call."""
_CONTEXT_LINES: Final = 3
"""Number of unchanged lines that are shown around a change."""
_MAX_SUMMARY: Final = 120
"""Maximum length of the summary of a call or of an error."""

_EDIT_FIELDS: Final = (
    ("old_string", "new_string"),
    ("old_str", "new_str"),
    ("oldString", "newString"),
    ("old_text", "new_text"),
    ("oldText", "newText"),
    ("search", "replace"),
)
_PATH_FIELDS: Final = (
    *("file_path", "filePath", "path", "notebook_path", "absolute_path", "target_file"),
    *("filename", "file_name", "file"),
)
_RANGE_FIELDS: Final = ("offset", "limit", "start_line", "end_line", "view_range")
"""Arguments that name the part of a file to read."""
_NUMBERED_LINE: Final = re.compile(r"[ ]{0,8}(\d{1,7})(?:[\t→](.*))?\Z")
_COMMANDS: Final = ("command", "cmd")
_CONTENTS: Final = ("content", "contents", "file_text", "new_source", "new_str", "insert_text")
_STEP_TEXTS: Final = ("content", "step", "text", "title", "task", "description")
_MAIN_ARGUMENTS: Final = (
    *(*_COMMANDS, "pattern", "query", *_PATH_FIELDS, "url", "question", "description", "prompt"),
    *("message", "name", "key", "id"),
)
"""Arguments that say most about a call, the most informative first."""
_DONE_STATES: Final = frozenset({"completed", "complete", "done", "finished", "closed", "success"})
_ACTIVE: Final = frozenset({"in_progress", "in-progress", "active", "running", "started", "doing"})
_PATCH_START: Final = re.compile(
    r"\s{0,8}(?:\*\*\* Begin Patch|diff --git |Index: |--- [^\n]{1,500}\n\+\+\+ |@@ -\d)"
)
_PATCHED_FILE: Final = re.compile(
    r"(?m)^(?:\*\*\* (?:Add|Update|Delete) File: |\+\+\+ (?:b/)?)(.+)$"
)
_HEADINGS: Final = ("@@", "*** ", "diff --git ", "--- ", "+++ ", "index ", "Index: ", "new file ")
_SUFFIX_LANGUAGES: Final = {"htm": "html", "mjs": "js", "cjs": "js", "svg": "xml", "cfg": "ini"}
_SHELLS: Final = frozenset({"bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/bin/zsh"})
_ERROR_TAGS: Final = re.compile(r"</?tool_use_error>")
_CODEX_HEADINGS: Final = re.compile(
    r"^(?:Chunk ID: \w+|Wall time: [\d.]+ seconds|Original token count: \d+|Output:)$", re.MULTILINE
)
_EXIT_CODE: Final = re.compile(r"(?i)(?:exit code|process exited with code):? -?\d{1,4}")
_INDENTED_JSON: Final = JSONEncoder(indent=2, ensure_ascii=False)

LineKind = Literal["added", "removed", "same", "head"]
BlockKind = Literal["diff", "shell", "code", "checklist", "text", "json"]
ItemState = Literal["done", "active", "open"]


class DiffLine(Struct, frozen=True):
    """A line of a diff, without the sign in front of it."""

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
    """The number of lines that may still be compared. The default is the limit for one page."""

    def __init__(self, left: int = 20_000) -> None:
        self.left = left
        self._long_left = _MAX_LONG_LINES

    def take(self, count: int) -> bool:
        """Return whether the budget allows this number of lines. If yes, reduce the budget."""
        if count > min(self.left, _MAX_COMPARED_LINES):
            return False
        self.left -= count
        return True

    def take_long(self, count: int) -> bool:
        """Return whether an edit with this number of lines may be split into lines.

        The lines of a long edit are subtracted from a separate budget.
        """
        if count > _MAX_COMPARED_LINES:
            self._long_left -= count
        return count <= _MAX_COMPARED_LINES or self._long_left >= 0


# --- summary ---------------------------------------------------------------------------------


def summary_of(arguments: Any) -> str:
    """Return the most informative argument of a call in one line; empty without arguments."""
    decoded = decode_json(arguments)
    if isinstance(decoded, str):
        return _summary_of_text(decoded)
    if not isinstance(decoded, Mapping):
        return "" if decoded is None else _one_line(as_json(decoded))
    for name in _MAIN_ARGUMENTS:
        value = decoded.get(name)
        if name in _COMMANDS and (command := _shell_command(value)) is not None:
            return _one_line(command)
        if isinstance(value, str) and value.strip():
            return _one_line(value)
    steps = next(filter(None, map(_checklist_items, decoded.values())), ())
    if steps:
        done_count = sum(step.state == "done" for step in steps)
        return f"{done_count} of {len(steps)} done"
    texts = [value for value in decoded.values() if isinstance(value, str) and value.strip()]
    if texts:
        return _summary_of_text(texts[0])
    return _one_line(as_json(decoded)) if decoded else ""


def error_line(text: str) -> str:
    """Return the first informative line of an error; empty if no line is informative."""
    first_part = _CODEX_HEADINGS.sub("", _ERROR_TAGS.sub("", text[:4_000]))
    lines = list(islice((line.strip() for line in first_part.splitlines() if line.strip()), 2))
    if len(lines) == 2 and _EXIT_CODE.fullmatch(lines[0]):
        return _one_line(f"{lines[0]}: {lines[1]}")
    return _one_line(lines[0]) if lines else ""


def _summary_of_text(text: str) -> str:
    if _PATCH_START.match(text):
        files = list(islice(_PATCHED_FILE.finditer(text[:MAX_BLOCK]), 4))
        if files:
            more_text = "" if len(files) < 4 else ", …"
            return _one_line(", ".join(match[1].strip() for match in files[:3]) + more_text)
    return _one_line(text)


def _one_line(text: str) -> str:
    line = " ".join(text[: 4 * _MAX_SUMMARY].split())
    return line if len(line) <= _MAX_SUMMARY else line[: _MAX_SUMMARY - 1].rstrip() + "…"


# --- blocks ----------------------------------------------------------------------------------


def argument_blocks(arguments: Any, budget: DiffBudget | None = None) -> tuple[ToolBlock, ...]:
    """Return the arguments of a call as blocks."""
    return tuple(islice(_value_blocks(decode_json(arguments), budget or DiffBudget()), _MAX_BLOCKS))


def result_blocks(
    result: Any, budget: DiffBudget | None = None, *, path: str = ""
) -> tuple[ToolBlock, ...]:
    """Return the result of a call as blocks. Text that is not JSON stays unchanged.

    `path`: the file that the call has read. If its language is known, the text is shown as code.
    """
    if isinstance(result, str) and language_of(path) and len(result) < MAX_BLOCK:
        return tuple(_file_blocks(result, path))
    decoded = decode_json(result)
    if isinstance(decoded, str) and not _PATCH_START.match(decoded):
        is_long = len(decoded) >= MAX_BLOCK
        return (_text_block(decoded if is_long else _ERROR_TAGS.sub("", decoded)),)
    return argument_blocks(decoded, budget)


def path_read(arguments: Any) -> str:
    """Return the path of the file that a call reads; empty if the call does anything else."""
    decoded = decode_json(arguments)
    if not isinstance(decoded, Mapping):
        return ""
    path_names = [name for name in _PATH_FIELDS if _is_text(decoded, name)]
    other_names = decoded.keys() - {*path_names, *_RANGE_FIELDS}
    is_read = len(path_names) == 1 and (
        not other_names or (other_names == {"command"} and decoded["command"] == "view")
    )
    return str(decoded[path_names[0]]) if is_read else ""


def _file_blocks(text: str, path: str) -> Iterator[ToolBlock]:
    """Yield the text of a file as code without its line numbers, then any text below it."""
    lines = text.split("\n")
    first = _NUMBERED_LINE.match(lines[0])
    if first is None or first[2] is None:
        yield ToolBlock(kind="code", text=text, language=language_of(path))
        return
    start = int(first[1])
    code_lines = []
    for number, line in enumerate(lines, start):
        match = _NUMBERED_LINE.match(line)
        if match is None or int(match[1]) != number:
            break
        code_lines.append(match[2] or "")
    label = f"from line {start:,}" if start > 1 else ""
    code = "\n".join(code_lines)
    yield ToolBlock(kind="code", label=label, text=code, language=language_of(path))
    if rest := "\n".join(lines[len(code_lines) :]).strip("\n"):
        yield _text_block(rest)


def decode_json(value: Any) -> Any:
    """Return the value of a JSON text. Other texts and too long JSON are returned unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    if len(value) > _MAX_DECODED_CHARS:
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return value


def format_json(value: Any) -> str:
    """Return a value as indented JSON, cut at a little more than MAX_BLOCK characters."""
    pieces, size = list[str](), 0
    try:
        for piece in _INDENTED_JSON.iterencode(value):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BLOCK:  # guard: layout-bounded
                break
    except (TypeError, ValueError, RecursionError):
        return cut_text(as_json(value))
    return cut_text("".join(pieces))


def cut_text(text: str) -> str:
    """Return the start of a text, with a note if more follows."""
    return text if len(text) <= MAX_BLOCK else text[:MAX_BLOCK] + "\n… cut"


def _value_blocks(value: Any, budget: DiffBudget) -> Iterator[ToolBlock]:
    match value:
        case None:
            return
        case str() if _PATCH_START.match(value):
            yield _patch_block(value, "")
        case str():
            if value:
                yield _text_block(value)
        case Mapping():
            yield from _object_blocks(value, budget)
        case list() if steps := _checklist_items(value):
            yield _checklist_block(steps, len(value))
        case _:
            yield ToolBlock(kind="json", text=format_json(value))


def _object_blocks(fields: Mapping[str, Any], budget: DiffBudget) -> Iterator[ToolBlock]:
    """Yield the blocks of an object. Each field is shown once."""
    rest = dict(fields)
    path_name = next((name for name in _PATH_FIELDS if isinstance(rest.get(name), str)), "")
    path = rest[path_name] if path_name else ""
    edits = [*_take_edit(rest), *_take_edits(rest)]
    lines_left = _MAX_DIFF_LINES
    for old_text, new_text in edits:
        diff, omitted = _compare_texts(old_text, new_text, lines_left, budget)
        lines_left -= len(diff)
        yield ToolBlock(kind="diff", label=_one_line(path), lines=tuple(diff), omitted=omitted)
    names = [] if edits or not path else [name for name in _CONTENTS if _is_text(rest, name)]
    for name in names[:1]:
        text = cut_text(rest.pop(name))
        yield ToolBlock(kind="code", label=_one_line(path), text=text, language=language_of(path))
    if edits or names:
        rest.pop(path_name, None)
    elif not path:
        for name in _COMMANDS:
            if (command := _shell_command(rest.get(name))) is not None:
                del rest[name]
                yield ToolBlock(kind="shell", label=_take_caption(rest), text=cut_text(command))
    for name, value in list(rest.items()):
        if isinstance(value, str) and _PATCH_START.match(value):
            yield _patch_block(value, name)
        elif steps := _checklist_items(value):
            yield _checklist_block(steps, len(value))
        elif isinstance(value, str) and "\n" in value.strip("\n"):
            yield _text_block(value, name)
        else:
            continue
        del rest[name]
    if rest or not fields:
        yield ToolBlock(kind="json", text=format_json(rest))


def _take_caption(fields: dict[str, Any]) -> str:
    """Return a description that fits into a line, and remove the description from the fields."""
    text = fields.get("description")
    if not isinstance(text, str) or not text or _one_line(text) != text:
        return ""
    del fields["description"]
    return text


def _is_text(fields: Mapping[str, Any], name: str) -> bool:
    return isinstance(fields.get(name), str)


def _text_block(text: str, label: str = "") -> ToolBlock:
    return ToolBlock(kind="text", label=_one_line(label), text=cut_text(text))


def _shell_command(value: Any) -> str | None:
    """Return a shell command. For `["bash", "-lc", script]`, return only the script."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
        return None
    if len(value) == 3 and value[0] in _SHELLS and value[1].startswith("-"):
        return str(value[2])
    return " ".join(value)


def language_of(path: str) -> str:
    """Return the language of a file by the suffix of its name; empty for an unknown suffix."""
    name = PurePosixPath(path[-200:].replace("\\", "/")).name.lower()
    suffix = name.rpartition(".")[2]
    suffix = _SUFFIX_LANGUAGES.get(suffix, suffix)
    return suffix if suffix in LANGUAGES else ""


# --- checklists ------------------------------------------------------------------------------


def _checklist_items(value: Any) -> tuple[ChecklistItem, ...]:
    """Return the items of a list of steps with a status; empty for any other value."""
    if not isinstance(value, list) or not value:
        return ()
    items = []
    for step in value[:_MAX_ITEMS]:
        if not isinstance(step, Mapping):
            return ()
        text = next((step[name] for name in _STEP_TEXTS if isinstance(step.get(name), str)), None)
        state = _step_state(step)
        if text is None or state is None:
            return ()
        items.append(ChecklistItem(text[:2_000], state))
    return tuple(items)


def _step_state(item: Mapping[str, Any]) -> ItemState | None:
    status = item.get("status")
    if isinstance(status, str):
        status = status.lower()
        return "done" if status in _DONE_STATES else "active" if status in _ACTIVE else "open"
    for name in ("done", "completed"):
        if isinstance(item.get(name), bool):
            return "done" if item[name] else "open"
    return None


def _checklist_block(steps: tuple[ChecklistItem, ...], count: int) -> ToolBlock:
    return ToolBlock(kind="checklist", items=steps, omitted=count - len(steps))


# --- diffs -----------------------------------------------------------------------------------


def _take_edit(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the old and new text of an edit, and remove them from the fields."""
    for old_field, new_field in _EDIT_FIELDS:
        if _is_text(fields, old_field) and _is_text(fields, new_field):
            yield fields.pop(old_field), fields.pop(new_field)
            return


def _take_edits(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """If all items of the field `edits` are edits, yield them and remove the field."""
    items = fields.get("edits")
    if not isinstance(items, list) or not 0 < len(items) <= _MAX_BLOCKS:
        return
    edits = [list(_take_edit(dict(item))) if isinstance(item, Mapping) else [] for item in items]
    if all(edits):
        del fields["edits"]
        yield from chain.from_iterable(edits)


def _patch_block(text: str, label: str) -> ToolBlock:
    """Return the lines of a patch or unified diff."""
    all_lines = cut_text(text.strip("\n")).split("\n")
    lines = tuple(_patch_line(line) for line in all_lines[:_MAX_DIFF_LINES])
    label = "" if label in ("input", "patch", "diff") else label
    return ToolBlock(
        kind="diff", label=_one_line(label), lines=lines, omitted=len(all_lines) - len(lines)
    )


def _patch_line(line: str) -> DiffLine:
    if line.startswith(_HEADINGS):
        return DiffLine("head", line)
    kinds: dict[str, LineKind] = {"+": "added", "-": "removed"}
    kind = kinds.get(line[:1], "same")
    return DiffLine(kind, line[1:] if line[:1] in ("+", "-", " ") else line)


def _compare_texts(
    old_text: str, new_text: str, max_lines: int, budget: DiffBudget
) -> tuple[list[DiffLine], int]:
    """Return at most `max_lines` lines of the diff of two texts, and how many were omitted."""
    line_count = old_text.count("\n", 0, MAX_BLOCK) + new_text.count("\n", 0, MAX_BLOCK) + 2
    if max_lines <= 0 or not budget.take_long(line_count):
        return [], line_count
    old_lines, new_lines = _split_lines(old_text), _split_lines(new_text)
    head_count = _common_start_length(old_lines, new_lines)
    tail_count = _common_start_length(old_lines[head_count:][::-1], new_lines[head_count:][::-1])
    changed_old = old_lines[head_count : len(old_lines) - tail_count]
    changed_new = new_lines[head_count : len(new_lines) - tail_count]
    diff = [DiffLine("same", line) for line in old_lines[:head_count]]
    diff += _diff_lines(changed_old, changed_new, budget)
    diff += [DiffLine("same", line) for line in old_lines[len(old_lines) - tail_count :]]
    lines = list(_omit_unchanged(diff))
    return lines[:max_lines], max(0, len(lines) - max_lines)


def _split_lines(text: str) -> list[str]:
    lines = cut_text(text).split("\n")
    return lines[:-1] if lines and not lines[-1] else lines


def _common_start_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the number of equal lines at the start of two lists."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _diff_lines(old_lines: list[str], new_lines: list[str], budget: DiffBudget) -> list[DiffLine]:
    """Return the diff of two lists of lines. If they are too long, all lines count as changed."""
    if old_lines and new_lines and budget.take(len(old_lines) + len(new_lines)):
        diff = _shortest_diff(old_lines, new_lines)
        if diff is not None:
            return diff
    removed_lines = [DiffLine("removed", line) for line in old_lines]
    return [*removed_lines, *(DiffLine("added", line) for line in new_lines)]


def _shortest_diff(old_lines: list[str], new_lines: list[str]) -> list[DiffLine] | None:
    """Return the shortest diff (Myers), or None if it has more than _MAX_CHANGES changes.

    The search takes at most about 2 * _MAX_CHANGES * (len(old_lines) + len(new_lines)) steps.
    """
    furthest_x = {1: 0}
    history: list[dict[int, int]] = []
    for changes in range(_MAX_CHANGES + 1):
        history.append(dict(furthest_x))
        for diagonal in range(-changes, changes + 1, 2):
            is_added = _adds_line(furthest_x, changes, diagonal)
            x = furthest_x[diagonal + 1] if is_added else furthest_x[diagonal - 1] + 1
            y = x - diagonal
            while x < len(old_lines) and y < len(new_lines) and old_lines[x] == new_lines[y]:
                x, y = x + 1, y + 1
            furthest_x[diagonal] = x
            if x >= len(old_lines) and y >= len(new_lines):
                return _rebuild_diff(old_lines, new_lines, history)
    return None


def _adds_line(furthest_x: Mapping[int, int], changes: int, diagonal: int) -> bool:
    """Return True if the last of these changes adds a line, False if it removes a line."""
    is_first, is_last = diagonal == -changes, diagonal == changes
    return is_first or (not is_last and furthest_x[diagonal - 1] < furthest_x[diagonal + 1])


def _rebuild_diff(
    old_lines: list[str], new_lines: list[str], history: list[dict[int, int]]
) -> list[DiffLine]:
    lines: list[DiffLine] = []
    x, y = len(old_lines), len(new_lines)
    for changes in range(len(history) - 1, -1, -1):
        furthest_x, diagonal = history[changes], x - y
        is_added = _adds_line(furthest_x, changes, diagonal)
        previous_diagonal = diagonal + 1 if is_added else diagonal - 1
        from_x = furthest_x[previous_diagonal] if changes else 0
        from_y = from_x - previous_diagonal if changes else 0
        while x > from_x and y > from_y:
            x, y = x - 1, y - 1
            lines.append(DiffLine("same", old_lines[x]))
        if changes:
            lines.append(
                DiffLine("added", new_lines[from_y])
                if is_added
                else DiffLine("removed", old_lines[from_x])
            )
        x, y = from_x, from_y
    return lines[::-1]


def _omit_unchanged(lines: Sequence[DiffLine]) -> Iterator[DiffLine]:
    """Yield the lines of a diff. Long runs of unchanged lines are replaced by their number."""
    line_count = 0
    for is_same, group in groupby(lines, key=lambda line: line.kind == "same"):
        run_lines = list(group)
        lead_count = _CONTEXT_LINES if line_count > 0 else 0
        line_count += len(run_lines)
        trail_count = _CONTEXT_LINES if line_count < len(lines) else 0
        hidden_count = len(run_lines) - lead_count - trail_count
        if not is_same or hidden_count <= _CONTEXT_LINES or len(run_lines) == len(lines):
            yield from run_lines
        else:
            yield from run_lines[:lead_count]
            yield DiffLine("head", f"… {hidden_count:,} unchanged lines")
            yield from run_lines[len(run_lines) - trail_count :]


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
