"""Exports of ChatGPT, Claude.ai and Open WebUI, message by message.

Nodes of ChatGPT are rebuilt from their messages.
"""

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from stenolog.transfer.transcripts.chat_exports import ChatGPT, ClaudeAI, OpenWebUI
from stenolog.transfer.transcripts.programs import detect_program
from stenolog.transfer.transcripts.transcript import Transcript, TranscriptReader
from support.transcripts import SAMPLES, outline, rebuild_records

EXPORT = SAMPLES / "chatgpt-export"
FERRY = "chatgpt:6a100001-0000-8000-a000-000000000001"
BOAT = "chatgpt:6a100001-0000-8000-a000-000000000002"


def read(path: Path, reader: TranscriptReader | None = None) -> dict[str, Transcript]:
    reader = reader or ChatGPT()
    return {file.key: reader.read(file) for file in reader.find(path)}


@pytest.mark.parametrize("name", ["conversations.json", "mitkury/conversations.json"])
def test_each_node_can_be_rebuilt_from_its_message(name: str) -> None:
    conversations = json.loads((EXPORT / name).read_text(encoding="utf-8"))
    nodes = [node for one in conversations for node in one["mapping"].values()]
    rebuilt = rebuild_records(ChatGPT(), EXPORT / name)
    assert rebuilt
    assert all(node in nodes for node in rebuilt)


def test_export_with_branches_thoughts_and_a_python_call_is_read() -> None:
    transcript = read(EXPORT)[FERRY]
    assert transcript.title == "Ferry timetable"
    assert transcript.facts["models"] == ["gpt-5-2", "gpt-5-2-thinking"]
    assert outline(transcript) == [
        "+ system injected I live on an island. Be brie",
        "+ user When does the last ferry lea",
        "- assistant At ten.",
        "+ assistant thinking",
        "+ assistant python()",
        "+ tool 21:40",
        "+ assistant thinking",
        "+ assistant At **21:40**.",
        "- user And on Sundays?",
        "- assistant No ferry on Sundays.",
        "+ user And on Mondays?",
        "+ assistant Mondays as usual.",
    ]


def test_a_result_belongs_to_the_call_above_it() -> None:
    messages = [one.body for one in read(EXPORT)[FERRY].messages]
    call = next(body["tool_calls"][0] for body in messages if "tool_calls" in body)
    result = next(body for body in messages if body["role"] == "tool")
    assert result["tool_call_id"] == call["id"]
    assert json.loads(call["function"]["arguments"]) == {"input": "print(max(['20:15','21:40']))"}


def test_pictures_of_the_export_are_shown() -> None:
    transcript = read(EXPORT)[BOAT]
    assert outline(transcript) == [
        "+ user image_url text",
        "+ assistant dalle.text2im()",
        "+ tool text",
        "+ assistant Here is the larger boat.",
    ]
    url = transcript.messages[0].body["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/png;base64,")
    assert transcript.facts["archived"] is True


def test_zip_file_is_read_like_its_folder(tmp_path: Path) -> None:
    shutil.copytree(EXPORT, tmp_path / "export")
    packed = Path(shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "export"))
    from_zip = read(packed)
    assert {key: outline(one) for key, one in read(EXPORT).items()} == {
        key: outline(from_zip[key]) for key in (FERRY, BOAT)
    }


def test_newest_leaf_replaces_a_missing_current_node(tmp_path: Path) -> None:
    conversations = json.loads((EXPORT / "conversations.json").read_text(encoding="utf-8"))
    conversations[0]["current_node"] = "gone"
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps(conversations), encoding="utf-8")
    assert outline(read(path)[FERRY])[-1] == "+ assistant Mondays as usual."


