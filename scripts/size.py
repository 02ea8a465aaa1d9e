"""Print the size of each package of src/stenolog, and fail above the limits in pyproject.toml.

A code line is a line that is not blank, not only a comment, and not part of a docstring. The text
below a module, class, function or field is a docstring, so a documented field costs no more than
an undocumented one. Statements do not depend on how lines are broken, so the limits are statements
and modules. Lines of SQL are counted beside them. A module name counts as repeated if two packages
use the name, because a search for the file then finds both modules.

`[tool.stenolog.size]` has the limits of the total. A package with a table of its own, such as
`[tool.stenolog.size.adapters]`, has its own limits and does not count towards the total.
"""

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TOP = "(top level)"


class Module(NamedTuple):
    """One module of the package, or one file of SQL."""

    package: str
    name: str
    code_lines: int = 0
    statements: int = 0
    sql_lines: int = 0


class Size(NamedTuple):
    """Total size of some modules."""

    code_lines: int
    statements: int
    modules: int
    repeated_names: int
    sql_lines: int


def main() -> int:
    """Print the sizes and return the exit code."""
    modules = list(read_modules(ROOT / "src" / "stenolog"))
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["stenolog"]["size"]
    repeated = repeated_names(modules)
    packages = {module.package for module in modules}
    rows = {package: [m for m in modules if m.package == package] for package in packages}
    print(
        "code lines  statements  modules  SQL  package, and module names that another one has, too"
    )
    for package, held in sorted(rows.items(), key=lambda row: -total(row[1]).statements):
        names = sorted({module.name for module in held} & repeated)
        print(f"{_columns(total(held))}  {package:12} {' '.join(names)}".rstrip())
    size = total(modules)
    print(f"{_columns(size)}  total; {size.repeated_names} repeated names")
    problems = list(find_problems(modules, limits))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _columns(size: Size) -> str:
    return f"{size.code_lines:10,}{size.statements:12,}{size.modules:9}{size.sql_lines:5}"


def read_modules(package: Path) -> Iterator[Module]:
    """Yield every module and every file of SQL below the folder of the package."""
    for path in sorted(package.rglob("*.*")):
        parts = path.relative_to(package).parts
        folder = parts[0] if len(parts) > 1 else TOP
        text = path.read_text(encoding="utf-8") if path.suffix in {".py", ".sql"} else ""
        if path.suffix == ".py":
            yield Module(folder, path.stem, count_code_lines(text), count_statements(text))
        elif path.suffix == ".sql":
            lines = (line.strip() for line in text.splitlines())
            sql_lines = sum(bool(line) and not line.startswith("--") for line in lines)
            yield Module(folder, "", sql_lines=sql_lines)


def count_code_lines(source: str) -> int:
    """Return the number of lines that are not blank, comments or docstrings."""
    documented = {
        line
        for text in _find_docstrings(source)
        for line in range(text.lineno, (text.end_lineno or 0) + 1)
    }
    lines = enumerate((line.strip() for line in source.splitlines()), start=1)
    return sum(bool(line) and line[0] != "#" and number not in documented for number, line in lines)


def count_statements(source: str) -> int:
    """Return the number of statements that are not docstrings."""
    statements = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(source)))
    return statements - sum(1 for _ in _find_docstrings(source))


def _find_docstrings(source: str) -> Iterator[ast.Expr]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr):
            value = node.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield node


def repeated_names(modules: Iterable[Module]) -> set[str]:
    """Return the names that more than one module has."""
    counts = Counter(module.name for module in modules if module.name not in {"", "__init__"})
    return {name for name, count in counts.items() if count > 1}


def total(modules: Iterable[Module]) -> Size:
    """Return the size of these modules together."""
    held = list(modules)
    return Size(
        code_lines=sum(module.code_lines for module in held),
        statements=sum(module.statements for module in held),
        modules=sum(bool(module.name) for module in held),
        repeated_names=len(repeated_names(held)),
        sql_lines=sum(module.sql_lines for module in held),
    )


def find_problems(modules: Iterable[Module], limits: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each limit that is exceeded."""
    separate = {name for name, value in limits.items() if isinstance(value, dict)}
    groups: list[tuple[str, Mapping[str, int]]] = [("", limits)]
    groups += [(name, limits[name]) for name in sorted(separate)]
    counted = list(modules)
    for package, allowed in groups:
        group = [
            module
            for module in counted
            if (module.package == package if package else module.package not in separate)
        ]
        for name, measured in total(group)._asdict().items():
            if name in allowed and measured > allowed[name]:
                size_text = f"{package or 'src'}: {measured:,} {name.replace('_', ' ')}"
                table = ".".join(["tool.stenolog.size", *([package] if package else [])])
                yield f"{size_text}; the limit in [{table}] is {allowed[name]:,}"


if __name__ == "__main__":
    sys.exit(main())
