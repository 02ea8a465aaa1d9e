"""A session with tool calls of coding agents, as in their transcripts."""

import json
from pathlib import Path
from typing import Any, Final

from stenolog.stores.open_store import open_store
from support.viewer_samples import PICTURE

CODING: Final = "claude-code:harbour"
SECRET: Final = "sk-proj-" + "Ab3dEf6hIj9lMn2pQr5tUv8x" * 2

OLD: Final = '''\
def total(rows):
    """Return the sum of all rows."""
    result = 0
    for row in rows:
        result += row.amount
    return result
'''
NEW: Final = '''\
def total(rows):
    """Return the sum of all rows, rounded to cents."""
    result = Decimal(0)
    for row in rows:
        result += row.amount
    return result.quantize(CENT)
'''
PATCH: Final = """\
*** Begin Patch
*** Update File: harbour/tides.py
@@ def next_tide(now):
-    return table[now.hour]
+    return table.get(now.hour, UNKNOWN)
*** End Patch"""
TODOS: Final = [
    {"content": "Read the failing test", "status": "completed", "activeForm": "Reading"},
    {"content": "Round in one place", "status": "in_progress", "activeForm": "Rounding"},
    {"content": "Run all tests", "status": "pending", "activeForm": "Running"},
]
TRACE: Final = """\
Exit code 1
ImportError: cannot import name 'CENT' from 'harbour.money'
  tests/test_invoice.py:3: in <module>
    from harbour.money import CENT"""
CALLS: Final[list[tuple[str, dict[str, Any], str, dict[str, Any]]]] = [
    ("Grep", {"pattern": "def total", "path": "/srv/app"}, "harbour/invoice.py:12", {}),
    (
        "Bash",
        {"command": "cd /srv/app && python -m pytest -q", "description": "Run the tests"},
        TRACE,
        {"seconds": 14.9, "failed": True},
    ),
    (
        "Edit",
        {"file_path": "/srv/app/harbour/invoice.py", "old_string": OLD, "new_string": NEW},
        "The file /srv/app/harbour/invoice.py has been updated.",
        {"seconds": 0.04},
    ),
    ("apply_patch", {"input": PATCH}, "Success. Updated the following files:", {"seconds": 0.1}),
    (
        "Write",
        {
            "file_path": "/srv/app/harbour/money.py",
            "content": "from decimal import Decimal\n\nCENT = Decimal('0.01')  # one cent\n",
        },
        "File created",
        {},
    ),
    ("TodoWrite", {"todos": TODOS}, "Todos have been modified", {}),
    (
        "shell",
        {"command": ["bash", "-lc", "seq 1 1500"], "workdir": "/srv/app"},
        "\n".join(f"line {number}" for number in range(1, 1501)),
        {"seconds": 1.2},
    ),
    ("fetch", {"url": "https://api.example.org/v1", "retries": 2}, '{"ok": true, "rows": [1]}', {}),
]


def fill_tools(where: Path) -> None:
    """Add the session to the workspace."""
    calls, results = [], list[dict[str, Any]]()
    for number, (name, arguments, result, notes) in enumerate(CALLS):
        function = {"name": name, "arguments": json.dumps(arguments)}
        calls.append({"id": f"c{number}", "type": "function", "function": function})
        body = {"role": "tool", "tool_call_id": f"c{number}", "content": result}
        results.append({**body, "stenolog": notes} if notes else body)
    shot = {"type": "image_url", "image_url": {"url": PICTURE}}
    asked = f"Totals are off by a cent. The key for the API is {SECRET}, do not print it."
    usage = {"prompt": 12_000, "answer": 850, "cached": 0}
    answer = (
        "Done. Each total is now rounded **once**:\n\n"
        "| check | before | after |\n|---|---|---|\n| cents | 10.005 | 10.01 |\n\n"
        "- the sum is exact\n- only the result is rounded\n\n> Note: run it again.\n\n"
        f"```python\nimport os\nos.environ['KEY'] = '{SECRET}'\nprint(total(rows))\n```\n"
    )
    mark = {"model": "claude-sonnet-4-5", "seconds": 3.1, "usage": usage}
    with open_store(str(where)) as store:
        store.add_messages(
            CODING,
            [
                {"role": "user", "content": [{"type": "text", "text": asked}, shot]},
                {
                    "role": "assistant",
                    "content": "I look at the code first.",
                    "tool_calls": calls,
                    "stenolog": mark,
                },
                *results,
                {"role": "assistant", "content": answer, "stenolog": mark},
                {"role": "user", "content": "Thanks! Which files did you change?"},
                {"role": "assistant", "content": "`harbour/invoice.py` and `harbour/money.py`."},
            ],
        )
        store.set_meta(CODING, title="Round invoice totals once")
