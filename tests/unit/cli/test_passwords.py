"""No command prints the password of a place, however the place is written."""

import pytest

from support.cli import Steno

SECRET = "hunter2hunter"
PLACES = (
    f"postgresql://u:{SECRET}/x@127.0.0.1:1/db",
    f"postgresql://u:x/{SECRET}@127.0.0.1:1/db",
    f"postgresql://u:12345/{SECRET}@127.0.0.1:1/db",
    f"postgresql://u:{SECRET}/x@/db",
    f"postgresql://u:{SECRET}@x@127.0.0.1:1/db",
    f"postgresql://u:{SECRET}#x@127.0.0.1:1/db?busy_timeout=0",
    f"postgresql://u:{SECRET}%x@127.0.0.1:1/db",
    f"postgresql://127.0.0.1:1/db?password={SECRET}&busy_timeout=0",
    f"postgresql://u:{SECRET}:x/y@[::1]:1/db",
    f"postgres://u@h,v:{SECRET}/pw@127.0.0.1/db",
    f"host=127.0.0.1 port=1 password={SECRET}",
    f"password = '{SECRET}' host=h:1",
    f"postgresql:host=127.0.0.1 password={SECRET}",
    f"postgresql:/u:{SECRET}@h/db",
    f"sqlite:postgresql://u:{SECRET}@h/db",
    f"sqlite://postgresql://u:{SECRET}@h/db",
    f"sqlite://u:{SECRET}@h/db",
    f"jsonl:///x/u:{SECRET}@h/db",
    f"postgresql//u:{SECRET}@h/db",
    f"POSTGRESQL://u:{SECRET}@h/db",
    f"postgresql+psycopg://u:{SECRET}@h/db",
)


@pytest.mark.quick(8)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    "command",
    [("list",), ("show", "a"), ("doctor",), ("stats",), ("view",), ("hook",), ("import",)],
    ids=lambda words: words[0],
)
def test_p11_no_command_prints_a_password(
    steno: Steno, command: tuple[str, ...], where: str
) -> None:
    arguments = (
        [*command, where] if command[0] in ("doctor", "import", "view") else [*command, "-w", where]
    )
    result = steno(*arguments)
    assert result.exit_code != 0
    assert SECRET not in result.output


@pytest.mark.quick(5)
@pytest.mark.parametrize("where", PLACES)
def test_p11_a_copy_does_not_print_a_password(steno: Steno, where: str) -> None:
    for places in ((where, "new"), ("new", where)):
        result = steno("copy", *places)
        assert result.exit_code != 0
        assert SECRET not in result.output
