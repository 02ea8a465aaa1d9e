"""Transcripts of Claude Code: `~/.claude/projects/<project>/<session id>.jsonl`.

Each line is a record. Records with a `uuid` form a tree by `parentUuid`; the branch that ends at
the last record is the current one, and messages of other branches are hidden. One answer of the
model is several records with the same `message.id` and the same usage, which counts once.
"""

import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
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
    hidden,
    json_lines,
    one_line,
    parse_json,
    text_of_parts,
    time_from,
    tool_call,
    usage_counts,
    without,
)

PROGRAM: Final = "claude-code"
FIELD: Final = "claude_code"
"""Field of a stored message that holds the rest of its record."""
_COPIES: Final = frozenset(
    {
        "agent_listing_delta",
        "date",
        "deferred_tools_delta",
        "environment",
        "model",
        "prompt_snapshot",
        "remote_session_change",
        "session_context",
        "skill_listing",
        "total_tokens_reminder",
    }
)
"""Attachments that repeat prompts, schemas and settings. They are not imported."""
MAX_KEPT_BYTES: Final = 8 * 1024 * 1024
"""Maximum size of a file whose records are kept in memory while it is read."""
FRESH_SECONDS: Final = 1.0
"""How long the index of a project is used before its other files are looked at again."""
MAX_PROJECTS: Final = 8
"""Maximum number of projects whose records are indexed at the same time."""
_UUID: Final = re.compile(rb'"uuid":"([0-9a-f-]{36})"')
_TIME: Final = re.compile(rb'"timestamp":"([^"]+)"')
_COMMAND: Final = re.compile(r"\s*<(command-|local-command-std|bash-)")
_INJECTED: Final = re.compile(r"\s*<(system-reminder|local-command-caveat)|\[Image: source: ")
_SUMMARY: Final = re.compile(r"Summary:\n(.*?)(?:\n\nIf you need specific details|\Z)", re.DOTALL)


