"""Tests P13: every released format stays readable, and a newer one is rejected by name.

The files under golden/vN are never changed; `python tests/format/test_golden.py` wrote v1 once.
"""

import json
import shutil
from pathlib import Path
from zlib import crc32

import pytest

from stenolog import JSONLStore
from stenolog.errors import NewerFormat

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.glob("v*"))


def write(workspace: Path) -> None:
    """Write a session with every kind of record."""
    key = "telegram:123"
    with JSONLStore(workspace) as store:
        for number in range(1, 5):
            store.add_message(key, "user", f"message {number} – naïve ☃ 停车")
        store.add_messages(key, [{"role": "tool", "n": n} for n in range(3)], once="batch")
        store.add_full_message(key, {"role": "user", "content": "lone \ud83d, NUL \0", "n": 2**80})
        store.checkpoint(key, summary="the first three", upto=3)
        store.compact(key)
        store.set_meta(key, title="A talk")
        store.add_message(key, "assistant", "after", once="single")
    path = workspace / "sessions" / "telegram%3A123.jsonl"
    with path.open("ab") as file:
        file.write(b'{"kind":"message","seq":10,"at"')
    with JSONLStore(workspace) as store:
        store.set_history(key, [{"role": "user", "content": "replaced"}])
        store.undo(key)
        store.admin.hide(key, 5, 5)
    (workspace / "expected.json").write_text(json.dumps(read_session(workspace), indent=1) + "\n")


def read_session(workspace: Path) -> dict[str, object]:
    """Return everything that a reader sees of the session."""
    key = "telegram:123"
    with JSONLStore(workspace, read_only=True) as store:
        info = store.info(key)
        return {
            "sessions": store.list_sessions(),
            "visible": [[m.seq, m.at.isoformat(), m.to_dict()] for m in store.get_history(key)],
            "full": [
                [m.seq, m.hidden, m.to_json().decode("utf-8", "surrogatepass")]
                for m in store.get_history(key, full=True)
            ],
            "summary": store.get_summary(key),
            "meta": dict(info.meta),
            "floor": info.floor,
            "last_seq": info.last_seq,
            "undoable": info.undoable,
            "uid": info.uid,
            "void_bytes": info.void_bytes,
        }


@pytest.mark.parametrize("version", VERSIONS)
def test_p13_a_released_format_stays_readable(version: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / version, tmp_path / "w")
    expected = json.loads((GOLDEN / version / "expected.json").read_text())
    assert read_session(tmp_path / "w") == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_p13_sessions_of_a_released_format_can_be_appended_to(version: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / version, tmp_path / "w")
    with JSONLStore(tmp_path / "w") as store:
        last = store.info("telegram:123").last_seq
        assert store.add_message("telegram:123", "user", "new") == last + 1
        assert store.add_message("telegram:123", "assistant", "after", once="single") == 9
        store.undo("telegram:123")
        assert [m.seq for m in store.get_history("telegram:123")][:2] == [4, 5]


def signed(fields: dict[str, object]) -> bytes:
    text = json.dumps(fields, separators=(",", ":")).encode()[:-1]
    return b'%b,"crc":"%08x"}\n' % (text, crc32(text))


def newer_state(seq: int, body: dict[str, object]) -> bytes:
    at = "2030-01-01T00:00:00.000000Z"
    return signed({"kind": "state", "seq": seq, "at": at, "body": body})


@pytest.mark.parametrize(
    "body",
    [
        {"format": 2, "key": "a", "uid": "u", "generation": 1, "created": "x"},
        {"format": 2, "everything": "is different"},
    ],
)
def test_p13_newer_format_is_rejected_with_its_number_even_while_open(
    body: dict[str, object], tmp_path: Path
) -> None:
    with JSONLStore(tmp_path) as store:
        store.add_message("a", "user", "hello")
        assert len(store.get_history("a")) == 1
        path = tmp_path / "sessions" / "a.jsonl"
        with path.open("ab") as file:
            file.write(newer_state(2, body))
        before = path.read_bytes()
        for running in (True, False):
            with pytest.raises(NewerFormat, match="format 2"):
                store.get_history("a")
            with pytest.raises(NewerFormat, match="upgrade"):
                store.add_message("a", "user", "again")
            with pytest.raises(NewerFormat):
                store.clear("a")
            if running:
                store.close()
                store = JSONLStore(tmp_path)
        assert path.read_bytes() == before
        store.close()


def test_p13_unknown_record_kind_is_rejected_unless_optional(tmp_path: Path) -> None:
    at = "2030-01-01T00:00:00.000000Z"
    with JSONLStore(tmp_path) as store:
        store.add_message("a", "user", "hello")
        path = tmp_path / "sessions" / "a.jsonl"
        with path.open("ab") as file:
            file.write(signed({"kind": "x-mark", "seq": 2, "at": at, "body": {}}))
        assert store.add_message("a", "user", "again") == 2
        assert [m.content for m in store.get_history("a")] == ["hello", "again"]
        with path.open("ab") as file:
            file.write(signed({"kind": "embed", "seq": 3, "at": at, "body": {"v": [1]}}))
        for call in (store.get_history, store.clear, store.delete, store.admin.purge):
            with pytest.raises(NewerFormat, match="'embed'"):
                call("a")
        with pytest.raises(NewerFormat, match="'embed'"):
            store.add_message("a", "user", "no")


def test_example_of_the_format_page_matches_a_golden_file() -> None:
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    example = page.partition("## Worked example")[2].split("```")[1].strip().split("\n")
    log = GOLDEN / "v1" / "sessions" / "telegram%3A123.jsonl"
    lines = log.read_text(encoding="utf-8").split("\n")
    assert len(example) > 10
    assert [line for line in lines if line in example] == example


if __name__ == "__main__":
    write(GOLDEN / "v1")
