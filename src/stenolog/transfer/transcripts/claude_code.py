"""Transcripts of Claude Code: `~/.claude/projects/<project>/<session id>.jsonl`.

Each line is a record. Records with a `uuid` form a tree by `parentUuid`. The branch that ends at
the last record is the current branch, and messages of other branches are hidden. One answer of the
model may consist of several records with the same `message.id` and the same usage. The usage counts
once.
"""

import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from time import monotonic
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from stenolog.catalog.message_metadata import without_usage
from stenolog.stores.json_file import NotASession
from stenolog.transfer.transcripts.program_messages import Kind
from stenolog.transfer.transcripts.transcript import (
    MAX_RECORD_BYTES,
    Draft,
    Transcript,
    TranscriptFile,
    TranscriptReader,
    as_dict,
    as_text,
    branch_to,
    digest_identity,
    find_files_below,
    image_part,
    list_or_empty,
    make_content,
    make_tool_call,
    make_tool_result,
    open_transcript,
    parse_json,
    read_json_lines,
    read_json_object,
    read_lines,
    read_side_file,
    session_key,
    sum_counts,
    text_of_parts,
    text_part,
    usage_counts,
)

PROGRAM: Final = "claude-code"
_REPEATED_TYPES: Final = frozenset(
    {
        *("agent_listing_delta", "date", "deferred_tools_delta", "environment", "model"),
        *("prompt_snapshot", "remote_session_change", "session_context", "skill_listing"),
        "total_tokens_reminder",
    }
)
"""Types of attachments that repeat prompts, schemas and settings, and are not imported."""
MAX_KEPT_BYTES: Final = 8 * 1024 * 1024
"""Maximum size of a file whose records are kept in memory. A larger file is parsed twice."""
REFRESH_SECONDS: Final = 1.0
"""Seconds for which the index of a project is used before the project's files are read again."""
MAX_PROJECTS: Final = 8
"""Maximum number of project indexes in memory. The least recently used index is dropped."""
_USAGE: Final = "usage"
"""Type of a record that has only the token counts of a response."""
_UUID_FIELD: Final = re.compile(rb'"uuid":"([0-9a-f-]{36})"')
_TIME_FIELD: Final = re.compile(rb'"timestamp":"([^"]+)"')
_HEAD_BYTES: Final = 4096
"""Number of bytes at the start of a file that name the field of a web session's records."""
_COMMAND_TEXT: Final = re.compile(r"\s*<(command-|local-command-std|bash-)")
_INJECTED_TEXT: Final = re.compile(
    r"\s*<(system-reminder|local-command-caveat|ide_|new-diagnostics|user-prompt-submit-hook)"
    r"|\[Image: source: "
)
_SUMMARY: Final = re.compile(r"Summary:\n(.*?)(?:\n\nIf you need specific details|\Z)", re.DOTALL)


