"""Transcripts of the Codex CLI: `~/.codex/sessions/YYYY/MM/DD/rollout-<time>-<thread id>.jsonl`.

A thread may have several files: after a revert, a second file continues the first file at an
earlier record. Codex also rewrites and compresses its files. Messages are therefore recognized by
their ids or content, never by their position.
"""

import io
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from stenolog.catalog.message_metadata import FIELD as NOTES
from stenolog.catalog.message_metadata import RESPONSE, without_usage
from stenolog.errors import install_command
from stenolog.transfer.transcripts.program_messages import KIND, Kind
from stenolog.transfer.transcripts.transcript import (
    SHAPE_ERRORS,
    Transcript,
    TranscriptFile,
    TranscriptMessage,
    TranscriptReader,
    as_dict,
    as_text,
    digest_identity,
    digest_of_json,
    find_files_below,
    image_part,
    list_or_empty,
    make_content,
    make_message,
    make_tool_call,
    make_tool_result,
    omit,
    open_transcript,
    parse_json,
    parse_lines,
    read_json_lines,
    read_lines,
    read_side_file,
    record_field_name,
    session_key,
    text_of_parts,
    text_part,
    unpacked_limit,
    usage_counts,
)

PROGRAM: Final = "codex"
_FILE_NAME: Final = re.compile(
    r"rollout-[\dT-]{19}-(?P<thread>[0-9a-f-]{36})(?:_[0-9a-f-]{36})?\.jsonl(?:\.zst)?"
)
_SESSION_FOLDERS: Final = ("sessions", "archived_sessions")
MAX_INDEX_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of Codex's file with the names of all threads."""
MAX_FORK_DEPTH: Final = 20
"""Maximum number of threads before a fork whose messages are read for the fork."""
_CALL_TYPES: Final = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "web_search_call": "action",
    "tool_search_call": "arguments",
    "image_generation_call": "result",
}
"""Types of items that call a tool, with the field of their arguments."""
_INJECTED_PREFIXES: Final = (
    "<environment_context>",
    "<user_instructions>",
    "# AGENTS.md instructions",
    "<permissions instructions>",
    "<skills_instructions>",
    "<skill>",
    "<user_shell_command>",
    "<subagent_notification>",
)
_EXIT_CODE: Final = re.compile(r"(?:Process exited with code|Exit code:) (-?\d+)")
_WALL_TIME: Final = re.compile(r"Wall time: ([\d.]+)")
_IMAGE_TAG: Final = re.compile(r"</?image\b[^>]*>")
_SUMMARY_PREFACE: Final = re.compile(
    r"Another language model started to solve this problem.*?:\n", re.DOTALL
)


