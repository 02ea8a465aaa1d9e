"""Whether something can be asked as an `Ask` is, told when it is handed over and not when it fails.

Who makes notes or summaries goes on without a model that fails; so one that could never be called
must not be mistaken for it.
"""

import inspect

from stenolog.errors import UsageError


def check_ask(ask: object) -> None:
    """Raise UsageError unless it can be called as `ask(messages, schema=…, max_tokens=…)`."""
    called = "ask is called as ask(messages, schema=…, max_tokens=…)"
    if not callable(ask):
        raise UsageError(f"{called}; {type(ask).__name__} cannot be called")
    # Of an object that is called, the method is what may be asynchronous.
    for function in (ask, getattr(ask, "__call__", None)):  # noqa: B004 - not whether it has one
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(f"{called} and not awaited; have it wait for the async client")
    try:
        inspect.signature(ask).bind([], schema=None, max_tokens=None)
    except ValueError:
        return  # it is not written in Python, and does not tell
    except TypeError as error:
        raise UsageError(f"{called}; add **how") from error