class ClaudeCode(TranscriptReader):
    """Reader of Claude Code's transcripts."""

    program = PROGRAM

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._projects: dict[Path, _ProjectIndex] = {}

    def default_folder(self) -> Path | None:
        """Return `projects` in `$CLAUDE_CONFIG_DIR` or `~/.claude`, if it exists."""
        folder = Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude") / "projects"
        return folder if folder.is_dir() else None

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield sessions and subagents below a folder, or the session in one file."""
        for file in [path] if path.is_file() else _find_session_files(path):
            is_transcript = file.name != "history.jsonl" and "workflows" not in file.parts
            if is_transcript or file == path:
                # Session ids are globally unique, so the project is not part of the key.
                session_id, folder = file.stem, file.parent
                if folder.name == "subagents":
                    session_id = f"{folder.parent.name}:{session_id.removeprefix('agent-')}"
                yield self.file_at(session_id, file)

    def fill(self, transcript: Transcript, file: TranscriptFile) -> None:
        """Read a session in two passes: first the tree, then the messages. Raises OSError."""
        path = file.paths[0]
        tree = _RecordTree(is_subagent=path.parent.name == "subagents")
        # A large file is parsed twice, because its records would need too much memory.
        records = list(_read_records(path)) if file.size <= MAX_KEPT_BYTES else None
        for line, record in records or _read_records(path):
            tree.add(record, line)
        tree.finish()
        builder = _SessionBuilder(transcript, tree)
        for line, record in records or _read_records(path):
            builder.add(record, line)
        builder.finish(path)
        if path.parent.name != "subagents" and path.suffix == ".jsonl":
            with self._lock:
                self._mark_copies(transcript, path)

    def _mark_copies(self, transcript: Transcript, path: Path) -> None:
        """Mark messages as copies if an older file of the project has their uuid."""
        index = self._projects.pop(path.parent, None) or _ProjectIndex(path.parent)
        self._projects[path.parent] = index
        if len(self._projects) > MAX_PROJECTS:
            del self._projects[next(iter(self._projects))]
        index.refresh(path)
        for message in transcript.messages:
            owner = index.owner_of(message.identity.partition("#")[0])
            if owner is not None and owner != path.name:
                transcript.facts["forked_from"] = session_key(PROGRAM, Path(owner).stem)
                transcript.facts["forked_after"] = message.identity
                message.body = without_usage(message.body, copied=True)


def _find_session_files(folder: Path) -> Iterator[Path]:
    """Yield the files of Claude Code below a folder, and the sessions of Claude Code on the web."""
    for file in find_files_below(folder, "*.json*"):
        if file.suffix == ".jsonl" or (file.suffix == ".json" and is_web_session(file)):
            yield file


def is_web_session(path: Path) -> bool:
    """Return whether a JSON file has a session of Claude Code on the web. Raises OSError."""
    with open_transcript(path) as file:
        head = file.read(_HEAD_BYTES)
        if b'"loglines"' not in head:
            return False
        content = head + file.read(MAX_RECORD_BYTES + 1 - len(head))
    # A larger file may be a session, which the reader reports as too large.
    is_large = len(content) > MAX_RECORD_BYTES
    return is_large or isinstance(as_dict(parse_json(content)).get("loglines"), list)


def _read_records(path: Path) -> Iterator[tuple[bytes, Any]]:
    """Yield the records of a session, each with its JSON. Raises OSError, NotASession."""
    if path.suffix != ".json":
        yield from read_json_lines(path)
        return
    # Claude Code on the web gives one object with all records in `loglines`.
    records = read_json_object(path).get("loglines")
    if not isinstance(records, list):
        raise NotASession("it is not a session of Claude Code")
    for record in records:
        yield msgspec.json.encode(record), record


class _ProjectIndex:
    """The oldest file of a project that has each record: a fork has copies of the records.

    Files only grow, so each refresh reads only their new lines.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._refreshed_at = float("-inf")
        self._end_offsets: dict[str, int] = {}
        """Offset of the end of the last complete line, by file name."""
        self._files: dict[str, tuple[str, str]] = {}
        """Time of the first record, and name, of each file, by file name."""
        self._owners: dict[int, tuple[str, str]] = {}
        """The value of the oldest file in `_files`, by the hash of the uuid of a record."""

    def refresh(self, own_file: Path) -> None:
        """Read the new lines of the files, at least those of `own_file`. Raises OSError."""
        self._read_new_lines(own_file)
        # An import calls this method for each file, so other files are not read every time.
        if monotonic() - self._refreshed_at < REFRESH_SECONDS:
            return
        self._refreshed_at = monotonic()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                # Skip a file that cannot be read, and continue with the other files.
                with suppress(OSError):
                    is_session = entry.name.endswith(".jsonl") and entry.is_file()
                    if is_session and entry.stat().st_size > self._end_offsets.get(entry.name, 0):
                        self._read_new_lines(Path(entry.path))

    def _read_new_lines(self, path: Path) -> None:
        name = path.name
        with open_transcript(path) as opened:
            if name not in self._files:
                # The first records may have no time.
                times = map(_TIME_FIELD.search, read_lines(opened))
                if first_time := next(filter(None, times), None):
                    self._files[name] = first_time[1].decode("ascii", "replace"), name
            opened.seek(self._end_offsets.get(name, 0))
            for line in read_lines(opened):
                if not line.endswith(b"\n"):
                    return
                self._end_offsets[name] = self._end_offsets.get(name, 0) + len(line)
                if (match := _UUID_FIELD.search(line)) is not None:
                    file, uuid_hash = self._files.get(name, ("", name)), hash(match[1])
                    self._owners[uuid_hash] = min(file, self._owners.get(uuid_hash, file))

    def owner_of(self, uuid: str) -> str | None:
        """Return the name of the oldest file with this record; None if no file has it."""
        return self._owners.get(hash(uuid.encode("utf-8", "surrogatepass")), (None, None))[1]