class ClaudeCode:
    """Reader of Claude Code's transcripts."""

    program = PROGRAM

    def __init__(self) -> None:
        self._projects: dict[Path, _ProjectIndex] = {}

    def default_folder(self) -> Path | None:
        """Return `projects` in `$CLAUDE_CONFIG_DIR` or `~/.claude`, if it exists."""
        home = os.environ.get("CLAUDE_CONFIG_DIR")
        folder = (Path(home) if home else Path.home() / ".claude") / "projects"
        return folder if folder.is_dir() else None

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield sessions and subagents below a folder, or the session in one file."""
        if path.is_file():
            yield file_at(PROGRAM, _key(path), path)
            return
        for found in files_below(path, "*.jsonl"):
            if _is_transcript(found):
                yield file_at(PROGRAM, _key(found), found)

    def read(self, file: TranscriptFile, *, is_complete: bool = True) -> Transcript:
        """Read a session in two passes: first the tree, then the messages. Raises OSError."""
        path = file.paths[0]
        tree = _Tree(is_subagent=path.parent.name == "subagents")
        # A large file is parsed twice instead of kept in memory.
        kept = list(json_lines(path)) if file.size <= MAX_KEPT_BYTES else None
        for line, record in kept or json_lines(path):
            tree.add(record, line)
        tree.finish()
        transcript = Transcript(program=PROGRAM, key=file.key)
        reading = _Reading(transcript, tree)
        for line, record in kept or json_lines(path):
            reading.add(record, line)
        reading.finish(path)
        if not is_complete and path.parent.name != "subagents":
            self._leave_to_owners(transcript, path)
        return transcript

    def _leave_to_owners(self, transcript: Transcript, path: Path) -> None:
        """Remove the messages that an earlier session of the project has with the same uuid."""
        index = self._projects.pop(path.parent, None) or _ProjectIndex(path.parent)
        self._projects[path.parent] = index
        if len(self._projects) > MAX_PROJECTS:
            del self._projects[next(iter(self._projects))]
        index.refresh(path)
        own = []
        for message in transcript.messages:
            owner = index.owner_of(message.identity.partition("#")[0])
            if owner is None or owner == path.name:
                own.append(message)
            else:
                transcript.source["forked_from"] = f"{PROGRAM}:{Path(owner).stem}"
        transcript.messages = own


class _IndexedFile(Struct):
    """The records of a session file that were read so far."""

    end: int = 0
    """Position behind the last complete line."""
    start: str = ""
    """Time of the first record."""
    records: "array[int]" = field(default_factory=lambda: array("q"))
    """Hashes of the uuids."""


class _ProjectIndex:
    """Which records several sessions of a project have: forks and resumed sessions repeat them.

    Files only grow, so each refresh reads what is new.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _IndexedFile] = {}
        self._refreshed = float("-inf")
        self._seen: set[int] = set()
        self._shared: set[int] = set()
        self._owners: dict[int, str] = {}

    def refresh(self, own: Path) -> None:
        """Read what was written since the last time, always in the `own` file. Raises OSError."""
        self._read(own, self._files.setdefault(own.name, _IndexedFile()))
        # An import of many files asks for each of them.
        if monotonic() - self._refreshed < FRESH_SECONDS:
            return
        self._refreshed = monotonic()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(".jsonl") and self._has_grown(entry):
                    path = Path(entry.path)
                    with suppress(FileNotFoundError):
                        self._read(path, self._files.setdefault(entry.name, _IndexedFile()))

    def _has_grown(self, entry: "os.DirEntry[str]") -> bool:
        known = self._files.get(entry.name)
        with suppress(FileNotFoundError):
            return known is None or entry.stat().st_size > known.end
        return False

    def _read(self, path: Path, file: _IndexedFile) -> None:
        own = set(file.records)
        with path.open("rb") as opened:
            opened.seek(file.end)
            for line in opened:
                if not line.endswith(b"\n"):
                    return
                file.end += len(line)
                if not file.start and (at := _TIME.search(line)):
                    file.start = at[1].decode("ascii", "replace")
                if (found := _UUID.search(line)) is None:
                    continue
                record = hash(found[1])
                if record in own:
                    continue
                own.add(record)
                file.records.append(record)
                if record in self._seen:
                    self._shared.add(record)
                    self._owners.pop(record, None)
                self._seen.add(record)

    def owner_of(self, uuid: str) -> str | None:
        """Return the file that owns a record which several files have: the one that began first."""
        record = hash(uuid.encode("utf-8", "surrogatepass"))
        if record not in self._shared:
            return None
        if record not in self._owners:
            having = (name for name, file in self._files.items() if record in file.records)
            self._owners[record] = min(having, key=lambda name: (self._files[name].start, name))
        return self._owners[record]


def _is_transcript(path: Path) -> bool:
    return path.name != "history.jsonl" and "workflows" not in path.parts


def _key(path: Path) -> str:
    """Return the key of a session or subagent. Ids are global: the project is not part of it."""
    if path.parent.name == "subagents":
        return f"{PROGRAM}:{path.parent.parent.name}:{path.stem.removeprefix('agent-')}"
    return f"{PROGRAM}:{path.stem}"


class _Node(Struct):
    """A record of the tree."""

    uuid: str
    parent: str | None
    type: str
    number: int
    message_id: str = ""
    call_ids: tuple[str, ...] = ()
    """Ids of tool calls that the record makes or answers."""
    caller: str | None = None
    """Record whose tool call this one answers."""
    is_meta: bool = False
    is_side: bool = False


