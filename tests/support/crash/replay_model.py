"""All disk states that a power cut may leave, computed from recorded calls.

- Any part of unsynced data may be lost: everything from some byte on, or any choice of blocks,
  where a lost block of a grown file reads as NULs (blocks down to 64 bytes, so that small logs get
  holes too).
- A directory entry that appeared, moved or disappeared since the last sync of its folder is in its
  old or new state, independently of others. Syncing a file does not sync its entry; a move is
  atomic.
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final, TypeVar

from support.crash.recorder import ROOT, Event, Moved, Resized, Synced, Written

_BLOCKS: Final = (64, 512, 4096)
_ALL_SUBSETS_OF: Final = 3

Item = TypeVar("Item")


@dataclass(slots=True)
class Disk:
    """Synced state of the disk, and the changes since then."""

    files: dict[int, bytes] = field(default_factory=dict)
    folders: set[int] = field(default_factory=lambda: {ROOT})
    entries: dict[int, dict[str, int]] = field(default_factory=dict)
    unsynced: dict[int, list[Written | Resized]] = field(default_factory=dict)
    moves: list[Moved] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        """Apply one recorded call."""
        match event:
            case Written() | Resized():
                self.unsynced.setdefault(event.node, []).append(event)
            case Moved():
                self.moves.append(event)
                if event.folder:
                    self.folders.add(event.node)
            case Synced(node) if node not in self.folders:
                changes = self.unsynced.pop(node, [])
                self.files[node] = _content(self.files.get(node, b""), changes)
            case Synced(node):
                kept = [move for move in self.moves if node in _folders(move)]
                self.moves = [move for move in self.moves if node not in _folders(move)]
                _move(self.entries, kept)

    def tree(self, moves: Iterable[Moved], contents: dict[int, bytes]) -> "Tree":
        """Return the disk with these moves and these contents of unsynced files."""
        entries = {folder: dict(names) for folder, names in self.entries.items()}
        _move(entries, moves)
        tree: dict[str, bytes | None] = {}
        self._walk(entries, contents, ROOT, "", tree)
        return Tree(tuple(sorted(tree.items())))

    def _walk(
        self,
        entries: dict[int, dict[str, int]],
        contents: dict[int, bytes],
        folder: int,
        path: str,
        tree: dict[str, bytes | None],
    ) -> None:
        for name, node in entries.get(folder, {}).items():
            inside = f"{path}{name}"
            if node in self.folders:
                tree[inside] = None
                self._walk(entries, contents, node, inside + "/", tree)
            else:
                tree[inside] = contents.get(node, self.files.get(node, b""))

    def now(self) -> "Tree":
        """Return the disk if nothing is lost."""
        return self.tree(
            self.moves,
            {
                node: _content(self.files.get(node, b""), changes)
                for node, changes in self.unsynced.items()
            },
        )

    def losses(self, choice: random.Random, *, limit: int) -> Iterator["Tree"]:
        """Yield about `limit` disks that a power cut may leave now, or all if there are fewer."""
        moves = [self.moves, *_subsets(self.moves, choice)]
        contents = [
            _losses(self.files.get(node, b""), changes, choice)
            for node, changes in self.unsynced.items()
        ]
        for kept, *picks in _picks([len(moves), *map(len, contents)], choice, limit):
            yield self.tree(
                moves[kept],
                {
                    node: options[pick]
                    for node, options, pick in zip(self.unsynced, contents, picks, strict=True)
                },
            )


@dataclass(frozen=True, slots=True)
class Tree:
    """Content of a folder: file contents by path; None for a folder."""

    paths: tuple[tuple[str, bytes | None], ...]

    def build(self, place: Path) -> None:
        """Create the files and folders."""
        place.mkdir()
        for name, content in self.paths:
            path = place / name
            if content is None:
                path.mkdir(mode=0o700)
            else:
                path.write_bytes(content)

    def digest(self) -> bytes:
        """Return a digest that is equal for equal trees."""
        state = blake2b(digest_size=16)
        for name, content in self.paths:
            state.update(f"{name}\0{-1 if content is None else len(content)}\0".encode())
            state.update(content or b"")
        return state.digest()


def tree_of(place: Path) -> Tree:
    """Read a folder."""
    found = sorted(place.rglob("*"))
    return Tree(
        tuple(
            sorted(
                (str(path.relative_to(place)), None if path.is_dir() else path.read_bytes())
                for path in found
            )
        )
    )


def _folders(move: Moved) -> set[int]:
    return {place[0] for place in (move.old, move.new) if place is not None}


def _move(entries: dict[int, dict[str, int]], moves: Iterable[Moved]) -> None:
    for move in moves:
        if move.old is not None:
            names = entries.setdefault(move.old[0], {})
            if names.get(move.old[1]) == move.node:
                del names[move.old[1]]
        if move.new is not None:
            entries.setdefault(move.new[0], {})[move.new[1]] = move.node


def _content(before: bytes, changes: Iterable[Written | Resized]) -> bytes:
    content = bytearray(before)
    for change in changes:
        if isinstance(change, Resized):
            del content[change.size :]
            content.extend(bytes(change.size - len(content)))
        else:
            content.extend(bytes(max(0, change.offset - len(content))))
            content[change.offset : change.offset + len(change.content)] = change.content
    return bytes(content)


def _losses(
    before: bytes, changes: Sequence[Written | Resized], choice: random.Random
) -> list[bytes]:
    """Return possible contents of a file: all changes, none, and many states between."""
    after = _content(before, changes)
    found = [after, before]
    found += [_content(before, kept) for kept in _subsets(changes, choice)]
    for number, change in enumerate(changes):
        if isinstance(change, Written):
            for cut in _cuts(change.content, choice):
                torn = Written(change.node, change.offset, change.content[:cut])
                found.append(_content(before, [*changes[:number], torn]))
    first = min((c.offset for c in changes if isinstance(c, Written)), default=len(after))
    old = before.ljust(len(after), b"\0")[: len(after)]
    for size in _BLOCKS:
        starts = range(first // size * size, len(after), size)
        for lost in _subsets(starts, choice):
            content = bytearray(after)
            for start in lost:
                low, high = max(start, first), start + size
                content[low:high] = old[low:high]
            found.append(bytes(content))
    return list(dict.fromkeys(found))


def _cuts(text: bytes, choice: random.Random) -> list[int]:
    """Return offsets where a write may be torn: around line ends, and at some other bytes."""
    ends = [place + 1 for place, byte in enumerate(text) if byte == 0x0A][:6]
    near = {end + off for end in ends for off in (-2, -1, 0, 1)}
    near |= {choice.randrange(len(text) + 1) for _ in range(4)}
    return sorted(cut for cut in near if 0 < cut < len(text))


def _subsets(items: Sequence[Item], choice: random.Random) -> Iterator[list[Item]]:
    """Yield all subsets of a few items.

    Of many items: all prefixes, all suffixes, each item alone or missing, and some random subsets.
    """
    count = len(items)
    if count <= _ALL_SUBSETS_OF:
        for size in range(count + 1):
            yield from (list(kept) for kept in itertools.combinations(items, size))
        return
    spots = range(count) if count <= 12 else sorted(choice.sample(range(count), 12))
    for spot in spots:
        yield list(items[:spot])
        yield list(items[spot:])
        yield [items[spot]]
        yield [*items[:spot], *items[spot + 1 :]]
    for _ in range(6):
        yield [item for item in items if choice.random() < 0.5]


def _picks(counts: Sequence[int], choice: random.Random, limit: int) -> Iterator[tuple[int, ...]]:
    """Yield all combinations.

    If there are too many: each option together with random others, and some more.
    """
    if math.prod(counts) <= limit:
        yield from itertools.product(*map(range, counts))
        return
    for number, count in enumerate(counts):
        options = range(count) if count <= limit // 2 else choice.sample(range(count), limit // 2)
        for option in options:
            # The first option always keeps everything.
            beside = [choice.choice((0, choice.randrange(other))) for other in counts]
            yield (*beside[:number], option, *beside[number + 1 :])
    for _ in range(limit // 4):
        yield tuple(choice.randrange(count) for count in counts)