class _RecordNode(Struct):
    """A record of the tree."""

    parent: str | None
    type: str
    record_index: int
    message_id: str = ""
    call_ids: tuple[str, ...] = ()
    """Ids of tool calls that the record makes or answers."""
    caller: str | None = None
    """Uuid of the record whose tool call this record answers."""
    is_meta: bool = False
    is_sidechain: bool = False


class _RecordTree:
    """The tree of a session's records, and the uuids of those that the model still sees."""

    def __init__(self, *, is_subagent: bool) -> None:
        self._is_subagent = is_subagent
        self.nodes: dict[str, _RecordNode] = {}
        self.visible_uuids: set[str] = set()
        self.usage_owners: dict[str, str] = {}
        """Uuid of the last record of each response. The message of that record gets the usage."""
        self._compactions: dict[str, dict[str, Any]] = {}
        """Record of each compaction, by its uuid."""

    def add(self, record: Any, line: bytes) -> None:
        """Add a record of the file."""
        fields = as_dict(record)
        message = as_dict(fields.get("message"))
        uuid = fields.get("uuid")
        if not isinstance(uuid, str):
            has_message = isinstance(fields.get("message"), dict)
            uuid = digest_identity(fields) if has_message else ""
        if not uuid or uuid in self.nodes:
            return
        message_id = as_text(message.get("id"))
        node = _RecordNode(
            parent=as_text(record.get("parentUuid")) or None,
            type=as_text(record.get("type")),
            record_index=len(self.nodes),
            message_id=message_id,
            call_ids=tuple(_find_call_ids(message.get("content"))) if b"tool_" in line else (),
            caller=as_text(record.get("sourceToolAssistantUUID")) or None,
            is_meta=record.get("isMeta") is True,
            is_sidechain=not self._is_subagent
            and (record.get("isSidechain") is True or record.get("teamName") is not None),
        )
        self.nodes[uuid] = node
        if message_id and node.type == "assistant":
            self.usage_owners[message_id] = uuid
        if record.get("subtype") == "compact_boundary":
            self._compactions[uuid] = record

    def finish(self) -> None:
        """Set `visible_uuids`: the records of the current branch after the last compaction."""
        branch_uuids = self._current_branches()
        self._add_parallel_calls(branch_uuids)
        # After a rewind to an earlier message, the compactions behind it are on no current branch.
        compaction = next((c for c in reversed(self._compactions) if c in branch_uuids), None)
        first_index = 0 if compaction is None else self.nodes[compaction].record_index + 1
        self.visible_uuids = {
            uuid for uuid in branch_uuids if self.nodes[uuid].record_index >= first_index
        }
        if compaction is not None:
            # The compaction kept some earlier messages visible.
            metadata = as_dict(self._compactions[compaction].get("compactMetadata"))
            preserved_uuids = list_or_empty(as_dict(metadata.get("preservedMessages")).get("uuids"))
            self.visible_uuids.update(uuid for uuid in preserved_uuids if uuid in self.nodes)

    def _current_branches(self) -> set[str]:
        """Return the uuids of the records on the current branch of each tree.

        A file may hold several trees, for example if it begins in the middle of a conversation. The
        current branch of each tree is the branch that ends at the last leaf of the tree.
        """
        parents = {uuid: node.parent for uuid, node in self.nodes.items()}
        parent_uuids = set(parents.values())
        if parent_uuids <= {None}:
            # The records have no parents, so it is unknown whether a record was abandoned.
            return {uuid for uuid, node in self.nodes.items() if not node.is_sidechain}
        branch_uuids: set[str] = set()
        root_parents: set[str | None] = set()
        for uuid, node in reversed(self.nodes.items()):
            if uuid in parent_uuids or node.is_sidechain or node.is_meta:
                continue
            branch = branch_to(uuid, parents)
            root_parent = parents[branch[-1]]
            # An edited first prompt has the same parent as the prompt that it replaces, so the
            # older of the two branches is left out.
            if root_parent not in root_parents:
                root_parents.add(root_parent)
                branch_uuids.update(branch)
        return branch_uuids

    def _add_parallel_calls(self, branch_uuids: set[str]) -> None:
        """Add the records of parallel tool calls and their results, which are not on the branch."""
        answer_ids = {self.nodes[uuid].message_id for uuid in branch_uuids} - {""}
        call_ids: set[str] = set()
        for uuid, node in self.nodes.items():
            if node.type == "assistant" and (uuid in branch_uuids or node.message_id in answer_ids):
                branch_uuids.add(uuid)
                call_ids.update(node.call_ids)
        for uuid, node in self.nodes.items():
            has_result = not call_ids.isdisjoint(node.call_ids) or node.caller in branch_uuids
            if node.type == "user" and has_result:
                branch_uuids.add(uuid)