class _Tree:
    """The tree of a session's records, and the records that the model still sees."""

    def __init__(self, *, is_subagent: bool) -> None:
        self._is_subagent = is_subagent
        self.nodes: dict[str, _Node] = {}
        self.visible: set[str] = set()
        self.usage_owner: dict[str, str] = {}
        """The last record of each response: only it carries the usage."""
        self._boundary: dict[str, Any] | None = None
        self._boundary_number = -1

    def add(self, record: Any, line: bytes) -> None:
        """Add a record of the file."""
        uuid = record.get("uuid") if isinstance(record, dict) else None
        if not isinstance(uuid, str):
            if isinstance(record, dict) and isinstance(record.get("message"), dict):
                uuid = _without_uuid(record)
            else:
                return
        if uuid in self.nodes:
            return
        message = as_dict(record.get("message"))
        message_id = as_text(message.get("id"))
        node = _Node(
            uuid=uuid,
            parent=as_text(record.get("parentUuid")) or None,
            type=as_text(record.get("type")),
            number=len(self.nodes),
            message_id=message_id,
            call_ids=tuple(_call_ids(message.get("content"))) if b"tool_" in line else (),
            caller=as_text(record.get("sourceToolAssistantUUID")) or None,
            is_meta=record.get("isMeta") is True,
            is_side=not self._is_subagent
            and (record.get("isSidechain") is True or record.get("teamName") is not None),
        )
        self.nodes[uuid] = node
        if message_id and node.type == "assistant":
            self.usage_owner[message_id] = uuid
        if record.get("subtype") == "compact_boundary":
            self._boundary, self._boundary_number = record, node.number

    def finish(self) -> None:
        """Find the records on the current branch, after the last compaction."""
        in_order = list(self.nodes.values())
        path = self._path(in_order)
        self._add_parallel_calls(path, in_order)
        kept = self._preserved()
        self.visible = {
            uuid for uuid in path if self.nodes[uuid].number > self._boundary_number
        } | kept

    def _path(self, in_order: Sequence[_Node]) -> set[str]:
        """Return the records of the current branch.

        A file may hold several trees, for example if it begins in the middle of a conversation.
        Each of them has a current branch: the one that ends at its last leaf.
        """
        if all(node.parent is None for node in in_order):
            # A file without parents: nothing says that a record was abandoned.
            return {node.uuid for node in in_order if not node.is_side}
        parents = {node.parent for node in in_order}
        path: set[str] = set()
        roots: set[str | None] = set()
        for node in reversed(in_order):
            if node.uuid in parents or node.is_side or node.is_meta:
                continue
            branch, root = self._branch(node)
            # An edited first prompt has the same parent as the prompt that it replaces.
            if root not in roots:
                roots.add(root)
                path |= branch
        return path

    def _branch(self, leaf: _Node) -> tuple[set[str], str | None]:
        """Return the records from a leaf up to its root, and the parent that the root names."""
        branch: set[str] = set()
        place: str | None = leaf.uuid
        while place is not None and place in self.nodes and place not in branch:
            branch.add(place)
            place = self.nodes[place].parent
        return branch, place

    def _add_parallel_calls(self, path: set[str], in_order: Sequence[_Node]) -> None:
        """Add what the walk misses: the other calls of an answer, and their results."""
        answers = {self.nodes[uuid].message_id for uuid in path} - {""}
        for node in in_order:
            if node.message_id in answers and node.type == "assistant":
                path.add(node.uuid)
        calls = {
            call
            for uuid in path
            if self.nodes[uuid].type == "assistant"
            for call in self.nodes[uuid].call_ids
        }
        for node in in_order:
            if node.type == "user" and (
                not calls.isdisjoint(node.call_ids)
                or (node.caller is not None and node.caller in path)
            ):
                path.add(node.uuid)

    def _preserved(self) -> set[str]:
        """Return the messages before the compaction that the model still sees."""
        if self._boundary is None:
            return set()
        found = as_dict(as_dict(self._boundary.get("compactMetadata")).get("preservedMessages"))
        uuids = found.get("uuids")
        return {uuid for uuid in uuids if uuid in self.nodes} if isinstance(uuids, list) else set()