def test_claude_ai_branches_tools_and_attachments() -> None:
    found = read(SAMPLES / "claude-ai-export", ClaudeAI())
    knots = found["claude-ai:7c000000-0000-4000-8000-00000000000a"]
    assert knots.title == "Knots for sailors"
    assert outline(knots) == [
        "+ user text text",
        "+ assistant thinking web_search()",
        "+ tool knowledge",
        "+ assistant The bowline.",
        "- user And on ice?",
        "- assistant Also the bowline.",
        "+ user And on wet rope?",
        "+ assistant A double sheet bend.",
    ]
    assert "clove hitch" in knots.messages[0].body["content"][1]["text"]
    assert found["claude-ai:7c000000-0000-4000-8000-00000000000b"].messages == []


def test_open_webui_regenerated_answers_are_hidden() -> None:
    (transcript,) = read(SAMPLES / "open-webui", OpenWebUI()).values()
    assert transcript.title == "Sails"
    assert outline(transcript) == [
        "+ user Which sail in a storm? ⛵",
        "- assistant None.",
        '+ assistant <details type="reasoning" do [9]',
        "+ user text image_url",
        "+ assistant You are welcome. [5]",
    ]


@pytest.mark.parametrize(
    "fault", ["content", "compressed content", "directory", "version", "name", "encrypted"]
)
def test_zip_that_cannot_be_read_is_reported(fault: str, tmp_path: Path) -> None:
    file = tmp_path / "export.zip"
    compression = zipfile.ZIP_LZMA if fault == "compressed content" else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.write(EXPORT / "conversations.json", "conversations.json")
        archive.writestr("é", "")
    content = bytearray(file.read_bytes())
    directory = content.index(b"PK\x01\x02")
    match fault:
        case "content":
            content[content.index(b"Ferry")] ^= 1
        case "compressed content":
            content[60:70] = bytes(10)
        case "directory":
            content[directory] ^= 1
        case "version":
            content[directory + 6] = 99
        case "name":
            content[content.rindex("é".encode())] = 0xFF
        case "encrypted":
            content[6] |= 1  # the flag in the header of the file
            content[directory + 8] |= 1
    file.write_bytes(content)
    with pytest.raises(OSError, match="the zip is damaged or encrypted"):
        read(file)
    assert detect_program(file) is None


def test_export_with_a_damaged_picture_is_read(tmp_path: Path) -> None:
    (picture,) = EXPORT.glob("*.png")
    file = tmp_path / "export.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.write(EXPORT / "conversations.json", "conversations.json")
        archive.write(picture, picture.name)
    file.write_bytes(file.read_bytes().replace(b"IEND", b"IEN_"))
    assert outline(read(file)[BOAT])[0] == "+ user text text"


@pytest.mark.parametrize(
    "error", ["model not found", {"content": "model not found"}, {"message": "model not found"}]
)
@pytest.mark.parametrize("content", ["", "The first half"])
def test_open_webui_errors_are_in_the_answer(tmp_path: Path, error: object, content: str) -> None:
    message = {"id": "a", "role": "assistant", "content": content, "error": error}
    chat = {"history": {"messages": {"a": message}, "currentId": "a"}}
    path = tmp_path / "export.json"
    path.write_text(json.dumps([{"id": "c", "title": "t", "chat": chat}]))
    (transcript,) = read(path, OpenWebUI()).values()
    (answer,) = transcript.messages
    assert answer.body["content"].endswith("Error: model not found")
    assert answer.body["content"].startswith(content)
    assert answer.body["stenolog"]["failed"] is True


@pytest.mark.parametrize("has_text", [True, False])
def test_recordings_of_speech_are_not_in_the_title(tmp_path: Path, *, has_text: bool) -> None:
    recording = {"content_type": "real_time_user_audio_video_asset_pointer", "frames": []}
    transcription = {"content_type": "audio_transcription", "text": "Can you hear me?"}
    parts = [transcription, recording] if has_text else [recording]
    content = {"content_type": "multimodal_text", "parts": parts}
    node = {"id": "n", "message": {"author": {"role": "user"}, "content": content}}
    chat = {"id": "c", "mapping": {"n": node}, "current_node": "n"}
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([chat]))
    (transcript,) = read(path).values()
    assert transcript.title == ("Can you hear me?" if has_text else "[recording]")
    assert rebuild_records(ChatGPT(), path) == [node]
