"""One row per call on a session: example arguments, and what the contract expects of the call.

The tests of the contract that treat all calls alike take their calls from this table, and so do the
state machine and the crash contract. `test_every_call_on_a_session_is_in_the_table` fails if
`Store` or `StoreAdmin` has a call on a session without a row.
"""

from typing import Any, Final, NamedTuple

from stenolog.errors import NoSuchSession, NothingToUndo
from stenolog.stores.base import Store
from support.contract.open_store_base import append, user_message, user_messages
from support.store_calls import Call

CREATES: Final = object()
"""Value of `CallRow.unknown_key` for a call that creates the session."""


class CallRow(NamedTuple):
    """A call, with arguments that have an effect on the session of `append_sample`."""

    call: Call
    unknown_key: Any
    """For an unknown key: CREATES, the type of the error, or the result of the call."""
    writes: bool = True
    changes_view: bool = False
    """Whether the call changes visibility, summary or meta, or destroys messages."""
    undoable: bool = False
    moves: bool = False
    """Whether the call creates, removes or restores a session."""


def _change(call: Call, unknown_key: Any = None, *, undoable: bool = True) -> CallRow:
    return CallRow(call, unknown_key, changes_view=True, undoable=undoable)


CALL_TABLE: Final = (
    CallRow(Call("add_message", "user", "late"), CREATES),
    CallRow(Call("add_full_message", user_message("late")), CREATES),
    CallRow(Call("add_messages", user_messages("late", "later")), CREATES),
    CallRow(Call("get_history"), [], writes=False),
    CallRow(Call("get_summary"), "", writes=False),
    CallRow(Call("info"), NoSuchSession, writes=False),
    CallRow(Call("view"), NoSuchSession, writes=False),
    CallRow(Call("lease", ttl=60), NoSuchSession, writes=False),
    _change(Call("set_summary", "late"), CREATES),
    _change(Call("truncate_history", 1)),
    _change(Call("clear")),
    _change(Call("set_history", user_messages("late")), CREATES),
    _change(Call("hide", 6, 6)),
    _change(Call("show", 1, 3)),
    _change(Call("pop")),
    _change(Call("checkpoint", summary="late", upto=0), CREATES),
    _change(Call("undo"), NothingToUndo, undoable=False),
    _change(Call("set_meta", title="late"), CREATES, undoable=False),
    _change(Call("purge", before=4), NoSuchSession, undoable=False),
    CallRow(Call("compact"), None),
    CallRow(Call("delete"), NoSuchSession, moves=True),
    CallRow(Call("purge"), NoSuchSession, moves=True),
    CallRow(Call("fork", "late"), NoSuchSession, moves=True),
    CallRow(Call("restore"), NoSuchSession, moves=True),
)

WRITE_CALLS: Final = [row.call for row in CALL_TABLE if row.writes]
CHANGING_CALLS: Final = [row.call for row in CALL_TABLE if row.writes and not row.moves]
VIEW_CHANGES: Final = [row.call for row in CALL_TABLE if row.changes_view]
UNDOABLE_CALLS: Final = [row.call for row in CALL_TABLE if row.undoable]


def append_sample(store: Store, key: str) -> None:
    """Store a summary and seven messages, of which three are below the floor and one is hidden."""
    append(store, key, "1", "2", "3", "4", "5", "6", "7")
    store.checkpoint(key, summary="so far", upto=2)
    store.compact(key)
    store.admin.hide(key, 5, 5)
    store.checkpoint(key, summary="more", upto=3)
