"""Tests the recipes of the pages in the situations that they are for."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

from stenolog.records import Message
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from support.copied_stores import everything, fill
from support.postgres_server import Databases, Installation

ROOT = Path(__file__).resolve().parents[2]


def _recipe(page: str, name: str, **given: Any) -> Any:
    """Return a function that a page defines, with these names in its module."""
    text = (ROOT / page).read_text()
    [block] = re.findall(rf"```python\n((?:(?!```).)*?def {name}\(.*?)```", text, re.DOTALL)
    module = dict(given)
    exec(compile(block, page, "exec"), module)
    return module[name]


def _answered(store: Store) -> dict[str, int]:
    """Return the number of answers to each question."""
    messages = store.get_history("k")
    asked = [message.content for message in messages if message.role == "user"]
    answers = [str(message.content) for message in messages if message.role == "assistant"]
    return {question: sum(question in answer for answer in answers) for question in asked}


def test_a_message_that_arrives_during_the_model_call_is_answered() -> None:
    store = InMemoryStore()

    def model(window: list[Message]) -> str:
        if len(window) == 1:
            store.add_message("k", "user", "Who wrote Hamlet?", once="2")
        asked = [message.content for message in window if message.role == "user"]
        return f"an answer to: {asked[-1]}"

    on_update = _recipe("docs/library.md", "on_update", store=store, model=model)
    on_update("k", "What is 2+2?", "1")
    on_update("k", "Who wrote Hamlet?", "2")
    assert _answered(store) == {"What is 2+2?": 1, "Who wrote Hamlet?": 1}
    on_update("k", "Who wrote Hamlet?", "2")
    on_update("k", "What is 2+2?", "1")
    assert _answered(store) == {"What is 2+2?": 1, "Who wrote Hamlet?": 1}


def test_a_dump_of_a_database_is_restored_completely(
    postgres_installation: Installation, own_databases: Databases, tmp_path: Path
) -> None:
    source, target = own_databases.new(), own_databases.new()
    with open_store(source) as store:
        fill(store)
        stored = everything(store)
    page = (ROOT / "docs/operate.md").read_text()
    commands = re.findall(r"^(?:pg_dump|pg_restore) .*$", page, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        command = command.replace("postgresql://me@db.example/stenolog", source)
        command = command.replace("postgresql://me@db.example/other", target)
        name, *arguments = shlex.split(command)
        program = postgres_installation.programs / "bin" / name
        subprocess.run(
            [program if program.exists() else name, *arguments], cwd=tmp_path, check=True
        )
    with open_store(target) as store:
        assert everything(store) == stored
