"""Tools: plain Python functions with type hints, as a model can call them.

The hints are what the model is told and what its arguments are checked against; the docstring says
what the function is for, and `Annotated[str, "…"]` what an argument is. A parameter of the type
`Here` is not the model's: it gets the session in which the tool is called.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints, overload

import msgspec
from msgspec import Struct

from stenolog.errors import UsageError
from stenolog.memory.recall import Recalled

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What every provider takes as a tool's name."""
_REF: Final = "#/$defs/"


class Here(Struct, frozen=True, kw_only=True):
    """Where a tool is called."""

    key: str
    """The session."""
    agent: str | None
    recall: Callable[[str], Recalled] | None = None
    """Search in the memory of this session's user; None where there is no memory."""
    zone: tzinfo = UTC
    """Where its user is, by the clock."""


class Tool(Struct, frozen=True, kw_only=True):
    """A function that a model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments."""
    call: Callable[[Mapping[str, Any], Here], Any]
    """Checks the arguments and calls the function. Raises ValidationError."""
    is_async: bool = False
    repeatable: bool = False
    """Whether a call that was cut off may be made again: it changes nothing, or the same twice."""
    alone: bool = False
    """Whether no other tool may run beside it."""
    timeout: float | None = None
    """After so many seconds it is given up; None: as long as the agent allows."""

    def definition(self) -> dict[str, Any]:
        """What a model is told of it, in OpenAI chat shape."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


@overload
def tool(function: Callable[..., Any]) -> Tool: ...


@overload
def tool(
    *,
    name: str = "",
    description: str = "",
    repeatable: bool = False,
    alone: bool = False,
    timeout: float | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str = "",
    description: str = "",
    repeatable: bool = False,
    alone: bool = False,
    timeout: float | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """A function as a tool; also with arguments, as a decorator.

    Raises UsageError where a hint is missing or cannot be told to a model.
    """

    def made(function: Callable[..., Any]) -> Tool:
        called = name or getattr(function, "__name__", "")
        if not _NAME.fullmatch(called):
            raise UsageError(f"tool {called!r}: a name of letters, digits, _ and - is wanted")
        fields, here = _parameters(function, called)
        arguments = msgspec.defstruct(
            f"{called}_arguments", fields, forbid_unknown_fields=True, kw_only=True
        )

        def call(given: Mapping[str, Any], where: Here) -> Any:
            found = msgspec.convert(given, arguments, strict=False)
            values = {field: getattr(found, field) for field in arguments.__struct_fields__}
            return function(**values, **({here: where} if here else {}))

        return Tool(
            name=called,
            description=description or inspect.getdoc(function) or "",
            parameters=_schema(arguments, called),
            call=call,
            is_async=inspect.iscoroutinefunction(function),
            repeatable=repeatable,
            alone=alone,
            timeout=timeout,
        )

    return made if function is None else made(function)


def as_tools(given: Sequence[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    """Tools by name; plain functions become tools. Raises UsageError for two of one name."""
    found: dict[str, Tool] = {}
    for one in given:
        made = one if isinstance(one, Tool) else tool(one)
        if made.name in found:
            raise UsageError(f"there are two tools called {made.name!r}; give one another name")
        found[made.name] = made
    return found


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call, from the JSON that the model wrote. Raises ValueError."""
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments are no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("the arguments are no JSON object")  # noqa: TRY004 - of the model, not ours
    return found


def as_text(result: object, *, limit: int) -> str:
    """What a tool returned, as text for the model, cut where it is too long."""
    if isinstance(result, str):
        text = result
    elif result is None:
        text = "done"
    else:
        try:
            text = msgspec.json.encode(result).decode()
        except (TypeError, ValueError, msgspec.MsgspecError):
            text = str(result)
    # Two halves of one character become it: as they are, no store takes them.
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[… {len(text) - limit:,} more characters were cut off]"


def _parameters(function: Callable[..., Any], called: str) -> tuple[list[Any], str]:
    """The fields that the model fills, and the name of the parameter that gets a Here."""
    try:
        hints = get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
    except (TypeError, ValueError, NameError) as error:
        raise UsageError(f"tool {called!r}: its type hints cannot be read: {error}") from error
    fields: list[Any] = []
    here = ""
    for parameter in signature.parameters.values():
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UsageError(f"tool {called!r}: {name} takes anything; name each argument")
        if name not in hints:
            raise UsageError(f"tool {called!r}: {name} has no type hint, so no model can fill it")
        if hints[name] is Here:
            here = name
            continue
        kind = _described(hints[name])
        given = parameter.default
        fields.append((name, kind) if given is parameter.empty else (name, kind, _default(given)))
    return fields, here


def _described(hint: Any) -> Any:
    """`Annotated[str, "words"]` as msgspec knows it."""
    if get_origin(hint) is not Annotated:
        return hint
    kind, *others = get_args(hint)
    metas = [msgspec.Meta(description=one) if isinstance(one, str) else one for one in others]
    return Annotated[(kind, *metas)]


def _default(value: Any) -> Any:
    """A default as a field takes it: an empty list and the like may not be shared."""
    if isinstance(value, list | dict | set):
        kept = value
        return msgspec.field(default_factory=lambda: kept.copy())
    return value


def _schema(arguments: type[Struct], called: str) -> dict[str, Any]:
    try:
        (own,), others = msgspec.json.schema_components([arguments], ref_template=_REF + "{name}")
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"tool {called!r}: a type hint cannot be told: {error}") from error
    found = dict(others.pop(own["$ref"].removeprefix(_REF)))
    found.pop("title", None)
    if others:
        found["$defs"] = others
    return found


@tool(repeatable=True)
def recall(
    question: Annotated[str, "what to look for, in plain words; names and dates help"],
    here: Here,
) -> str:
    """Search your notes about this user and your past conversations with them."""
    if here.recall is None:
        return "There is no memory to search in."
    return here.recall(question).block or "Nothing was found."


@tool(repeatable=True)
def now(here: Here) -> str:
    """The date and the time, with the weekday and the zone."""
    return datetime.now(here.zone).strftime("%A, %Y-%m-%d %H:%M:%S %Z (UTC%z)")


BUILT_IN: tuple[Tool, ...] = (recall, now)
