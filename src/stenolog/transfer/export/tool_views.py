"""Tool calls and results as blocks for reading: diffs, shell commands, files, checklists.

The fields of the arguments determine the blocks; the name of the tool does not matter. Pages,
exports and the terminal show the same blocks. Run time and size are bounded for any input. All
functions are pure.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import chain, groupby, islice, takewhile
from json import JSONEncoder
from pathlib import PurePosixPath
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from stenolog.messages import as_json
from stenolog.redaction.redact import cut_start, line_start, printable_data
from stenolog.transfer.export.code_blocks import LANGUAGES

MAX_BLOCK: Final = 100_000
"""Maximum number of characters of a block; longer text is cut."""
MAX_PREVIEW_LINES: Final = 20
"""Number of lines that are shown of a long text before it is unfolded."""
MAX_OPEN_LINES: Final = 40
"""Maximum number of lines of a text that is not folded."""
_MAX_DECODED_CHARS: Final = 1_000_000
"""Maximum number of characters of a JSON text that is decoded."""
_MAX_DIFF_LINES: Final = 2_000
"""Maximum number of lines of all diffs of one call; further lines are only counted."""
_MAX_STEPS: Final = 8_000_000
"""Maximum number of steps of the comparison of one edit."""
_MAX_ITEMS: Final = 200
"""Maximum number of items of a checklist."""
_MAX_BLOCKS: Final = 50
"""Maximum number of blocks of one call."""
_CONTEXT_LINES: Final = 3
"""Number of unchanged lines that are shown around a change."""
_MAX_LINE_CHARS: Final = 120
"""Maximum number of characters of a one-line text, such as the summary of a call."""

_EDIT_FIELDS: Final = (
    ("old_string", "new_string"),
    ("old_str", "new_str"),
    ("oldString", "newString"),
    ("old_text", "new_text"),
    ("oldText", "newText"),
    ("search", "replace"),
)
"""Names of the old and the new text in the arguments of an edit."""
_PATH_FIELDS: Final = (
    *("file_path", "filePath", "path", "notebook_path", "absolute_path", "target_file"),
    *("filename", "file_name", "file"),
)
_RANGE_FIELDS: Final = ("offset", "limit", "start_line", "end_line", "view_range")
"""Arguments that name the part of a file to read."""
_NUMBERED_LINE: Final = re.compile(r"[ ]{0,8}(\d{1,7})(?:[\t→](.*))?\Z")
_COMMAND_FIELDS: Final = ("command", "cmd")
_CONTENT_FIELDS: Final = (
    "content",
    "contents",
    "file_text",
    "new_source",
    "new_str",
    "insert_text",
)
_STEP_TEXT_FIELDS: Final = ("content", "step", "text", "title", "task", "description")
_MAIN_ARGUMENTS: Final = (
    *(*_COMMAND_FIELDS, "pattern", "query", *_PATH_FIELDS),
    *("url", "question", "description", "prompt", "message", "name", "key", "id"),
)
"""Arguments that say most about a call, the most informative first."""
_PATCH_START: Final = re.compile(
    r"\s{0,8}(?:\*\*\* Begin Patch|diff --git |Index: |--- [^\n]{1,500}\n\+\+\+ |@@ -\d)"
)
_PATCHED_FILE: Final = re.compile(
    r"(?m)^(?:\*\*\* (?:Add|Update|Delete) File: |\+\+\+ (?:b/)?)(.+)$"
)
_PATCH_HEADINGS: Final = (
    "@@",
    "*** ",
    "diff --git ",
    "--- ",
    "+++ ",
    "index ",
    "Index: ",
    "new file ",
)
_SUFFIX_LANGUAGES: Final = {"htm": "html", "mjs": "js", "cjs": "js", "svg": "xml", "cfg": "ini"}
_SHELLS: Final = frozenset({"bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/bin/zsh"})
_ERROR_TAGS: Final = re.compile(r"</?tool_use_error>")
_CODEX_HEADINGS: Final = re.compile(
    r"^(?:Chunk ID: \w+|Wall time: [\d.]+ seconds|Original token count: \d+|Output:)$", re.MULTILINE
)
_EXIT_CODE: Final = re.compile(r"(?i)(?:exit code|process exited with code):? -?\d{1,4}")
_INDENTED_JSON: Final = JSONEncoder(indent=2, ensure_ascii=False)

LineKind = Literal["added", "removed", "same", "head"]
ItemState = Literal["done", "active", "open"]

_DONE: Final = ("completed", "complete", "done", "finished", "closed", "success")
_ACTIVE: Final = ("in_progress", "in-progress", "active", "running", "started", "doing")
_STATES_BY_STATUS: Final[dict[str, ItemState]] = {
    **dict.fromkeys(_DONE, "done"),
    **dict.fromkeys(_ACTIVE, "active"),
}


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

    kind: Literal["diff", "shell", "code", "checklist", "text", "json"]
    label: str = ""
    """Name of the argument, path of the file, or description of the command; may be empty.

    It is shown by `one_line`.
    """
    text: str = ""
    """Text of the block, for all kinds except diff and checklist."""
    language: str = ""
    """Name of the language of code, as in a Markdown fence."""
    lines: tuple[DiffLine, ...] = ()
    items: tuple[ChecklistItem, ...] = ()
    omitted: int = 0
    """Number of lines or items that are not in the block."""


class DiffBudget(Struct):
    """The work that diffs may still take. The default is the limit for one page."""

    steps: int = 2 * _MAX_STEPS
    """Number of steps of comparisons."""
    lines: int = 1_000_000
    """Number of lines into which texts may be split."""


# --- summary ---------------------------------------------------------------------------------


def summary_of(arguments: Any) -> str:
    """Return the most informative argument of a call in one line; empty without arguments."""
    return one_line(summary_source(arguments))


def summary_source(arguments: Any) -> str:
    """Return the text that `summary_of` shortens."""
    decoded = decode_json(arguments)
    if isinstance(decoded, str):
        return _summary_of_text(decoded)
    if not isinstance(decoded, Mapping):
        return "" if decoded is None else as_json(decoded)
    for name in _MAIN_ARGUMENTS:
        value = decoded.get(name)
        if name in _COMMAND_FIELDS and (command := _shell_command(value)) is not None:
            return command
        if isinstance(value, str) and value.strip():
            return value
    steps = next(filter(None, map(_checklist_items, decoded.values())), ())
    if steps:
        done_count = sum(step.state == "done" for step in steps)
        return f"{done_count} of {len(steps)} done"
    texts = [value for value in decoded.values() if isinstance(value, str) and value.strip()]
    if texts:
        return _summary_of_text(texts[0])
    return as_json(decoded) if decoded else ""


def error_line(text: str) -> str:
    """Return the first line of an error text after any headings; empty if there is none.

    If this line is an exit code, the next line is appended.
    """
    first_part = _CODEX_HEADINGS.sub("", _ERROR_TAGS.sub("", cut_start(text, 4_000)))
    lines = list(islice((line.strip() for line in first_part.splitlines() if line.strip()), 2))
    if len(lines) == 2 and _EXIT_CODE.fullmatch(lines[0]):
        return f"{lines[0]}: {lines[1]}"
    return lines[0] if lines else ""


def _summary_of_text(text: str) -> str:
    if _PATCH_START.match(text):
        files = list(islice(_PATCHED_FILE.finditer(text[:MAX_BLOCK]), 4))
        if files:
            more_text = "" if len(files) < 4 else ", …"
            return ", ".join(match[1].strip() for match in files[:3]) + more_text
    return text


def one_line(text: str) -> str:
    """Return the start of a text in one line."""
    line = " ".join(text[: 4 * _MAX_LINE_CHARS].split())
    return line if len(line) <= _MAX_LINE_CHARS else line[: _MAX_LINE_CHARS - 1].rstrip() + "…"


# --- blocks ----------------------------------------------------------------------------------


def argument_blocks(arguments: Any, budget: DiffBudget | None = None) -> tuple[ToolBlock, ...]:
    """Return the arguments of a call as blocks."""
    return tuple(islice(_value_blocks(decode_json(arguments), budget or DiffBudget()), _MAX_BLOCKS))


def result_blocks(
    result: Any, budget: DiffBudget | None = None, *, path: str = ""
) -> tuple[ToolBlock, ...]:
    """Return the result of a call as blocks. Text other than JSON or a patch is one block.

    `path` is the file that the call has read. If its language is known, the text is code.
    """
    if isinstance(result, str) and language_of(path) and len(result) < MAX_BLOCK:
        return tuple(_file_blocks(result, path))
    decoded = decode_json(result)
    if isinstance(decoded, str) and not _PATCH_START.match(decoded):
        is_long = len(decoded) >= MAX_BLOCK
        return (_text_block(decoded if is_long else _ERROR_TAGS.sub("", decoded)),)
    return argument_blocks(decoded, budget)


def find_read_path(arguments: Any) -> str:
    """Return the path of the file that a call reads; empty if the call does anything else."""
    decoded = decode_json(arguments)
    if not isinstance(decoded, Mapping):
        return ""
    path_names = _names_with_text(decoded, _PATH_FIELDS)
    other_names = decoded.keys() - {*path_names, *_RANGE_FIELDS}
    is_read = len(path_names) == 1 and (
        not other_names or (other_names == {"command"} and decoded["command"] == "view")
    )
    return str(decoded[path_names[0]]) if is_read else ""


def _file_blocks(text: str, path: str) -> Iterator[ToolBlock]:
    """Yield the text of a file as code without line numbers, then any text that follows it."""
    lines = text.split("\n")
    first_match = _NUMBERED_LINE.match(lines[0])
    if first_match is None or first_match[2] is None:
        yield ToolBlock(kind="code", text=text, language=language_of(path))
        return
    start = int(first_match[1])
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
    """Return the value of a JSON text. Any other value, or too long JSON, stays unchanged.

    Control sequences are removed: those that JSON escapes are not in the text before it is decoded.
    """
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    if len(value) > _MAX_DECODED_CHARS:
        return value
    try:
        return printable_data(msgspec.json.decode(value))
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
    return text if len(text) <= MAX_BLOCK else cut_start(text, MAX_BLOCK) + "\n… cut"


def _value_blocks(value: Any, budget: DiffBudget) -> Iterator[ToolBlock]:
    match value:
        case None | "":
            return
        case Mapping():
            yield from _object_blocks(value, budget)
        case _ if block := _patch_or_checklist(value):
            yield block
        case str():
            yield _text_block(value)
        case _:
            yield ToolBlock(kind="json", text=format_json(value))


def _object_blocks(fields: Mapping[str, Any], budget: DiffBudget) -> Iterator[ToolBlock]:
    """Yield the blocks of an object. Each field is shown once."""
    rest = dict(fields)
    path_name = next(iter(_names_with_text(rest, _PATH_FIELDS)), "")
    path = rest[path_name] if path_name else ""
    edits = [*_take_edit(rest), *_take_edits(rest)]
    lines_left = _MAX_DIFF_LINES
    for old_text, new_text in edits:
        diff, omitted = _compare_texts(old_text, new_text, lines_left, budget)
        lines_left -= len(diff)
        yield ToolBlock(kind="diff", label=_label_of(path), lines=tuple(diff), omitted=omitted)
    names = [] if edits or not path else _names_with_text(rest, _CONTENT_FIELDS)
    for name in names[:1]:
        text = cut_text(rest.pop(name))
        yield ToolBlock(kind="code", label=_label_of(path), text=text, language=language_of(path))
    if edits or names:
        rest.pop(path_name, None)
    elif not path:
        for name in _COMMAND_FIELDS:
            if (command := _shell_command(rest.get(name))) is not None:
                del rest[name]
                yield ToolBlock(kind="shell", label=_take_caption(rest), text=cut_text(command))
    for name, value in list(rest.items()):
        block = _patch_or_checklist(value, name)
        if block is None and isinstance(value, str) and "\n" in value.strip("\n"):
            block = _text_block(value, name)
        if block is not None:
            yield block
            del rest[name]
    if rest or not fields:
        yield ToolBlock(kind="json", text=format_json(rest))


def _patch_or_checklist(value: Any, label: str = "") -> ToolBlock | None:
    """Return a patch or a list of steps as a block; None for any other value."""
    if isinstance(value, str) and _PATCH_START.match(value):
        return _patch_block(value, label)
    items = _checklist_items(value)
    omitted = len(value) - len(items) if items else 0
    return ToolBlock(kind="checklist", items=items, omitted=omitted) if items else None


def _take_caption(fields: dict[str, Any]) -> str:
    """Remove a description that fits into one line from the fields, and return it."""
    text = fields.get("description")
    if not isinstance(text, str) or not text or one_line(text) != text:
        return ""
    del fields["description"]
    return text


def _names_with_text(fields: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the names whose field is a text."""
    return [name for name in names if isinstance(fields.get(name), str)]


