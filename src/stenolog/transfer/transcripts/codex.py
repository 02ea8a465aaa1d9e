"""Transcripts of the Codex CLI: `~/.codex/sessions/YYYY/MM/DD/rollout-<time>-<thread id>.jsonl`.

A thread may have several files: after a revert, a second file continues the first one up to a
record of it. Codex also rewrites and compresses its files. Messages are therefore recognized by
their ids or content, never by their position.
"""

import io
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, field

from stenolog.transfer.transcripts.transcript import (
    Kind,
    Transcript,
    TranscriptFile,
    TranscriptMessage,
    annotated,
    as_dict,
    as_text,
    digest_of,
    file_at,
    files_below,
    filled,
    json_lines,
    one_line,
    parse_json,
    time_from,
    tool_call,
    usage_counts,
    without,
)

PROGRAM: Final = "codex"
FIELD: Final = "codex"
"""Field of a stored message that holds the rest of its record."""
_NAME: Final = re.compile(
    r"rollout-(?P<time>[\dT-]{19})-(?P<thread>[0-9a-f-]{36})(?:_(?P<rollout>[0-9a-f-]{36}))?"
    r"\.jsonl(?:\.zst)?"
)
_CALLS: Final = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "web_search_call": "action",
    "tool_search_call": "arguments",
    "image_generation_call": "result",
}
"""Types of items that call a tool, with the field of their arguments."""
_INJECTED: Final = (
    "<environment_context>",
    "<user_instructions>",
    "# AGENTS.md instructions",
    "<permissions instructions>",
    "<skills_instructions>",
)
_EXIT_CODE: Final = re.compile(r"(?:Process exited with code|Exit code:) (-?\d+)")
_WALL_TIME: Final = re.compile(r"Wall time: ([\d.]+)")
_IMAGE: Final = re.compile(r"</?image\b[^>]*>")
_PREFACE: Final = re.compile(
    r"Another language model started to solve this problem.*?:\n", re.DOTALL
)


class Codex:
    """Reader of the Codex CLI's transcripts."""

    program = PROGRAM

    def default_folder(self) -> Path | None:
        """Return `$CODEX_HOME` or `~/.codex`, if it has sessions."""
        home = os.environ.get("CODEX_HOME")
        folder = Path(home) if home else Path.home() / ".codex"
        return folder if (folder / "sessions").is_dir() else None

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the threads below a folder, or the thread in one file."""
        if path.is_file():
            name = _NAME.fullmatch(path.name)
            yield file_at(PROGRAM, f"{PROGRAM}:{name['thread'] if name else path.stem}", path)
            return
        threads: defaultdict[str, list[Path]] = defaultdict(list)
        for found in files_below(path, "rollout-*.jsonl*"):
            if name := _NAME.fullmatch(found.name):
                threads[name["thread"]].append(found)
        for thread, files in threads.items():
            yield file_at(PROGRAM, f"{PROGRAM}:{thread}", *sorted(files, key=lambda one: one.name))

    def read(self, file: TranscriptFile, *, is_complete: bool = True) -> Transcript:
        """Read a thread. Raises OSError."""
        transcript = Transcript(program=PROGRAM, key=file.key)
        reading = _Reading(transcript)
        for path in file.paths:
            reading.begin_file()
            for line, record in _lines(path):
                reading.add(record, line)
        reading.finish(file.paths)
        if is_complete and reading.base is not None:
            base, end = reading.base
            transcript.messages = self._before(file.paths[0], base, end) + transcript.messages
        return transcript

    def _before(self, path: Path, base: str, end: int) -> list[TranscriptMessage]:
        """Return the messages of a fork's parent up to the fork; none if its file is gone."""
        folder = next((one for one in path.parents if one.name == "sessions"), path.parent)
        for found in files_below(folder, f"rollout-*{base}.jsonl*"):
            file = file_at(PROGRAM, f"{PROGRAM}:{base}", found)
            return [
                message
                for message in self.read(file).messages
                if message.message[FIELD].get("ordinal", end) < end
            ]
        return []