class Codex(TranscriptReader):
    """Reader of the Codex CLI's transcripts."""

    program = PROGRAM

    def default_folder(self) -> Path | None:
        """Return `$CODEX_HOME` or `~/.codex`, if it has sessions."""
        folder = Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex")
        return folder if (folder / "sessions").is_dir() else None

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the threads below a folder, or the thread in one file."""
        if path.is_file():
            name_match = _FILE_NAME.fullmatch(path.name)
            yield self.file_at(name_match["thread"] if name_match else path.stem, path)
            return
        threads: defaultdict[str, list[Path]] = defaultdict(list)
        first_error: PermissionError | None = None
        try:
            for file in find_files_below(path, "rollout-*.jsonl*"):
                if name_match := _FILE_NAME.fullmatch(file.name):
                    threads[name_match["thread"]].append(file)
        except PermissionError as error:
            first_error = error
        for thread, files in threads.items():
            yield self.file_at(thread, *sorted(files, key=lambda file: file.name))
        if first_error is not None:
            raise first_error

    def fill(self, transcript: Transcript, file: TranscriptFile) -> None:
        """Read a thread. Raises OSError."""
        builder = _read_thread(transcript, file.paths)
        builder.finish(file.paths)
        if builder.fork_base is not None:
            copies = _read_copies(transcript, file.paths, builder.fork_base)
            if copies:
                transcript.facts["forked_after"] = copies[-1].identity
            transcript.messages = copies + transcript.messages


def _read_thread(transcript: Transcript, paths: Iterable[Path]) -> "_ThreadBuilder":
    """Add the messages in the files of a thread. Raises OSError."""
    builder = _ThreadBuilder(transcript)
    for path in paths:
        builder.begin_file()
        for line, record in _read_lines(path):
            builder.add(record, line)
    return builder


def _read_copies(
    transcript: Transcript, paths: tuple[Path, ...], fork_base: tuple[str, int] | None
) -> list[TranscriptMessage]:
    """Return the messages of the threads from which a thread was forked, before each fork.

    Files may name each other as parents, so each thread is read at most once. A parent that cannot
    be read, and the parents before it, are left out.
    """
    folder = next((p for p in paths[0].parents if p.name == "sessions"), paths[0].parent)
    first_files: dict[str, Path] = {}
    with suppress(PermissionError):
        for file in find_files_below(folder, "rollout-*.jsonl*"):
            if name_match := _FILE_NAME.fullmatch(file.name):
                first_files.setdefault(name_match["thread"], file)
    parts: list[tuple[list[TranscriptMessage], int]] = []
    read_paths = set(paths)
    with suppress(OSError, *SHAPE_ERRORS):
        while fork_base is not None and (path := first_files.get(fork_base[0])) is not None:
            if path in read_paths or len(parts) == MAX_FORK_DEPTH:  # guard: codex-fork-ring
                transcript.problems.append(
                    "copied messages are left out: too many forks, or a ring"
                )
                break
            read_paths.add(path)
            parent = Transcript(program=PROGRAM, key=transcript.key)
            end_ordinal, fork_base = fork_base[1], _read_thread(parent, [path]).fork_base
            parts.append((parent.messages, end_ordinal))
    copies: list[TranscriptMessage] = []
    for messages, end_ordinal in reversed(parts):
        copies = [m for m in copies + messages if _ordinal_or_last(m) < end_ordinal]
    for message in copies:
        message.body = without_usage(message.body, copied=True)
    return copies


def _ordinal_or_last(message: TranscriptMessage) -> float:
    ordinal = _ordinal_of(message)
    return float("inf") if ordinal is None else ordinal


def _ordinal_of(message: TranscriptMessage) -> int | None:
    """Return the ordinal of the record from which a message was made; None if it has none."""
    ordinal = message.body[record_field_name(PROGRAM)].get("ordinal")
    return ordinal if isinstance(ordinal, int) else None


def _read_lines(path: Path) -> Iterator[tuple[bytes, Any]]:
    if path.suffix != ".zst":
        yield from read_json_lines(path)
        return
    try:
        import zstandard  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        message = f"{path.name} is compressed; reading it needs {install_command('app')}"
        raise OSError(message) from error
    with open_transcript(path) as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
        limited = _LimitedStream(stream, unpacked_limit(os.fstat(file.fileno()).st_size))
        try:
            yield from parse_lines(read_lines(io.BufferedReader(limited)))
        except zstandard.ZstdError as error:
            raise OSError(f"the compressed file is damaged: {error}") from error


class _LimitedStream(io.RawIOBase):
    """A stream that raises OSError after this number of bytes."""

    def __init__(self, stream: Any, limit: int) -> None:
        self._stream = stream
        self._limit = self._bytes_left = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._stream.readinto(buffer) or 0
        self._bytes_left -= count
        if self._bytes_left < 0:  # guard: compressed-transcript-size
            raise OSError(f"the compressed file has more than {self._limit:,} bytes unpacked")
        return count


class _ThreadBuilder:
    """Builder of a transcript: collects messages and facts of one thread, record by record."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._content_identities: dict[str, str] = {}
        """Identity that an item has without a timestamp, by the identity of the item."""
        self._model = ""
        self._meta: dict[str, Any] = {}
        self._folders: dict[str, None] = {}
        self._uncounted_answers: list[TranscriptMessage] = []
        """Messages of the model since the last usage record."""
        self._counted_responses: set[str] = set()
        self._finished_items: dict[str, dict[str, Any]] = {}
        self.fork_base: tuple[str, int] | None = None
        """Parent thread of a fork, and the ordinal of the parent's first record after the fork."""
        self._results: dict[str, TranscriptMessage] = {}
        """Tool results by the id of their call."""
        self.begin_file()

    def begin_file(self) -> None:
        """Start the next file of the thread."""
        self._has_own_meta = False
        self._in_parent_copy = False
        self._has_usage_records = False

    def add(self, record: Any, line: bytes) -> None:
        """Add a record of the file."""
        if not isinstance(record, dict):
            self._transcript.add_unreadable_line(line)
            return
        payload = as_dict(record.get("payload"))
        match record.get("type"):
            case "session_meta":
                self._add_meta(payload)
            case "turn_context":
                self._model = as_text(payload.get("model")) or self._model
                self._add_folder(payload)
            case "response_item" if not self._in_parent_copy:
                self._add_item(record, payload)
            case "compacted":
                self._hide_compacted(payload)
            case "event_msg":
                self._add_event(payload)
            case "token_usage_record":
                self._has_usage_records = True
                self._add_usage(as_dict(payload.get("usage")), as_text(payload.get("response_id")))
            case None if "id" in record and "timestamp" in record and "type" not in record:
                self._add_meta(record)
            case "message" | "reasoning" | "function_call" | "function_call_output":
                # In the oldest files, the record itself is the item.
                self._add_item({"type": "response_item", "payload": record}, record)

    def _add_meta(self, payload: dict[str, Any]) -> None:
        if self._has_own_meta:
            # Old forks contain copies of the parent's records, which start with its meta.
            self._in_parent_copy = payload.get("id") != self._meta.get("id")
            return
        self._has_own_meta = True
        self._meta = {**self._meta, **payload}
        self._add_folder(payload)
        history_base = as_dict(payload.get("history_base"))
        end_ordinal = history_base.get("end_ordinal_exclusive")
        if not isinstance(end_ordinal, int):
            return
        if history_base.get("thread_id") != payload.get("id"):
            self.fork_base = as_text(history_base.get("thread_id")), end_ordinal
            return
        # This file follows a revert of the records from `end_ordinal` on: hide their messages.
        for message in self._transcript.messages:
            if (ordinal := _ordinal_of(message)) is not None and ordinal >= end_ordinal:
                message.hidden = True

    def _add_folder(self, payload: Mapping[str, Any]) -> None:
        if isinstance(folder := payload.get("cwd"), str) and folder:
            self._folders[folder] = None

    def _add_item(self, record: dict[str, Any], payload: dict[str, Any]) -> None:
        body = message_of(payload)
        if body is None:
            return
        identity = identity_of_item(payload, record.get("timestamp"))
        if identity in self._content_identities:
            return
        self._content_identities[identity] = identity_of_item(payload, None)
        kind, at = _kind_of_item(record, payload), record.get("timestamp")
        notes = {"kind": kind, "model": self._model if body["role"] == "assistant" else ""}
        [message] = self._transcript.add_record(
            identity, [(body, notes)], record, at=at, hidden=kind == "summary"
        )
        if body["role"] == "assistant":
            self._uncounted_answers.append(message)
        elif body["role"] == "tool":
            call_id = as_text(payload.get("call_id"))
            self._results[call_id] = message
            _annotate_result(message.body, self._finished_items.get(call_id, {}))

    def _add_event(self, payload: dict[str, Any]) -> None:
        match payload.get("type"):
            case "item_completed":
                item = as_dict(payload.get("item"))
                if isinstance(item.get("id"), str):
                    self._finished_items[item["id"]] = item
                    if result := self._results.get(item["id"]):
                        _annotate_result(result.body, item)
            case "token_count" if not self._has_usage_records:
                info = as_dict(payload.get("info"))
                total_usage = as_dict(info.get("total_token_usage"))
                self._add_usage(as_dict(info.get("last_token_usage")), digest_of_json(total_usage))
            case "thread_rolled_back":
                self._roll_back(payload.get("num_turns"))

    def _add_usage(self, usage: dict[str, Any], response: str) -> None:
        """Add the usage of a response to its last item, and the id of the response to all items."""
        if not usage or response in self._counted_responses:
            return
        self._counted_responses.add(response)
        counts = usage_counts(
            prompt=usage.get("input_tokens"),
            answer=usage.get("output_tokens"),
            cached=usage.get("cached_input_tokens", 0),
        )
        if counts and self._uncounted_answers:
            self._uncounted_answers[-1].body[NOTES]["usage"] = counts
            for message in self._uncounted_answers:
                message.body[NOTES][RESPONSE] = response
        self._uncounted_answers = []

    def _roll_back(self, turn_count: Any) -> None:
        """Hide the messages of the last turns, including the prompts."""
        turns_left = turn_count if isinstance(turn_count, int) else 0
        for message in reversed(self._transcript.messages):
            if turns_left <= 0:
                return
            if not message.hidden:
                message.hidden = True
                turns_left -= message.body["role"] == "user" and KIND not in message.body[NOTES]

    def _hide_compacted(self, payload: dict[str, Any]) -> None:
        """Hide the messages that a summary replaced. If texts are equal, the newest are kept."""
        items = list_or_empty(payload.get("replacement_history"))  # these items have no timestamps
        kept_counts = Counter(identity_of_item(as_dict(item), None) for item in items)
        for message in reversed(self._transcript.messages):
            if not message.hidden:
                identity = self._content_identities[message.identity]
                message.hidden = kept_counts[identity] <= 0
                kept_counts[identity] -= 1
        self._transcript.summary = _SUMMARY_PREFACE.sub("", as_text(payload.get("message"))).strip()

    def finish(self, paths: tuple[Path, ...]) -> None:
        """Set title and facts of the thread."""
        transcript, meta = self._transcript, self._meta
        git = as_dict(meta.get("git"))
        spawn = as_dict(as_dict(as_dict(meta.get("source")).get("subagent")).get("thread_spawn"))
        parent_id = meta.get("parent_thread_id") or spawn.get("parent_thread_id")
        fork_id = meta.get("forked_from_id")
        transcript.finish(
            _find_thread_name(paths[0], transcript.key)
            or _IMAGE_TAG.sub("", transcript.first_prompt()),
            folders=list(self._folders),
            branches=[git["branch"]] if isinstance(git.get("branch"), str) else [],
            commit=git.get("commit_hash"),
            repository=git.get("repository_url"),
            versions=[meta["cli_version"]] if meta.get("cli_version") else [],
            parent={"key": session_key(PROGRAM, parent_id)} if isinstance(parent_id, str) else None,
            forked_from=session_key(PROGRAM, fork_id) if isinstance(fork_id, str) else None,
            archived=any("archived_sessions" in path.parts for path in paths),
        )


