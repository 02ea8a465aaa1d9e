"""Random outages, starts, kills and deletions: each message of the fallback is merged once.

Each answer names its own messages, and each delivered answer stays delivered.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
from msgspec import to_builtins

from stenolog.catalog.message_metadata import answered_seqs, mark_seen
from stenolog.channels.delivery import is_due
from stenolog.context.turn_state import turn_state
from stenolog.errors import NoSuchSession, OnceConflict, SessionExists
from stenolog.records import Message
from stenolog.sessions.chat_marks import DELIVERY_FIELD, MOVE_FIELD, DeliveryMark, read_mark
from stenolog.stores.base import Store
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
        self.answered: dict[str, set[str]] = {}
        """The messages that each answer answers."""
        self.delivered: set[str] = set()
        """Answers that were sent to a chat app."""
        self.moves: dict[str, str] = {}
        """The last move of each chat."""
        self.may_delete = self.chance.random() < 0.5
        self.has_hidden = False
        self.has_moved = False
        """Whether a session was deleted or restored."""
        self.has_raced = False
        """Whether a session was deleted or restored just before the merge added a message."""
        self.has_delivered_beside = False
        """Whether another process delivered answers before the merge recorded deliveries."""
        self.has_killed_merge = False
        self.folder: Path | None = None

    def _append(self, store: Store, by: str, key: str = "") -> None:
        key = key or self.chance.choice(KEYS)
        once = self.chance.choice([None, None, "t0", "t1", "t2"])
        texts = [
            f"{by} {key} {len(self.said) + n:04}" for n in range(self.chance.choice([1, 1, 1, 3]))
        ]
        with suppress(OnceConflict):
            batch = [{"role": "user", "content": text} for text in texts]
            store.add_messages(key, batch, once=once)
            self.said += texts

    def _answer(self, store: Store, by: str) -> None:
        """Answer the messages that wait in a session, as an agent does."""
        key = self.chance.choice(KEYS)
        with suppress(NoSuchSession):
            view = store.view(key)
            state = turn_state(view.messages)
            if not state.questions:
                return
            text = f"{by} {key} {len(self.said):04}"
            answer = {"role": "assistant", "content": text}
            seen = view.messages[-1].seq
            self.answered[text] = {
                str(message.content) for message in view.messages if message.seq in state.questions
            }
            if self.chance.random() < 0.3:  # a message arrives while the answer is written
                self._append(store, by, key)
                text = f"{by} {key} {len(self.said):04}"
                self.answered[text] = self.answered.pop(str(answer["content"]))
                answer = {**answer, "content": text}
            once = f"answer {len(self.said)}"
            body = mark_seen(answer, seen=seen, answers=state.questions)
            seq = store.add_full_message(key, body, once=once)
            self.said.append(text)
            if self.chance.random() < 0.5:
                self.has_delivered_beside |= by == "store" and self.has_killed_merge
                self._deliver(store, key, seq, text)

    def _deliver(self, store: Store, key: str, seq: int, text: str) -> None:
        mark = read_mark(store.info(key).meta)
        earlier_seqs = {
            message.seq
            for message in store.get_history(key, full=True)
            if message.content in self.answered and message.seq != seq
        }
        owed = {n for n in earlier_seqs if is_due(mark, n)}
        new_mark = DeliveryMark(seq=seq, state="sent", origin={}, owed=sorted(owed))
        store.set_meta(key, **{DELIVERY_FIELD: to_builtins(new_mark)})
        self.delivered.add(text)

    def use_the_store(self) -> None:
        """Let another process use the regular store."""
        with open_store(self.where) as store:
            match self.chance.randrange(8):
                case 0 | 1:
                    self._append(store, "store")
                case 6 | 7:
                    self._answer(store, "store")
                case 2 | 3 if self.may_delete:
                    self.has_moved = True
                    with suppress(NoSuchSession):
                        store.delete(self.chance.choice(KEYS))
                case 4 if trash := store.admin.list_trash():
                    self.has_moved = True
                    trashed = self.chance.choice(trash)
                    # A killed merge does not find a new session that has another key now.
                    as_key = None if self.has_killed_merge else self.chance.choice([None, "else"])
                    with suppress(SessionExists, NoSuchSession):
                        store.admin.restore(trashed.key, uid=trashed.uid, as_key=as_key)
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
                if self.chance.random() < 0.5:
                    self._answer(store, "fallback")
            if self.chance.random() < 0.2:
                key = self.chance.choice(KEYS)
                self.moves[key] = f"{key} {len(self.said)}"
                store.set_meta(key, **{MOVE_FIELD: {"key": self.moves[key], "before": key}})
            if self.chance.random() < 0.3:
                key = self.chance.choice(KEYS)
                self.has_hidden = True
                store.admin.hide(key, 2, 2)
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
            self.has_moved = False
            for _ in range(self.chance.choice([0, 0, 0, 1, 2])):
                self.use_the_store()
            self.has_raced |= self.has_moved and done[-1] == "add_messages"
            if self.chance.random() < 0.1:
                with self.patch.context() as patched:
                    patched.setattr(fallbacks, "LOCK_TIMEOUT", 0.0)
                    open_sessions(self.where).close()

        # A new session whose uid is not known yet may be anywhere.
        self.has_killed_merge = True
        with steps(self.patch, disturb) as done, suppress(_Killed):
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
            if not self.may_delete and not self.has_delivered_beside:
                self._check_marks(store)
            histories = [store.get_history(key, full=True) for key in store.list_sessions()]
            for trashed in store.admin.list_trash():
                store.admin.restore(trashed.key, uid=trashed.uid, as_key=f"looked at {trashed.uid}")
                histories.append(store.get_history(f"looked at {trashed.uid}", full=True))
        for history in histories:
            texts = [str(message.content) for message in history]
            found.update(texts)
            for key in KEYS:
                merged = [text for text in texts if text.startswith(f"fallback {key} ")]
                assert merged == sorted(merged)
            if not self.has_raced:
                self._check_answers(history)
        assert found == Counter(self.said)

    def _check_answers(self, history: Sequence[Message]) -> None:
        """Check that each answer names the messages of its session that it answers."""
        texts = {message.seq: str(message.content) for message in history}
        answered: set[str] = set()
        for message in history:
            named = answered_seqs(message.to_dict())
            if named is None:
                continue
            expected = self.answered[str(message.content)]
            assert {texts[seq] for seq in named} == expected & set(texts.values())
            answered |= expected
        unanswered = set(texts.values()) - answered - self.answered.keys()
        waiting = turn_state([message for message in history if not message.hidden]).unanswered
        visible = {texts[m.seq] for m in history if not m.hidden}
        assert {texts[seq] for seq in waiting} >= unanswered & visible
        if not self.has_hidden:  # a message waits again if its answer is hidden
            assert {texts[seq] for seq in waiting} == unanswered

    def _check_marks(self, store: Store) -> None:
        """Check which answers are due, and where the chats go on."""
        for key in store.list_sessions():
            mark = read_mark(store.info(key).meta)
            for message in store.get_history(key, full=True):
                if message.content in self.answered:
                    assert is_due(mark, message.seq) == (message.content not in self.delivered)
        for key, moved_to in self.moves.items():
            assert store.info(key).meta[MOVE_FIELD]["key"] == moved_to


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
    "seeds", [range(30), pytest.param(range(30, 300), marks=pytest.mark.slow)], ids=str
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
