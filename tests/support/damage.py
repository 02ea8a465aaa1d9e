"""Damage to one stored message, on each engine, while no process has the store open."""

import gzip
from pathlib import Path

import apsw
import psycopg


def damage_message(where: str, key: str, seq: int) -> None:
    """Make the stored message at `seq` unreadable, in the live data or in an archive."""
    if where.startswith("sqlite:"):
        connection = apsw.Connection(where.removeprefix("sqlite:"))
        connection.execute(
            "UPDATE message SET body = x'7b22ff' WHERE seq = ? AND session = "
            "(SELECT id FROM session WHERE key = ?)",
            (seq, key),
        )
        assert connection.changes() == 1
        connection.close()
    elif where.startswith("postgres"):
        with psycopg.connect(where, autocommit=True) as server:
            done = server.execute(
                "UPDATE stenolog.message AS t SET body = '{\"ro' WHERE t.seq = %s AND t.session IN "
                "(SELECT id FROM stenolog.session WHERE key = %s)",
                (seq, key.encode()),
            )
            assert done.rowcount == 1
    else:
        _damage_line(Path(where), seq)


def _damage_line(folder: Path, seq: int) -> None:
    """Damage the line of the message at `seq` in the only log below `folder`."""
    wanted = b'{"kind":"message","seq":%d,' % seq
    for log in (folder / "sessions").rglob("*.jsonl*"):
        is_archive = log.suffix == ".gz"
        content = gzip.decompress(log.read_bytes()) if is_archive else log.read_bytes()
        if wanted in content:
            content = content.replace(wanted, wanted.replace(b"kind", b"kinX"))
            log.write_bytes(gzip.compress(content) if is_archive else content)
            return
    raise AssertionError(f"no log has the message at seq {seq}")
