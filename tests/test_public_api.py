"""Compares the public names and signatures with a snapshot: a difference must be intended.

`make fix` updates the snapshot.
"""

import ast
import enum
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Literal, get_args, get_origin

import pytest

import stenolog
import stenolog.agent
from reference import MODULES, import_path, summary
from stenolog.agent import turn_events

SNAPSHOT = Path(__file__).with_name("public_api.txt")
AGENT_PAGE = Path(__file__).resolve().parents[1] / "docs" / "agent.md"


def test_the_package_has_at_most_forty_names() -> None:
    assert len(stenolog.__all__) <= 40


@pytest.mark.parametrize("module", MODULES)
def test_all_is_sorted_and_every_name_exists(module: str) -> None:
    names = import_module(module).__all__
    assert list(names) == sorted(names)
    assert [name for name in names if not hasattr(import_module(module), name)] == []
    assert set(names) <= set(dir(import_module(module)))


@pytest.mark.parametrize("module", MODULES)
def test_type_checkers_and_run_time_find_names_in_the_same_module(module: str) -> None:
    source = inspect.getsource(import_module(module))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if alias.name in import_module(module).__all__:
                    place = import_module(node.module)
                    assert getattr(place, alias.name) is getattr(import_module(module), alias.name)


def test_name_is_the_same_object_in_every_module() -> None:
    for module in MODULES:
        for name in import_module(module).__all__:
            documented = import_module(import_path(name))
            assert getattr(documented, name) is getattr(import_module(module), name), name


def test_every_event_of_a_turn_is_public_and_documented() -> None:
    events = get_args(turn_events.Event)
    page = AGENT_PAGE.read_text()
    assert events
    for event in events:
        assert getattr(stenolog.agent, event.__name__) is event
        assert f"`{event.__name__}`" in page, event.__name__


def test_error_for_a_missing_name_gives_its_module() -> None:
    with pytest.raises(AttributeError, match=r"use `from stenolog\.agent import Answer`"):
        stenolog.Answer  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(AttributeError, match="module 'stenolog' has no attribute 'nothing'"):
        stenolog.nothing  # type: ignore[attr-defined] # noqa: B018
    assert not hasattr(stenolog, "__nothing__")


def test_version_is_the_one_of_the_installed_package() -> None:
    assert stenolog.__version__ == importlib.metadata.version("stenolog")


def test_models_of_the_testing_package_work_without_pytest_and_hypothesis() -> None:
    script = (
        "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
        "from stenolog.testing import ModelServer, ScriptedModel\n"
        "ScriptedModel(['Hello.']); ModelServer().close(); print('works')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert ended.stdout == "works\n", ended.stderr


def test_public_names_and_signatures_are_unchanged() -> None:
    # The name of a function that is a default, without its address.
    described = re.sub(
        r"<function (\w+) at 0x\w+>", r"\1", "".join(f"{line}\n" for line in _describe_package())
    )
    if os.environ.get("STENO_UPDATE"):
        SNAPSHOT.write_text(described)
    assert described == SNAPSHOT.read_text(), "if you meant this change, run make fix"


def _describe_package() -> Iterator[str]:
    for name in sorted(set(chain.from_iterable(import_module(one).__all__ for one in MODULES))):
        thing = getattr(import_module(import_path(name)), name)
        if isinstance(thing, type):
            yield from _describe_class(name, thing)
        elif get_origin(thing) is Literal or isinstance(thing, UnionType):
            yield f"{name}: {summary(thing)}"
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
    # A protocol is not called; its __init__ is Python's, and changes with the version.
    is_protocol = getattr(thing, "_is_protocol", False)
    if not is_protocol and ("__init__" in vars(thing) or hasattr(thing, "__struct_fields__")):
        yield f"    {name}{_signature(thing)}"
    ours = [base for base in thing.__mro__ if base.__module__.partition(".")[0] == "stenolog"]
    # Users do not call the tests of a contract.
    hidden = ("_", "test_")
    members = {member for base in ours for member in vars(base) if not member.startswith(hidden)}
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
    # Quotes around an annotation and the module of an imported name differ between files and
    # versions of Python, and mean nothing to the caller.
    text = re.sub(r"(?<=: |> )'([^']*)'", r"\1", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text)