class _Reading:
    """The messages and facts of one session, collected record by record."""

    def __init__(self, transcript: Transcript, tree: _Tree) -> None:
        self._transcript = transcript
        self._tree = tree
        self._seen: set[str] = set()
        self._first_prompt = ""
        self._user_title = ""
        self._program_title = ""
        self._folders: dict[str, None] = {}
        self._branches: dict[str, None] = {}
        self._models: dict[str, None] = {}
        self._versions: dict[str, None] = {}

    def add(self, record: Any, line: bytes) -> None:
        """Add a record of the file."""
        if not isinstance(record, dict):
            self._transcript.add_problem(f"a line is not a JSON object: {line[:40]!r}")
            return
        self._collect_facts(record)
        kind = _record_type(record)
        owns_usage = kind == "assistant" and self._owns_usage(record)
        messages = messages_of(record, owns_usage=owns_usage, kind=kind)
        if not messages:
            self._transcript.leave_out(kind, len(line))
            return
        uuid = as_text(record.get("uuid")) or _without_uuid(record)
        if uuid in self._seen:
            return
        self._seen.add(uuid)
        is_hidden = uuid not in self._tree.visible
        self._transcript.messages += [hidden(one) if is_hidden else one for one in messages]

    def finish(self, path: Path) -> None:
        """Set title and facts of the session."""
        transcript = self._transcript
        title = as_dict(_read_json(path.with_suffix("") / "custom-title.json")).get("customTitle")
        self._user_title = as_text(title) or self._user_title
        about = as_dict(_read_json(path.with_name(path.stem + ".meta.json")))
        name = self._user_title or self._program_title or as_text(about.get("description"))
        transcript.title = one_line(name or self._first_prompt)
        facts: dict[str, Any] = {
            "program": PROGRAM,
            "path": str(path),
            "folders": list(self._folders),
            "branches": list(self._branches),
            "models": list(self._models),
            "versions": list(self._versions),
        }
        if path.parent.name == "subagents":
            parent = {"key": f"{PROGRAM}:{path.parent.parent.name}"}
            if isinstance(about.get("toolUseId"), str):
                parent["tool_call_id"] = about["toolUseId"]
            facts["parent"] = parent
        transcript.source |= filled(facts)

    def _owns_usage(self, record: Mapping[str, Any]) -> bool:
        message_id = as_text(as_dict(record.get("message")).get("id"))
        return self._tree.usage_owner.get(message_id) == record.get("uuid")

    def _collect_facts(self, record: Mapping[str, Any]) -> None:
        if "cwd" in record:
            for name, found in (
                ("cwd", self._folders),
                ("gitBranch", self._branches),
                ("version", self._versions),
            ):
                if isinstance(value := record.get(name), str) and value:
                    found[value] = None
        message = as_dict(record.get("message"))
        if message:
            model = as_text(message.get("model"))
            if model and model != "<synthetic>":
                self._models[model] = None
        match record.get("type"):
            case "custom-title":
                self._user_title = as_text(record.get("customTitle")) or self._user_title
            case "ai-title" | "summary":
                title = record.get("aiTitle") or record.get("summary")
                self._program_title = as_text(title) or self._program_title
            case "cost-state" if isinstance(record.get("totalCostUSD"), int | float):
                self._transcript.source["reported_cost"] = record["totalCostUSD"]
            case "user" if not self._first_prompt and kind_of_record(record) is None:
                self._first_prompt = text_of_parts(message.get("content"))
        if record.get("isCompactSummary") is True:
            self._transcript.summary = _summary_in(text_of_parts(message.get("content")))


def kind_of_record(record: Mapping[str, Any]) -> Kind | None:
    """Return the kind of a user record that the user did not write; None for a prompt."""
    text = text_of_parts(as_dict(record.get("message")).get("content"))
    if record.get("isCompactSummary") is True:
        return "summary"
    if text.startswith("[Request interrupted by user"):
        return "interruption"
    if text.lstrip().startswith("<task-notification>"):
        return "notification"
    if _COMMAND.match(text):
        return "command"
    if record.get("isMeta") is True or _INJECTED.match(text):
        return "injected"
    return None


