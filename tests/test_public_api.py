"""The public names and their signatures, compared with a snapshot: a difference must be meant.

`make fix` writes the snapshot anew.
"""

import enum
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

import stenolog

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def test_all_is_sorted_and_lists_what_is_visible() -> None:
    visible = [
        name
        for name in dir(stenolog)
        if not name.startswith("_") and not inspect.ismodule(getattr(stenolog, name))
    ]
    assert list(stenolog.__all__) == sorted(stenolog.__all__)
    assert list(stenolog.__all__) == visible


def test_names_and_signatures_are_as_released() -> None:
    # Of a function that is a default, the name; not where it lies.
    described = re.sub(
        r"<function (\w+) at 0x\w+>", r"\1", "".join(f"{line}\n" for line in _describe_package())
    )
    if os.environ.get("STENO_UPDATE"):
        SNAPSHOT.write_text(described)
    assert described == SNAPSHOT.read_text(), "if you meant this change, run make fix"


def _describe_package() -> Iterator[str]:
    for name in stenolog.__all__:
        thing = getattr(stenolog, name)
        if isinstance(thing, type):
            yield from _describe_class(name, thing)
        elif callable(thing):
            yield f"{name}{_signature(thing)}"
        else:
            yield f"{name}: {type(thing).__name__}"


def _describe_class(name: str, thing: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in thing.__bases__ if base is not object)
    yield f"class {name}({bases})"
    if issubclass(thing, enum.Enum):
        yield from (f"    {member.name} = {member.value!r}" for member in thing)
        return
    # A protocol is not called; its __init__ is Python's own, and changes with the version.
    is_protocol = getattr(thing, "_is_protocol", False)
    if not is_protocol and ("__init__" in vars(thing) or hasattr(thing, "__struct_fields__")):
        yield f"    {name}{_signature(thing)}"
    ours = [base for base in thing.__mro__ if base.__module__.partition(".")[0] == "stenolog"]
    members = {member for base in ours for member in vars(base) if not member.startswith("_")}
    for member in sorted(members):
        value = inspect.getattr_static(thing, member)
        if isinstance(value, staticmethod | classmethod):
            yield f"    {type(value).__name__} {member}{_signature(value.__func__)}"
        elif inspect.isfunction(value):
            word = "async " if inspect.iscoroutinefunction(value) else ""
            yield f"    {word}{member}{_signature(value)}"
        else:
            yield f"    {member}"


def _signature(thing: object) -> str:
    assert callable(thing)
    text = str(inspect.signature(thing))
    # Quotes around an annotation and the module a name was imported from differ between files
    # and between versions of Python, and mean nothing to the caller.
    text = re.sub(r"(?<=: |> )'([^']*)'", r"\1", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text)