def _lines(path: Path) -> Iterator[tuple[bytes, Any]]:
    if path.suffix != ".zst":
        yield from json_lines(path)
        return
    try:
        import zstandard  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        message = f"{path.name} is compressed; reading it needs the package zstandard"
        raise OSError(message) from error
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
        for line in io.BufferedReader(stream):
            if line.endswith(b"\n") and line.strip():
                yield line, parse_json(line)


class _Draft(Struct):
    """A message while its thread is read: later records add usage, failure or visibility."""

    identity: str
    body: dict[str, Any]
    at: datetime | None
    ordinal: int | None
    kind: Kind | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    hidden: bool = False

    def message(self) -> TranscriptMessage:
        """Return the finished message."""
        body = annotated(self.body, self.identity, kind=self.kind, **self.notes)
        return TranscriptMessage(
            identity=self.identity, message=body, at=self.at, hidden=self.hidden
        )


class _Reading:
    """The messages and facts of one thread, collected record by record."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._drafts: dict[str, _Draft] = {}
        self._model = ""
        self._meta: dict[str, Any] = {}
        self._folders: dict[str, None] = {}
        self._models: dict[str, None] = {}
        self._has_own_meta = False
        self._is_copied = False
        self._waiting: list[_Draft] = []
        """Items of the model since the last usage record."""
        self._counted: set[str] = set()
        self._has_usage_records = False
        self._finished_items: dict[str, dict[str, Any]] = {}
        self.base: tuple[str, int] | None = None
        """The rollout that a fork continues, and the ordinal at which it branched off."""
        self._results: dict[str, _Draft] = {}
        """Tool results by the id of their call."""

    def begin_file(self) -> None:
        """Start the next file of the thread."""
        self._has_own_meta = False
        self._is_copied = False
        self._has_usage_records = False

    def add(self, record: Any, line: bytes) -> None:
        """Add a record of the file."""
        if not isinstance(record, dict):
            self._transcript.add_problem(f"a line is not a JSON object: {line[:40]!r}")
            return
        payload = as_dict(record.get("payload"))
        match record.get("type"):
            case "session_meta":
                self._add_meta(payload)
            case "turn_context":
                self._model = as_text(payload.get("model")) or self._model
                self._note_folder(payload)
            case "response_item" if not self._is_copied:
                self._add_item(record, payload, line)
            case "compacted":
                self._compact(payload)
            case "event_msg":
                self._add_event(payload, line)
            case "token_usage_record":
                self._has_usage_records = True
                self._count(as_dict(payload.get("usage")), as_text(payload.get("response_id")))
            case None if "id" in record and "timestamp" in record and "type" not in record:
                self._add_meta(record)
            case "message" | "reasoning" | "function_call" | "function_call_output":
                # The oldest files have no envelope.
                self._add_item({"type": "response_item", "payload": record}, record, line)
            case kind:
                name = kind or record.get("record_type")
                self._transcript.leave_out(as_text(name) or "unknown", len(line))

    def _add_meta(self, payload: dict[str, Any]) -> None:
        if self._has_own_meta:
            # Old forks copy the parent's records, which begin with the parent's own meta.
            self._is_copied = payload.get("id") != self._meta.get("id")
            return
        self._has_own_meta = True
        self._meta = {**self._meta, **payload}
        self._note_folder(payload)
        base = as_dict(payload.get("history_base"))
        end = base.get("end_ordinal_exclusive")
        if not isinstance(end, int):
            return
        if base.get("thread_id") != payload.get("id"):
            self.base = as_text(base.get("thread_id")), end
            return
        # A revert: this file continues the earlier one up to that record.
        for draft in self._drafts.values():
            if draft.ordinal is not None and draft.ordinal >= end:
                draft.hidden = True

    def _note_folder(self, payload: Mapping[str, Any]) -> None:
        if isinstance(folder := payload.get("cwd"), str) and folder:
            self._folders[folder] = None

    def _add_item(self, record: dict[str, Any], payload: dict[str, Any], line: bytes) -> None:
        body = message_of(record)
        if body is None:
            self._transcript.leave_out(as_text(payload.get("type")), len(line))
            return
        identity = identity_of_item(record)
        if identity in self._drafts:
            return
        ordinal = record.get("ordinal")
        draft = _Draft(
            identity=identity,
            body=body,
            at=time_from(record.get("timestamp")),
            ordinal=ordinal if isinstance(ordinal, int) else None,
            kind=_kind(record, payload),
        )
        if draft.kind == "summary":
            draft.hidden = True
        self._drafts[identity] = draft
        if body["role"] == "assistant":
            self._waiting.append(draft)
            if self._model:
                draft.notes["model"] = self._model
                self._models[self._model] = None
        elif body["role"] == "tool":
            self._results[as_text(payload.get("call_id"))] = draft
            self._note_result(draft, as_text(payload.get("call_id")))

    def _note_result(self, draft: _Draft, call_id: str) -> None:
        """Add failure and duration, as the program reported them or as its output says."""
        item = self._finished_items.get(call_id, {})
        text = draft.body.get("content")
        code: Any = item.get("exit_code")
        if isinstance(text, str) and code is None:
            if found := _EXIT_CODE.search(text[:300]):
                code = int(found[1])
            elif text.startswith("{"):
                output = as_dict(parse_json(text))
                code = as_dict(output.get("metadata")).get("exit_code")
        if (isinstance(code, int) and code != 0) or item.get("status") in ("failed", "errored"):
            draft.notes["failed"] = True
        duration = as_dict(item.get("duration"))
        if isinstance(duration.get("secs"), int) and isinstance(duration.get("nanos"), int):
            draft.notes["seconds"] = duration["secs"] + duration["nanos"] / 1e9
        elif isinstance(text, str) and (wall := _WALL_TIME.search(text[:300])):
            draft.notes["seconds"] = float(wall[1])

    def _add_event(self, payload: dict[str, Any], line: bytes) -> None:
        match payload.get("type"):
            case "item_completed":
                item = as_dict(payload.get("item"))
                if isinstance(item.get("id"), str):
                    self._finished_items[item["id"]] = item
                    if draft := self._results.get(item["id"]):
                        self._note_result(draft, item["id"])
            case "token_count" if not self._has_usage_records:
                info = as_dict(payload.get("info"))
                total = as_dict(info.get("total_token_usage"))
                self._count(as_dict(info.get("last_token_usage")), digest_of(total))
            case "thread_rolled_back":
                self._roll_back(payload.get("num_turns"))
        self._transcript.leave_out(f"event_msg:{as_text(payload.get('type'))}", len(line))

    def _count(self, usage: dict[str, Any], response: str) -> None:
        """Put the usage of a response on its last item, once."""
        if not usage or response in self._counted:
            return
        self._counted.add(response)
        if self._waiting:
            self._waiting[-1].notes["usage"] = usage_counts(
                prompt=usage.get("input_tokens"),
                answer=usage.get("output_tokens"),
                cached=usage.get("cached_input_tokens", 0),
            )
            self._waiting[-1].notes["response"] = response
            self._waiting = []

    def _roll_back(self, turns: Any) -> None:
        """Hide the last turns, each from its prompt on."""
        if not isinstance(turns, int):
            return
        for draft in reversed(self._drafts.values()):
            if turns <= 0:
                return
            if draft.hidden:
                continue
            draft.hidden = True
            turns -= draft.body["role"] == "user" and draft.kind is None

    def _compact(self, payload: dict[str, Any]) -> None:
        """Hide what a summary replaced; the items that the model keeps stay visible."""
        kept = payload.get("replacement_history")
        items = [{"payload": item} for item in kept] if isinstance(kept, list) else []
        known = {identity_of_item(item) for item in items}
        for draft in self._drafts.values():
            draft.hidden = draft.hidden or draft.identity not in known
        self._transcript.summary = _PREFACE.sub("", as_text(payload.get("message"))).strip()

    def finish(self, paths: tuple[Path, ...]) -> None:
        """Set messages, title and facts of the thread."""
        transcript = self._transcript
        transcript.messages = [draft.message() for draft in self._drafts.values()]
        prompts = (d for d in self._drafts.values() if d.body["role"] == "user" and d.kind is None)
        first = next((_text_in(draft.body.get("content")) for draft in prompts), "")
        first = _IMAGE.sub("", first)
        transcript.title = one_line(_name_in_index(paths[0], transcript.key) or first)
        git = as_dict(self._meta.get("git"))
        spawn = as_dict(as_dict(self._meta.get("source")).get("subagent"))
        parent = self._meta.get("parent_thread_id") or as_dict(spawn.get("thread_spawn")).get(
            "parent_thread_id"
        )
        fork = self._meta.get("forked_from_id")
        transcript.source = filled(
            {
                "program": PROGRAM,
                "path": str(paths[-1]),
                "folders": list(self._folders),
                "branches": [git["branch"]] if isinstance(git.get("branch"), str) else [],
                "commit": git.get("commit_hash"),
                "repository": git.get("repository_url"),
                "models": list(self._models),
                "versions": [self._meta["cli_version"]] if self._meta.get("cli_version") else [],
                "parent": {"key": f"{PROGRAM}:{parent}"} if isinstance(parent, str) else None,
                "forked_from": f"{PROGRAM}:{fork}" if isinstance(fork, str) else None,
                "archived": any("archived_sessions" in path.parts for path in paths),
            }
        )


def identity_of_item(record: Mapping[str, Any]) -> str:
    """Return what identifies an item in files that Codex rewrote."""
    payload = as_dict(record.get("payload"))
    if isinstance(payload.get("id"), str) and payload["id"]:
        return str(payload["id"])
    if isinstance(payload.get("call_id"), str):
        return f"{payload['call_id']}:{payload.get('type')}"
    content = without(payload, "id", "internal_chat_message_metadata_passthrough")
    return f"sha256:{digest_of([record.get('timestamp'), content])[:32]}"


def message_of(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the message of an item, with the rest of its record; None if it is not imported."""
    payload = as_dict(record.get("payload"))
    kind = as_text(payload.get("type"))
    rest = dict(payload)
    if kind == "message" and isinstance(payload.get("role"), str):
        role = {"developer": "system"}.get(payload["role"], payload["role"])
        content, shape = _content(rest.pop("content", None))
        body: dict[str, Any] = {"role": role, "content": content}
        if role == payload["role"]:
            del rest["role"]
        if shape is not None:
            rest["content"] = shape
    elif kind == "reasoning":
        thoughts = rest.get("summary")
        texts = [as_text(as_dict(one).get("text")) for one in as_list(thoughts)]
        body = {"role": "assistant", "content": None, "reasoning_content": "\n\n".join(texts)}
        rest["summary"] = [
            {**without(as_dict(one), "text"), "length": len(text)}
            for one, text in zip(as_list(thoughts), texts, strict=True)
        ]
    elif kind in _CALLS:
        arguments = rest.pop(_CALLS[kind], None)
        name = ".".join(filter(None, (as_text(rest.get("namespace")), as_text(rest.get("name")))))
        call_id = as_text(rest.pop("call_id", None)) or as_text(rest.get("id"))
        # Free text, for example a patch, is not JSON: it becomes an argument of that name.
        given = {"input": arguments} if kind == "custom_tool_call" else arguments
        call = tool_call(call_id, name or kind.removesuffix("_call"), given)
        body = {"role": "assistant", "content": None, "tool_calls": [call]}
        if not rest.get("namespace"):
            rest.pop("name", None)
    elif kind.endswith("_output") and "output" in payload:
        body = {
            "role": "tool",
            "tool_call_id": as_text(rest.pop("call_id", None)),
            "content": rest.pop("output"),
        }
        if isinstance(body["content"], list):
            body["content"], shape = _content(body["content"])
            rest["output"] = shape
    else:
        return None
    body[FIELD] = {**without(record, "payload"), "payload": rest}
    return body


