"""What is purged from a SQLite store leaves no trace in its index, whatever the index held."""

from pathlib import Path

import stenolog
from stenolog.catalog import open_catalog


def _bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())


def test_p4_purge_removes_words_that_the_index_had_deleted_before(tmp_path: Path) -> None:
    with (
        stenolog.open_store(f"sqlite:{tmp_path / 's.db'}") as store,
        open_catalog(store) as catalog,
    ):
        store.add_message("secretkey", "user", "zebrasecret xylophonequux")
        assert catalog.search("zebrasecret").hits
        store.delete("secretkey")
        assert not catalog.list().entries
        assert store.admin.purge("secretkey").not_reached == ()
    text = _bytes(tmp_path)
    for word in (b"zebrasecret", b"ylophonequux", b"secretkey"):
        assert word not in text


def test_p4_refresh_that_read_before_a_purge_does_not_write_after_it(
    tmp_path: Path,
) -> None:
    with (
        stenolog.open_store(f"sqlite:{tmp_path / 's.db'}") as store,
        open_catalog(store) as catalog,
    ):
        catalog.refresh()
        store.add_message("secretkey", "user", "zebrasecret")
        history = store.get_history

        def purge_meanwhile(key: str, **options: object) -> list[stenolog.Message]:
            found = history(key, **options)  # type: ignore[arg-type]
            store.get_history = history  # type: ignore[method-assign]
            store.admin.purge("secretkey")
            return found

        store.get_history = purge_meanwhile  # type: ignore[method-assign]
        catalog.refresh()
        assert not catalog.list().entries
    assert b"zebrasecret" not in _bytes(tmp_path)