class _SessionBuilder:
    """Builder of a transcript: collects messages and facts of one session, record by record."""

    def __init__(self, transcript: Transcript, tree: _RecordTree) -> None:
        self._transcript = transcript
        self._tree = tree
        self._seen_records: set[str] = set()
        self._has_usage_records = False
        self._user_title = ""
        self._program_title = ""
        self._facts: dict[str, dict[str, None]] = {"cwd": {}, "gitBranch": {}, "version": {}}
        """Values of these record fields, in the order in which they first occur."""

    def add(self, record: Any, line: bytes) -> None:
        """Add a record of the file."""
        if not isinstance(record, dict):
            self._transcript.add_unreadable_line(line)
            return
        self._collect_facts(record)
        record_type = _record_type(record)
        uuid = as_text(record.get("uuid"))
        if not uuid and isinstance(record.get("message"), dict):
            uuid = digest_identity(record)
        message_id = as_text(as_dict(record.get("message")).get("id"))
        gets_usage = bool(uuid) and self._tree.usage_owners.get(message_id) == uuid
        drafts = messages_of(record, record_type, gets_usage=gets_usage)
        if not drafts:
            self._has_usage_records = self._has_usage_records or record_type == _USAGE
            return
        uuid = uuid or digest_identity(record)
        if uuid in self._seen_records:
            return
        self._seen_records.add(uuid)
        is_summary = drafts[0][1].get("kind") == "summary"
        is_internal = is_summary or record_type == "system:compact_boundary"
        is_hidden = is_internal or uuid not in self._tree.visible_uuids
        at = record.get("timestamp")
        self._transcript.add_record(uuid, drafts, record, at=at, hidden=is_hidden)

    def finish(self, path: Path) -> None:
        """Set title and facts of the session."""
        if not self._transcript.messages and self._has_usage_records:
            self._transcript.problems.append("it has only token counts, and no messages")
        title = _read_json_object(path, path.stem, "custom-title.json").get("customTitle")
        subagent_fields = _read_json_object(path, f"{path.stem}.meta.json")
        parent = {}
        if path.parent.name == "subagents":
            parent = {"key": session_key(PROGRAM, path.parent.parent.name)}
            if isinstance(subagent_fields.get("toolUseId"), str):
                parent["tool_call_id"] = subagent_fields["toolUseId"]
        self._transcript.finish(
            as_text(title)
            or self._user_title
            or self._program_title
            or as_text(subagent_fields.get("description"))
            or None,
            folders=list(self._facts["cwd"]),
            branches=list(self._facts["gitBranch"]),
            versions=list(self._facts["version"]),
            parent=parent,
        )

    def _collect_facts(self, record: Mapping[str, Any]) -> None:
        if "cwd" in record:
            for name, values in self._facts.items():
                if isinstance(value := record.get(name), str) and value:
                    values[value] = None
        match record.get("type"):
            case "custom-title":
                self._user_title = as_text(record.get("customTitle")) or self._user_title
            case "ai-title" | "summary":
                title = record.get("aiTitle") or record.get("summary")
                self._program_title = as_text(title) or self._program_title
            case "cost-state" if isinstance(record.get("totalCostUSD"), int | float):
                self._transcript.facts["reported_cost"] = record["totalCostUSD"]
        uuid = as_text(record.get("uuid"))
        is_visible = not uuid or uuid in self._tree.visible_uuids
        if record.get("isCompactSummary") is True and is_visible:
            text = text_of_parts(as_dict(record.get("message")).get("content"))
            # Remove the sentences that the program puts around the summary.
            summary = _SUMMARY.search(text)
            self._transcript.summary = (summary[1] if summary else text).strip()


