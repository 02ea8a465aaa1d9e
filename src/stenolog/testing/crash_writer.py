"""The process that the crash contract kills.

The arguments of this program are a factory (`module:function`) and the factory's argument. The
program reads calls from its standard input, one JSON line each. The program reports the start and
the result of each call on its standard output. The test runs this file by its path, so that neither
pytest nor hypothesis is imported.
"""

import importlib
import json
import os
import sys


def main(factory: str, where: str) -> None:
    """Open the store and make the calls that the lines of stdin describe."""
    module, _, function = factory.partition(":")
    store = getattr(importlib.import_module(module), function)(where)
    for number, line in enumerate(sys.stdin):
        key, name, arguments, options = json.loads(line)
        _report("begin", number, None)
        result = getattr(store, name)(key, *arguments, **options)
        _report("done", number, result if isinstance(result, int | list) else None)


def _report(event: str, number: int, result: object) -> None:
    os.write(1, json.dumps([event, number, result]).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