def record_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record that a message was made of."""
    rest = dict(body[FIELD])
    payload = dict(rest["payload"])
    kind = payload["type"]
    if kind == "message":
        payload.setdefault("role", body["role"])
        payload["content"] = _restored(body["content"], payload.get("content"))
    elif kind == "reasoning":
        text = body["reasoning_content"]
        summary = []
        for one in payload["summary"]:
            length = one["length"]
            summary.append({**without(one, "length"), "text": text[:length]})
            text = text[length + 2 :]
        payload["summary"] = summary
    elif kind in _CALLS:
        call = body["tool_calls"][0]
        payload["call_id"] = call["id"]
        payload.setdefault("name", call["function"]["name"])
        arguments = call["function"]["arguments"]
        if kind == "custom_tool_call":
            arguments = as_dict(parse_json(arguments))["input"]
        elif kind not in ("function_call",):
            arguments = parse_json(arguments)
        payload[_CALLS[kind]] = arguments
    else:
        payload["call_id"] = body["tool_call_id"]
        shape = payload.get("output")
        payload["output"] = body["content"] if shape is None else _restored(body["content"], shape)
    return {**rest, "payload": payload}


def _content(parts: Any) -> tuple[Any, Any]:
    """Return content in the chat format, and the fields that it does not contain."""
    if not isinstance(parts, list):
        return parts, None
    made: list[Any] = []
    shape: list[Any] = []
    for part in parts:
        fields = as_dict(part)
        if fields.get("type") in ("input_text", "output_text") and isinstance(
            fields.get("text"), str
        ):
            made.append({"type": "text", "text": fields["text"]})
            shape.append(without(fields, "text"))
        elif fields.get("type") == "input_image" and isinstance(fields.get("image_url"), str):
            made.append({"type": "image_url", "image_url": {"url": fields["image_url"]}})
            shape.append(without(fields, "image_url"))
        else:
            made.append(part)
            shape.append(None)
    if len(made) == 1 and as_dict(made[0]).get("type") == "text" and shape[0] is not None:
        return made[0]["text"], shape
    return made, shape


def _restored(content: Any, shape: Any) -> Any:
    if not isinstance(shape, list):
        return content
    made = content if isinstance(content, list) else [{"type": "text", "text": content}]
    parts = []
    for part, rest in zip(made, shape, strict=True):
        if rest is None:
            parts.append(part)
        elif part["type"] == "text":
            parts.append({**rest, "text": part["text"]})
        else:
            parts.append({**rest, "image_url": part["image_url"]["url"]})
    return parts


def _kind(record: Mapping[str, Any], payload: Mapping[str, Any]) -> Kind | None:
    """Return the kind of a message that neither the user nor the model wrote."""
    if as_dict(record.get("metadata")).get("compaction_output") is True:
        return "summary"
    if payload.get("type") != "message" or payload.get("role") not in ("user", "developer"):
        return None
    text = _text_in(payload.get("content")).lstrip()
    if text.startswith("<turn_aborted>"):
        return "interruption"
    passed = as_dict(payload.get("internal_chat_message_metadata_passthrough"))
    kinds = passed.get("content_item_kinds")
    if isinstance(kinds, list) and "user.text" in kinds:
        return None
    is_injected = payload["role"] == "developer" or text.startswith(_INJECTED)
    return "injected" if is_injected or (isinstance(kinds, list) and kinds) else None


def _text_in(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = (as_dict(part).get("text") for part in as_list(content))
    return "\n".join(text for text in texts if isinstance(text, str))


def _name_in_index(path: Path, key: str) -> str:
    """Return the name that the user gave the thread, from `session_index.jsonl`."""
    home = next((one for one in path.parents if (one / "session_index.jsonl").is_file()), None)
    if home is None:
        return ""
    thread, name = key.removeprefix(f"{PROGRAM}:"), ""
    for _, entry in json_lines(home / "session_index.jsonl"):
        if as_dict(entry).get("id") == thread:
            name = as_text(entry.get("thread_name")) or name
    return name


def as_list(value: Any) -> list[Any]:
    """Return the value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []
