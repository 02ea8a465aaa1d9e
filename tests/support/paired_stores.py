"""Two stores behind one interface: each call goes to both, and the results must agree."""

from collections.abc import Callable, Iterator
from typing import Any

from stenolog import StenologError
from stenolog.records import CompactionResult, Message, PurgeResult, SessionInfo, TrashedSession
from stenolog.stores.base import SessionView, Store
from support.store_calls import find_method

_ENGINE_FIELDS = {"uid", "created", "updated", "archived", "generation", "bytes"}
"""Fields of SessionInfo whose values may differ between engines."""


class PairedStores:
    """Two stores of different engines that must return the same results."""

    def __init__(self, one: Store, other: Store) -> None:
        self._one = one
        self._other = other

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            found = _outcome(self._one, name, arguments, options)
            expected = _outcome(self._other, name, arguments, self._translated(name, options))
            assert _same(found) == _same(expected), f"{name}{arguments} {options}"
            if isinstance(found, StenologError):
                raise found
            return found

        return call

    def _translated(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """Translate the uid of a deleted session; engines create different uids."""
        if name != "restore" or options.get("uid") is None:
            return options
        places = [trashed.uid for trashed in self._before]
        return {**options, "uid": self._other.admin.list_trash()[places.index(options["uid"])].uid}

    @property
    def admin(self) -> "PairedStores":
        return self

    def view(
        self, key: str, last: int | None = None, *, since: SessionView | None = None
    ) -> SessionView:
        """Read a view of each engine; with `since`, one may return only new messages."""
        olds = (None, None) if since is None else (since, _views[_place(since)])
        one, other = (
            _outcome(store, "view", (key, last), {"since": old})
            for store, old in zip((self._one, self._other), olds, strict=True)
        )
        if isinstance(one, StenologError):
            assert type(one) is type(other), f"view {key!r}"
            raise one
        assert isinstance(one, SessionView)
        if since is None:
            assert _same(one) == _same(other), f"view {key!r} {last}"
            _views[_place(one)] = other
        else:
            assert _same(since.merged(one)) == _same(_views[_place(since)].merged(other))
        return one

    def list_trash(self) -> list[TrashedSession]:
        self._before = self._one.admin.list_trash()
        assert _same(self._before) == _same(self._other.admin.list_trash())
        return self._before


_views: dict[tuple[object, ...], SessionView] = {}
"""View of the second store for each view of the first."""


def _place(view: SessionView) -> tuple[object, ...]:
    return view.uid, view.generation, view.change, view.upto, view.last


def _outcome(store: Store, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        result = find_method(store, name)(*arguments, **options)
    except StenologError as error:
        return error
    return list(result) if isinstance(result, Iterator) else result


def _same(result: Any) -> Any:
    """Return the part of a result that must be the same on all engines."""
    match result:
        case StenologError():
            return type(result)
        case Message():
            return result.seq, result.to_json(), result.hidden
        case SessionInfo():
            names = set(result.__struct_fields__) - _ENGINE_FIELDS
            return {name: getattr(result, name) for name in names}
        case SessionView():
            return _same(result.info), _same(list(result.messages)), result.upto, result.last
        case TrashedSession():
            return result.key, result.count
        case PurgeResult():
            return result.messages, result.first, result.last, result.not_reached
        case CompactionResult():
            return None
        case list():
            return [_same(one) for one in result]
        case dict():
            return sorted(result)
        case _:
            return result