def _text_block(text: str, label: str = "") -> ToolBlock:
    return ToolBlock(kind="text", label=_label_of(label), text=cut_text(text))


def _label_of(text: str) -> str:
    """Return a label, longer than it is shown: secrets are removed before `one_line` cuts it."""
    return line_start(text, 4 * _MAX_LINE_CHARS)


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
        text_names = _names_with_text(step, _STEP_TEXT_FIELDS)
        state = _step_state(step)
        if not text_names or state is None:
            return ()
        text = cut_start(step[text_names[0]], 2_000)  # guard: step-cut
        items.append(ChecklistItem(text, state))
    return tuple(items)


def _step_state(item: Mapping[str, Any]) -> ItemState | None:
    status = item.get("status")
    if isinstance(status, str):
        return _STATES_BY_STATUS.get(status.lower(), "open")
    for name in ("done", "completed"):
        if isinstance(item.get(name), bool):
            return "done" if item[name] else "open"
    return None


# --- diffs -----------------------------------------------------------------------------------


def _take_edit(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Remove the old and new text of an edit from the fields, and yield them as a pair."""
    for old_field, new_field in _EDIT_FIELDS:
        if len(_names_with_text(fields, (old_field, new_field))) == 2:
            yield fields.pop(old_field), fields.pop(new_field)
            return


def _take_edits(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """If every item of the field `edits` is an edit, remove the field and yield the edits."""
    items = fields.get("edits")
    if not isinstance(items, list) or not 0 < len(items) <= _MAX_BLOCKS:
        return
    edits = [list(_take_edit(dict(item))) if isinstance(item, Mapping) else [] for item in items]
    if all(edits):
        del fields["edits"]
        yield from chain.from_iterable(edits)


def _patch_block(text: str, label: str) -> ToolBlock:
    """Return a patch or unified diff as a block."""
    all_lines = cut_text(text.strip("\n")).split("\n")
    lines = tuple(_patch_line(line) for line in all_lines[:_MAX_DIFF_LINES])
    label = "" if label in ("input", "patch", "diff") else label
    return ToolBlock(
        kind="diff", label=_label_of(label), lines=lines, omitted=len(all_lines) - len(lines)
    )


def _patch_line(line: str) -> DiffLine:
    if line.startswith(_PATCH_HEADINGS):
        return DiffLine("head", line)
    kinds: dict[str, LineKind] = {"+": "added", "-": "removed"}
    kind = kinds.get(line[:1], "same")
    return DiffLine(kind, line[1:] if line[:1] in ("+", "-", " ") else line)


def _compare_texts(
    old_text: str, new_text: str, max_lines: int, budget: DiffBudget
) -> tuple[list[DiffLine], int]:
    """Return at most `max_lines` lines of the diff of two texts, and how many were omitted."""
    line_count = old_text.count("\n", 0, MAX_BLOCK) + new_text.count("\n", 0, MAX_BLOCK) + 2
    if max_lines <= 0 or line_count > budget.lines:
        return [], line_count
    budget.lines -= line_count
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


def _diff_lines(
    old_lines: list[str], new_lines: list[str], budget: DiffBudget
) -> Iterator[DiffLine]:
    """Yield the diff of two lists of lines. In too long lists, all lines count as changed."""
    old_count, new_count = len(old_lines), len(new_lines)
    # Lines that are equal to many others are compared again for each block of equal lines.
    steps = old_count * new_count * min(old_count, new_count)
    changes: Sequence[tuple[str, int, int, int, int]] = [("replace", 0, old_count, 0, new_count)]
    if steps <= min(_MAX_STEPS, budget.steps):
        budget.steps -= steps
        changes = SequenceMatcher(None, old_lines, new_lines).get_opcodes()
    for change, old_start, old_end, new_start, new_end in changes:
        if change == "equal":
            yield from (DiffLine("same", line) for line in old_lines[old_start:old_end])
        else:
            yield from (DiffLine("removed", line) for line in old_lines[old_start:old_end])
            yield from (DiffLine("added", line) for line in new_lines[new_start:new_end])


def _omit_unchanged(lines: Sequence[DiffLine]) -> Iterator[DiffLine]:
    """Yield the lines of a diff. A count replaces long runs of unchanged lines."""
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
