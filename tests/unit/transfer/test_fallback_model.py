"""Random outages, starts, kills and deletions: each message of the fallback is merged once."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from stenolog.errors import NoSuchSession, OnceConflict, SessionExists
from stenolog.stores.open_store import open_store
from stenolog.transfer import fallback as fallbacks
from stenolog.transfer.fallback import FallbackStore
from stenolog.transfer.open_sessions import open_sessions
from support import temporary_folders
from support.merge_steps import broken, steps

WHERE: Final = {"jsonl": "{}", "sqlite": "sqlite:{}/steno.db"}
KEYS: Final = ("telegram:1", "b")


@pytest.fixture
def workspace() -> Iterator[Path]:
    with temporary_folders.folder() as path:
        (path / "w").mkdir(mode=0o700)
        yield path / "w"


class _Killed(BaseException):
    """Ends a start like SIGKILL: nothing of stenolog handles this exception."""


class _World:
    """A store, its fallback, and the messages that either of them acknowledged."""

    def __init__(self, where: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.where = where
        self.chance = random.Random(seed)
        self.patch = monkeypatch
        self.said: list[str] = []
        """Every acknowledged message. Messages of one fallback session are in order."""
        self.has_killed_merge = False
        self.folder: Path | None = None

    def _append(self, store: object, by: str) -> None:
        key, once = self.chance.choice(KEYS), self.chance.choice([None, None, "t0", "t1", "t2"])
        texts = [
            f"{by} {key} {len(self.said) + n:04}" for n in range(self.chance.choice([1, 1, 1, 3]))
        ]
        with suppress(OnceConflict):
            batch = [{"role": "user", "content": text} for text in texts]
            store.add_messages(key, batch, once=once)  # type: ignore[attr-defined]
            self.said += texts

    def use_the_store(self) -> None:
        """Let another process use the regular store."""
        with open_store(self.where) as store:
            match self.chance.randrange(6):
                case 0 | 1:
                    self._append(store, "store")
                case 2 | 3:
                    with suppress(NoSuchSession):
                        store.delete(self.chance.choice(KEYS))
                case 4 if trash := store.list_trash():
                    trashed = self.chance.choice(trash)
                    # A killed merge does not find a new session that has another key now.
                    as_key = None if self.has_killed_merge else self.chance.choice([None, "else"])
                    with suppress(SessionExists, NoSuchSession):
                        store.restore(trashed.key, uid=trashed.uid, as_key=as_key)
                case _:
                    store.set_meta(self.chance.choice(KEYS), title="a title")

    def use_the_fallback(self) -> None:
        """An outage."""
        with broken(self.patch), open_sessions(self.where) as sessions:
            store = sessions.store
            assert isinstance(store, FallbackStore)
            self.folder = store.folder
            for _ in range(self.chance.randint(1, 4)):
                self._append(store, "fallback")
            if self.chance.random() < 0.3:
                key = self.chance.choice(KEYS)
                store.hide(key, 2, 2)
                store.set_meta(key, tags=["x"])

    def change_the_clock(self) -> None:
        """Set the clock forwards or back."""
        now, shift = time.monotonic_ns, self.chance.randint(-(10**15), 10**15)
        self.patch.setattr(time, "time_ns", lambda: 1_800_000_000 * 10**9 + now() + shift)

    def keep_the_folder(self) -> None:
        """Put a damaged log into the folder of the fallback, or remove it."""
        if self.folder is not None and self.folder.is_dir():
            damaged_log = self.folder / "damaged.jsonl"
            if damaged_log.exists():
                damaged_log.unlink()
            else:
                damaged_log.write_text("not a record\n" * 2)

    def start(self) -> None:
        """Start; the merge is killed at a random step, or disturbed between its steps."""
        kill_at = self.chance.choice([None, self.chance.randint(1, 12)])

        def disturb(step: int) -> None:
            if step == kill_at:
                raise _Killed
            for _ in range(self.chance.choice([0, 0, 0, 1, 2])):
                self.use_the_store()
            if self.chance.random() < 0.1:
                with self.patch.context() as patched:
                    patched.setattr(fallbacks, "LOCK_TIMEOUT", 0.0)
                    open_sessions(self.where).close()

        # A new session whose uid is not known yet may be anywhere.
        self.has_killed_merge = True
        with steps(self.patch, disturb), suppress(_Killed):
            open_sessions(self.where).close()
            self.has_killed_merge = False

    def check(self) -> None:
        """Check that each message is stored once, in order."""
        if self.folder is not None:
            (self.folder / "damaged.jsonl").unlink(missing_ok=True)
        open_sessions(self.where).close()
        assert self.folder is None or not self.folder.exists()
        found: Counter[str] = Counter()
        with open_store(self.where) as store:
            histories = [store.get_history(key, full=True) for key in store.list_sessions()]
            for trashed in store.list_trash():
                store.restore(trashed.key, uid=trashed.uid, as_key=f"looked at {trashed.uid}")
                histories.append(store.get_history(f"looked at {trashed.uid}", full=True))
        for history in histories:
            texts = [str(message.content) for message in history]
            found.update(texts)
            for key in KEYS:
                merged = [text for text in texts if text.startswith(f"fallback {key} ")]
                assert merged == sorted(merged)
        assert found == Counter(self.said)


def _run(where: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        world = _World(where, seed, patched)
        actions = [world.use_the_store, world.use_the_fallback, world.start]
        rare = [world.change_the_clock, world.keep_the_folder]
        for _ in range(world.chance.randint(4, 14)):
            world.chance.choice([*actions * 3, *rare])()
        world.check()


@pytest.mark.parametrize("engine", WHERE)
@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 200), marks=pytest.mark.slow)], ids=str
)
def test_p1_each_message_of_the_fallback_is_merged_once(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, engine: str, seeds: range
) -> None:
    for seed in seeds:
        place = workspace / str(seed)
        place.mkdir(mode=0o700)
        try:
            _run(WHERE[engine].format(place), seed, monkeypatch)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