def _annotate_result(body: dict[str, Any], item: Mapping[str, Any]) -> None:
    """Add `failed` and `seconds` to the annotations of a tool result, if they are known."""
    text = as_text(body["content"])
    status: Any = item.get("exit_code")
    if status is None:
        if match := _EXIT_CODE.search(text[:300]):
            status = int(match[1])
        elif text.startswith("{"):
            status = as_dict(as_dict(parse_json(text)).get("metadata")).get("exit_code")
    if (isinstance(status, int) and status != 0) or item.get("status") in ("failed", "errored"):
        body[NOTES]["failed"] = True
    duration = as_dict(item.get("duration"))
    if isinstance(duration.get("secs"), int) and isinstance(duration.get("nanos"), int):
        body[NOTES]["seconds"] = round(duration["secs"] + duration["nanos"] / 1e9, 3)
    elif wall_time := _WALL_TIME.search(text[:300]):
        body[NOTES]["seconds"] = round(float(wall_time[1]), 3)


def identity_of_item(payload: Mapping[str, Any], timestamp: Any) -> str:
    """Return an identity of the item that stays the same when Codex rewrites its file."""
    if item_id := as_text(payload.get("id")):
        return item_id
    if isinstance(payload.get("call_id"), str):
        return f"{payload['call_id']}:{payload.get('type')}"
    content = omit(payload, "id", "internal_chat_message_metadata_passthrough")
    return digest_identity([timestamp, content])