def prompt_of_record(record: Mapping[str, Any]) -> str:
    """Return the text of the prompt in a record of the type `user`; empty if there is none."""
    prompts = (body for body, notes in _user_messages(record) if notes.get("kind") is None)
    texts = (text_of_parts(body["content"]) for body in prompts if body["role"] == "user")
    return next(filter(None, texts), "")


def _kind_of_text(text: str) -> Kind | None:
    """Return the kind of a text with role `user` that the user did not write; else None."""
    if text.startswith("[Request interrupted by user"):
        return "interruption"
    if text.lstrip().startswith("<task-notification>"):
        return "notification"
    if _COMMAND_TEXT.match(text):
        return "command"
    return "injected" if _INJECTED_TEXT.match(text) else None


def messages_of(record: Mapping[str, Any], record_type: str, *, gets_usage: bool) -> list[Draft]:
    """Return the messages of a record of this type; empty if the type is not imported."""
    attachment = as_dict(record.get("attachment"))
    match record_type:
        case "user":
            return _user_messages(record)
        case "assistant":
            return [_assistant_message(as_dict(record.get("message")), gets_usage=gets_usage)]
        case "attachment:queued_command":
            content = _blocks_to_parts(attachment.get("prompt", ""))
            return [({"role": "user", "content": content}, {})]
        case "system:compact_boundary":
            return [({"role": "system", "content": ""}, {"kind": "compaction"})]
        case "system:local_command":
            return [({"role": "user", "content": record.get("content", "")}, {"kind": "command"})]
    prefix, _, attachment_type = record_type.partition(":")
    if prefix != "attachment" or attachment_type in _REPEATED_TYPES:
        return []
    file_name = attachment.get("filename") or attachment.get("displayPath")
    text = attachment_type.replace("_", " ")
    if isinstance(file_name, str):
        text += f": {file_name}"
    return [({"role": "user", "content": f"[{text}]"}, {"kind": "injected"})]


def _user_messages(record: Mapping[str, Any]) -> list[Draft]:
    """Return the messages of a record: tool results, and texts of the program and of the user.

    A record of the user may begin with texts that the program added, such as the open file.
    """
    content = as_dict(record.get("message")).get("content")
    kind: Kind | None = "injected" if record.get("isMeta") is True else None
    if record.get("isCompactSummary") is True:
        kind = "summary"
    blocks = content if isinstance(content, list) else []
    if kind == "summary" or not blocks:
        text_kind = None if kind == "summary" else _kind_of_text(text_of_parts(content))
        body = {"role": "user", "content": _blocks_to_parts(content)}
        return [(body, {"kind": text_kind or kind})]
    drafts: list[Draft] = []
    for group_kind, group in groupby(blocks, _kind_of_block):
        group_blocks = list(group)
        if group_kind == "result":
            drafts += [_tool_result(as_dict(block)) for block in group_blocks]
            continue
        body = {"role": "user", "content": _blocks_to_parts(group_blocks)}
        drafts.append((body, {"kind": group_kind or kind}))
    return drafts


