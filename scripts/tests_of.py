"""Print the tests of packages of src/stenolog, such as `stores/jsonl` or `gateway`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Tests outside of tests/unit/<package>.
MORE = {
    "agent": ["tests/crash/test_agent_killed.py"],
    "catalog": ["tests/crash/test_catalog_kill9.py"],
    "codec": ["tests/unit/test_codec.py", "tests/format"],
    "errors": ["tests/unit/test_errors.py", "tests/unit/test_records.py"],
    "gateway": ["tests/gateway"],
    "records": ["tests/unit/test_records.py"],
    "sessions": ["tests/reference"],
    "settings": ["tests/unit/test_settings.py", "tests/unit/test_settings_applied.py"],
    "stores": [
        "tests/contract",
        "tests/format",
        "tests/unit/test_async_store.py",
        "tests/unit/test_system_calls.py",
    ],
    "stores/in_memory": ["tests/contract/test_in_memory.py"],
    "stores/jsonl": [
        "tests/contract/test_jsonl.py",
        "tests/contract/test_state_machine.py",
        "tests/crash/test_faults.py",
        "tests/crash/test_interleaving.py",
        "tests/crash/test_kill9.py",
        "tests/crash/test_recreated_sessions.py",
        "tests/crash/test_many_writers.py",
        "tests/format",
        "tests/unit/test_system_calls.py",
    ],
    "stores/postgres": ["tests/contract/test_postgres.py", "tests/crash/test_postgres_*.py"],
    "stores/sql": [
        "tests/unit/stores/sqlite",
        "tests/unit/stores/postgres",
        "tests/contract/test_sqlite.py",
        "tests/contract/test_postgres.py",
        "tests/contract/test_state_machine_*.py",
    ],
    "stores/sqlite": [
        "tests/contract/test_sqlite.py",
        "tests/contract/test_state_machine_sqlite.py",
        "tests/crash/test_sqlite_*.py",
        "tests/format",
    ],
    "tokens": ["tests/unit/test_tokens.py"],
    "transfer": ["tests/reference", "tests/crash/test_copy_killed.py"],
}


def main(packages: list[str]) -> int:
    """Print the paths, one per line, and return the exit code."""
    found: list[Path] = []
    for argument in packages:
        package = argument.removeprefix("src/").removeprefix("stenolog/").strip("/")
        folder = ROOT / "tests" / "unit" / package
        tests = [folder] if folder.is_dir() else []
        for pattern in MORE.get(package, []):
            tests += sorted(ROOT.glob(pattern))
        if not tests:
            folders = (one.name for one in folder.parent.glob("[a-z]*") if one.is_dir())
            known = ", ".join(sorted({*MORE, *folders}))
            print(f"no tests for {package!r}; packages: {known}", file=sys.stderr)
            # pytest stops with an error at a path that does not exist.
            print("no-such-package")
            return 2
        found += tests
    print("\n".join(str(path.relative_to(ROOT)) for path in found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
