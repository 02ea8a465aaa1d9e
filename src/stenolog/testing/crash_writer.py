"""The process that the crash contract kills.

It is run as a program with a factory (`module:function`) and a place. It makes the calls from its
standard input, one JSON line each, and reports on its standard output when each starts and what it
returned. It is run by its path, so that it does not import pytest and hypothesis.
"""

import importlib
import json
import os
import sys


def main(factory: str, where: str) -> None:
    """Open the store and make the calls."""
    module, _, function = factory.partition(":")
    store = getattr(importlib.import_module(module), function)(where)
    for number, line in enumerate(sys.stdin):
        key, name, arguments, options = json.loads(line)
        _report("begin", number, None)
        result = getattr(store, name)(key, *arguments, **options)
        _report("done", number, result if isinstance(result, int | list) else None)


def _report(word: str, number: int, result: object) -> None:
    os.write(1, json.dumps([word, number, result]).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