def _kind_of_block(block: Any) -> Kind | Literal["result"] | None:
    """Return the kind of a block of content: `result` for a tool result, None for a prompt."""
    fields = as_dict(block)
    if fields.get("type") == "tool_result":
        return "result"
    return _kind_of_text(text_of_parts([fields]))


def _tool_result(block: Mapping[str, Any]) -> Draft:
    """Return the tool result in a block of Anthropic's format."""
    content = _blocks_to_parts(block.get("content", ""))
    result = make_tool_result(block.get("tool_use_id"), content)
    return result, {"failed": block.get("is_error") is True}


def _assistant_message(message: dict[str, Any], *, gets_usage: bool) -> Draft:
    content = message.get("content")
    body: dict[str, Any] = {"role": "assistant", "content": content}
    if isinstance(content, list):
        parts: list[Any] = []
        for block in content:
            match block:
                case {"type": "text", "text": str(text)}:
                    parts.append(text_part(text))
                case {"type": "thinking", "thinking": str(text)}:
                    body.setdefault("reasoning_content", text)
                case {"type": "tool_use"}:
                    call_id, name = block.get("id"), block.get("name")
                    call = make_tool_call(call_id, name, block.get("input", {}))
                    body.setdefault("tool_calls", []).append(call)
                case _:
                    parts.append(block)
        body["content"] = make_content(parts)
    elif content is not None and not isinstance(content, str):
        body["content"] = [content]
    model = as_text(message.get("model"))
    if not model or model == "<synthetic>":
        return body, {}
    usage = message.get("usage")
    return body, {
        "model": model,
        "usage": _read_usage(usage) if gets_usage and isinstance(usage, dict) else None,
        "response": as_text(message.get("id")),
    }


def _read_usage(usage: Mapping[str, Any]) -> dict[str, int]:
    cached_tokens = usage.get("cache_read_input_tokens", 0)
    cache_writes = usage.get("cache_creation_input_tokens")
    return usage_counts(
        prompt=sum_counts(usage.get("input_tokens"), cached_tokens, cache_writes),
        answer=usage.get("output_tokens"),
        cached=cached_tokens,
    )


def _blocks_to_parts(content: Any) -> Any:
    """Return content with Claude's image blocks as parts of the chat format."""
    return [_block_to_part(block) for block in content] if isinstance(content, list) else content


def _block_to_part(block: Any) -> Any:
    match block:
        case {
            "type": "image",
            "source": {"type": "base64", "media_type": kind, "data": data, **more},
            **other,
        } if not more and not other:
            return image_part(f"data:{kind};base64,{data}")
    return block


# --- small helpers ------------------------------------------------------------------------------


def _record_type(record: Mapping[str, Any]) -> str:
    """Return the type of a record, with the subtype of attachments and system records."""
    record_type = as_text(record.get("type"))
    if not record_type and isinstance(record.get("message"), dict):
        # Records of usage trackers have no type, and often no content.
        if record["message"].get("content") is None:
            return _USAGE
        record_type = as_text(record["message"].get("role")) or "assistant"
    if record_type == "attachment":
        return f"attachment:{as_text(as_dict(record.get('attachment')).get('type'))}"
    if record_type == "system":
        return f"system:{as_text(record.get('subtype'))}"
    return record_type or "unknown"


def _find_call_ids(content: Any) -> Iterator[str]:
    for block in list_or_empty(content):
        fields = as_dict(block)
        id_field = "id" if fields.get("type") == "tool_use" else "tool_use_id"
        if isinstance(call_id := fields.get(id_field), str):
            yield call_id


def _read_json_object(path: Path, *names: str) -> dict[str, Any]:
    """Return the JSON object in a file beside a transcript; an empty dict if the file has none."""
    return as_dict(parse_json(read_side_file(path.parent, *names)))
