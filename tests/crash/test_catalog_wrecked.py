"""Another program wrecks the file of the catalog while it is in use; no search may be wrong.

`tests/unit/catalog/test_catalog_files.py` has the moments that this suite has found. Nothing is
written here with the old modification time: docs/decisions/0017 says that this is not noticed.
"""

import os
import random
import shutil
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from stenolog.catalog import Catalog, open_catalog
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

_ROUNDS = 1_000
_PREPARED = 2_000
"""Number of messages at the start. The moments are longer if the file is large."""
_WRECKS = ("truncate", "garbage", "copy", "copy", "swap", "delete")


def _wreck(file: Path, older: Path, kind: str, chance: random.Random) -> None:
    with suppress(OSError, ValueError):
        match kind:
            case "truncate":
                os.truncate(file, chance.randrange(file.stat().st_size))
            case "garbage":
                with file.open("r+b") as opened:
                    opened.seek(chance.randrange(file.stat().st_size))
                    opened.write(chance.randbytes(chance.choice([20, 3_000])))
            case "copy":
                shutil.copy2(file, older)
            case "swap":
                older.replace(file)
            case "delete":
                file.unlink()


def _wreck_forever(file: Path, kinds: tuple[str, ...]) -> int:
    """Return the id of a new process that wrecks the file until it is killed."""
    pid = os.fork()
    if pid == 0:
        chance = random.Random(os.getpid())
        while True:
            time.sleep(chance.random() * 0.02)
            _wreck(file, file.with_name("older"), chance.choice(kinds), chance)
    return pid


def _check_searches(store: Store, catalogs: ExitStack, chance: random.Random) -> None:
    opened: list[Catalog] = []
    for number in range(_ROUNDS):
        if number % 50 == 0:
            # Catalogs that went to memory stay there.
            opened = [catalogs.enter_context(open_catalog(store)) for _ in range(2)]
        key, word = f"k:{chance.randrange(7)}", f"word{number}"
        seq = store.add_message(key, "user", f"{word} allmessages")
        assert chance.choice(opened).search(word).count == 1
        store.admin.hide(key, seq, seq)
        assert [hit.hidden for hit in chance.choice(opened).search(word).hits] == [True]


@pytest.mark.parametrize("kinds", [_WRECKS, ("copy", "swap")], ids=["all", "copy and swap"])
@pytest.mark.parametrize("where", ["{0}/w", "sqlite:{0}/s.db"], ids=["jsonl", "sqlite"])
def test_searches_are_right_while_another_process_wrecks_the_file(
    tmp_path: Path, where: str, kinds: tuple[str, ...]
) -> None:
    with open_store(where.format(tmp_path)) as store, ExitStack() as catalogs:
        file = store.admin.place.catalog_file
        assert file is not None
        for key in range(7):
            texts = [f"old{number}" for number in range(key, _PREPARED, 7)]
            store.add_messages(f"k:{key}", [{"role": "user", "content": text} for text in texts])
        with open_catalog(store) as catalog:
            catalog.refresh()
        pid = _wreck_forever(file, kinds)
        try:
            _check_searches(store, catalogs, random.Random(1))
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        with open_catalog(store) as catalog:
            assert catalog.search("old1").count == 1