def messages_of(
    record: Mapping[str, Any], *, owns_usage: bool = True, kind: str = ""
) -> list[TranscriptMessage]:
    """Return the messages of one record; an empty list for a record that is not imported."""
    match kind or _record_type(record):
        case "user":
            return _user_messages(record)
        case "assistant":
            return _assistant_messages(record, owns_usage=owns_usage)
        case "attachment:queued_command":
            attachment = dict(record["attachment"])
            content = _parts(attachment.pop("prompt", ""))
            body = {"role": "user", "content": content, FIELD: {**record, "attachment": attachment}}
            return [_message(record, body)]
        case "system:compact_boundary":
            body = {"role": "system", "content": "", FIELD: dict(record)}
            return [hidden(_message(record, body))]
        case "system:local_command":
            rest = {name: value for name, value in record.items() if name != "content"}
            body = {"role": "user", "content": record.get("content", ""), FIELD: rest}
            return [_message(record, body, kind="command")]
        case kind if kind.startswith("attachment:") and kind.split(":", 1)[1] not in _COPIES:
            body = {"role": "user", "content": _attachment_text(record), FIELD: dict(record)}
            return [_message(record, body, kind="injected")]
    return []


def record_of(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the record that these messages were made of."""
    rest = dict(messages[0][FIELD])
    if isinstance(rest.get("attachment"), dict):
        if rest["attachment"].get("type") == "queued_command":
            prompt = _blocks(messages[0]["content"])
            rest["attachment"] = {**rest["attachment"], "prompt": prompt}
        return rest
    if rest.get("type") == "system":
        if rest.get("subtype") == "local_command":
            rest["content"] = messages[0]["content"]
        return rest
    shape = rest.pop("content_blocks", None)
    rest.pop("block", None)
    message = {**as_dict(rest.get("message")), "role": messages[0]["role"]}
    if message["role"] == "tool":
        message["role"] = "user"
        message["content"] = [_result_block(one) for one in messages]
        rest["toolUseResult"] = _restored(rest.get("toolUseResult"), messages[0]["content"])
        if rest["toolUseResult"] is None:
            del rest["toolUseResult"]
    elif message["role"] == "user":
        message["content"] = _blocks(messages[0]["content"])
    elif shape != "none":
        message["content"] = _answer_blocks(messages[0], shape or [])
    return {**rest, "message": message}


# --- records to messages ------------------------------------------------------------------------


def _user_messages(record: Mapping[str, Any]) -> list[TranscriptMessage]:
    message = as_dict(record.get("message"))
    content = message.get("content")
    rest = {**record, "message": without(message, "role", "content")}
    blocks = content if isinstance(content, list) else []
    results = [block for block in blocks if as_dict(block).get("type") == "tool_result"]
    if results and len(results) == len(blocks):
        found = []
        for number, block in enumerate(results):
            body: dict[str, Any] = {
                "role": "tool",
                "tool_call_id": as_text(block.get("tool_use_id")),
                "content": _parts(block.get("content", "")),
            }
            more = without(block, "type", "tool_use_id", "content")
            if "content" not in block:
                more["content"] = None
            field: dict[str, Any] = {"block": more} if more else {}
            if number == 0:
                if "toolUseResult" in rest:
                    rest["toolUseResult"] = _shared(rest["toolUseResult"], body["content"])
                field |= rest
            body[FIELD] = field
            failed = block.get("is_error") is True
            found.append(_message(record, body, number=number, failed=failed))
        return found
    kind = kind_of_record(record)
    body = {"role": "user", "content": _parts(content), FIELD: rest}
    one = _message(record, body, kind=kind)
    return [hidden(one) if kind == "summary" else one]


def _assistant_messages(record: Mapping[str, Any], *, owns_usage: bool) -> list[TranscriptMessage]:
    message = as_dict(record.get("message"))
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    body: dict[str, Any] = {"role": "assistant", "content": None}
    parts: list[Any] = [] if isinstance(content, list) else _as_list(content)
    shape: list[Any] = []
    for block in blocks:
        fields = as_dict(block)
        match fields.get("type"):
            case "text" if isinstance(fields.get("text"), str):
                parts.append({"type": "text", "text": fields["text"]})
                shape.append({"type": "text", **without(fields, "type", "text")})
            case "thinking" if isinstance(fields.get("thinking"), str):
                if "reasoning_content" in body:
                    shape.append(block)
                    continue
                body["reasoning_content"] = fields["thinking"]
                shape.append({"type": "thinking", **without(fields, "type", "thinking")})
            case "tool_use":
                call = tool_call(fields.get("id"), fields.get("name"), fields.get("input", {}))
                body.setdefault("tool_calls", []).append(call)
                shape.append({"type": "tool_use", **without(fields, "type", "id", "name", "input")})
            case _:
                parts.append(block)
                shape.append({"type": "part"})
    if parts:
        is_text = (
            len(parts) == 1 and isinstance(parts[0], dict) and parts[0].keys() == {"type", "text"}
        )
        body["content"] = parts[0]["text"] if is_text else parts
    if isinstance(content, str):
        body["content"] = content
    rest = {**record, "message": without(message, "role", "content")}
    if isinstance(content, list) and shape != _simple_shape(body):
        rest["content_blocks"] = shape
    elif isinstance(content, str):
        rest["content_blocks"] = "text"
    elif "content" not in message:
        rest["content_blocks"] = "none"
    body[FIELD] = rest
    model = as_text(message.get("model"))
    is_made_by_model = bool(model) and model != "<synthetic>"
    usage = _usage(message.get("usage")) if owns_usage and is_made_by_model else None
    return [
        _message(
            record,
            body,
            model=model if is_made_by_model else "",
            usage=usage,
            response=as_text(message.get("id")),
        )
    ]


def _usage(found: Any) -> dict[str, int] | None:
    if not isinstance(found, dict):
        return None
    counts = [
        found.get(name)
        for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    ]
    prompt = sum(count for count in counts if isinstance(count, int))
    return usage_counts(
        prompt=prompt,
        answer=found.get("output_tokens"),
        cached=found.get("cache_read_input_tokens", 0),
    )


def _message(
    record: Mapping[str, Any],
    body: dict[str, Any],
    *,
    number: int = 0,
    kind: Kind | None = None,
    **notes: Any,
) -> TranscriptMessage:
    uuid = as_text(record.get("uuid")) or _without_uuid(record)
    identity = uuid if number == 0 else f"{uuid}#{number}"
    return TranscriptMessage(
        identity=identity,
        message=annotated(body, identity, kind=kind, **notes),
        at=time_from(record.get("timestamp")),
    )


def _parts(content: Any) -> Any:
    """Return content with Claude's image blocks as parts of the chat format."""
    if not isinstance(content, list):
        return content
    return [_image_part(block) or block for block in content]


def _image_part(block: Any) -> dict[str, Any] | None:
    fields = as_dict(block)
    source = as_dict(fields.get("source"))
    if (
        fields.keys() != {"type", "source"}
        or fields.get("type") != "image"
        or source.keys() != {"type", "media_type", "data"}
        or source["type"] != "base64"
    ):
        return None
    url = f"data:{source['media_type']};base64,{source['data']}"
    return {"type": "image_url", "image_url": {"url": url}}


def _attachment_text(record: Mapping[str, Any]) -> str:
    attachment = as_dict(record.get("attachment"))
    name = attachment.get("filename") or attachment.get("displayPath")
    kind = as_text(attachment.get("type")).replace("_", " ")
    return f"[{kind}: {name}]" if isinstance(name, str) else f"[{kind}]"


# --- messages to records ------------------------------------------------------------------------


def _blocks(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [_image_block(part) or part for part in content]


def _image_block(part: Any) -> dict[str, Any] | None:
    fields = as_dict(part)
    url = as_dict(fields.get("image_url")).get("url")
    if fields.get("type") != "image_url" or not isinstance(url, str):
        return None
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def _result_block(message: Mapping[str, Any]) -> dict[str, Any]:
    more = dict(as_dict(message[FIELD]).get("block", {}))
    block = {"tool_use_id": message["tool_call_id"], "type": "tool_result"}
    if "content" in more:
        del more["content"]
    else:
        block["content"] = _blocks(message["content"])
    return {**block, **more}


def _answer_blocks(message: Mapping[str, Any], shape: Any) -> Any:
    if shape == "text":
        return message["content"]
    content = message.get("content")
    parts = iter(content if isinstance(content, list) else [{"type": "text", "text": content}])
    calls = iter(message.get("tool_calls", ()))
    blocks = []
    for more in shape or _simple_shape(message):
        match more.get("type"):
            case "text":
                blocks.append({**next(parts), **more})
            case "part":
                blocks.append(next(parts))
            case "thinking" if "thinking" not in more:
                blocks.append({**more, "thinking": message["reasoning_content"]})
            case "tool_use":
                call = next(calls)
                made = {"id": call["id"], "name": call["function"]["name"]}
                blocks.append({**more, **made, "input": parse_json(call["function"]["arguments"])})
            case _:
                blocks.append(more)
    return blocks


def _simple_shape(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the shape of an answer with one text, or only tool calls: it need not be stored."""
    shape: list[dict[str, Any]] = []
    if isinstance(body.get("content"), str):
        shape.append({"type": "text"})
    return shape + [{"type": "tool_use"} for _ in body.get("tool_calls", ())]


_SAME: Final = "$content"
"""Replaces a text in `toolUseResult` that the message's content has already."""


def _shared(value: Any, content: Any) -> Any:
    """Return the value with a marker instead of each copy of the content."""
    if isinstance(content, str) and len(content) > len(_SAME) and value == content:
        return _SAME
    if isinstance(value, dict):
        return {name: _shared(one, content) for name, one in value.items()}
    return value


def _restored(value: Any, content: Any) -> Any:
    if value == _SAME:
        return content
    if isinstance(value, dict):
        return {name: _restored(one, content) for name, one in value.items()}
    return value


# --- small helpers ------------------------------------------------------------------------------


def _record_type(record: Mapping[str, Any]) -> str:
    """Return the type of a record, with the subtype of attachments and system records."""
    kind = as_text(record.get("type"))
    if not kind and isinstance(record.get("message"), dict):
        # Records of usage trackers have no type.
        kind = as_text(record["message"].get("role")) or "assistant"
    if kind == "attachment":
        return f"attachment:{as_text(as_dict(record.get('attachment')).get('type'))}"
    if kind == "system":
        return f"system:{as_text(record.get('subtype'))}"
    return kind or "unknown"


def _call_ids(content: Any) -> Iterator[str]:
    for block in content if isinstance(content, list) else ():
        fields = as_dict(block)
        found = fields.get("id") if fields.get("type") == "tool_use" else fields.get("tool_use_id")
        if isinstance(found, str):
            yield found


def _summary_in(text: str) -> str:
    """Return the summary without the sentences that the program puts around it."""
    found = _SUMMARY.search(text)
    return found[1].strip() if found else text.strip()


def _without_uuid(record: Mapping[str, Any]) -> str:
    return f"sha256:{digest_of(record)[:32]}"


def _as_list(content: Any) -> list[Any]:
    return [] if content is None else [content]


def _read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except OSError:
        return None