def message_of(payload: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the message of an item; None if items of this type are not imported."""
    item_type = as_text(payload.get("type"))
    if item_type == "message" and isinstance(payload.get("role"), str):
        role = "system" if payload["role"] == "developer" else payload["role"]
        return {"role": role, "content": _convert_parts(payload.get("content"))}
    if item_type == "reasoning":
        texts = [as_text(as_dict(p).get("text")) for p in list_or_empty(payload.get("summary"))]
        return {"role": "assistant", "content": None, "reasoning_content": "\n\n".join(texts)}
    if item_type in _CALL_TYPES:
        arguments = payload.get(_CALL_TYPES[item_type])
        # Free text, for example a patch, is not JSON, so it becomes the argument `input`.
        call_arguments = {"input": arguments} if item_type == "custom_tool_call" else arguments
        names = as_text(payload.get("namespace")), as_text(payload.get("name"))
        name = ".".join(filter(None, names)) or item_type.removesuffix("_call")
        call_id = as_text(payload.get("call_id")) or payload.get("id")
        call = make_tool_call(call_id, name, call_arguments)
        return make_message("assistant", None, calls=[call])
    if item_type.endswith("_output") and "output" in payload:
        return make_tool_result(payload.get("call_id"), _convert_parts(payload["output"]))
    return None


def _convert_parts(parts: Any) -> Any:
    """Return the content with its parts in the chat format."""
    if not isinstance(parts, list):
        return parts
    converted_parts = [_convert_part(part) for part in parts]
    return make_content(converted_parts) if len(converted_parts) == 1 else converted_parts


def _convert_part(part: Any) -> Any:
    match part:
        case {"type": "input_text" | "output_text", "text": str(text)}:
            return text_part(text)
        case {"type": "input_image", "image_url": str(url)}:
            return image_part(url)
    return part


def _kind_of_item(record: Mapping[str, Any], payload: Mapping[str, Any]) -> Kind | None:
    """Return the kind of an item that neither the user nor the model wrote; else None."""
    if as_dict(record.get("metadata")).get("compaction_output") is True:
        return "summary"
    if payload.get("type") != "message" or payload.get("role") not in ("user", "developer"):
        return None
    text = text_of_parts(_convert_parts(payload.get("content"))).lstrip()
    if text.startswith("<turn_aborted>"):
        return "interruption"
    passthrough = as_dict(payload.get("internal_chat_message_metadata_passthrough"))
    kinds = list_or_empty(passthrough.get("content_item_kinds"))
    if "user.text" in kinds:
        return None
    is_injected = payload["role"] == "developer" or text.startswith(_INJECTED_PREFIXES)
    return "injected" if is_injected or kinds else None


def _find_thread_name(path: Path, key: str) -> str:
    """Return the name that the user gave the thread, from `session_index.jsonl`."""
    folder = next((p.parent for p in path.parents if p.name in _SESSION_FOLDERS), path.parent)
    index = read_side_file(folder, "session_index.jsonl", max_bytes=MAX_INDEX_BYTES)
    name = ""
    for _, entry in parse_lines(index.splitlines(keepends=True)):
        if f"{PROGRAM}:{as_dict(entry).get('id')}" == key:
            name = as_text(entry.get("thread_name")) or name
    return name
