"""Print the size of each package of src/stenolog, and fail above the limits in pyproject.toml.

A code line is a line that is not blank, not only a comment, and not part of a docstring of a
module, class or function. A module name counts as repeated if two packages use the name, because a
search for the file then finds both modules.

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
    """One module of the package."""

    package: str
    name: str
    code_lines: int


class Size(NamedTuple):
    """Total size of some modules."""

    code_lines: int
    modules: int
    repeated_names: int


def main() -> int:
    """Print the sizes and return the exit code."""
    modules = list(read_modules(ROOT / "src" / "stenolog"))
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["stenolog"]["size"]
    repeated = repeated_names(modules)
    packages = {module.package for module in modules}
    rows = {package: [m for m in modules if m.package == package] for package in packages}
    print(f"{'code lines':>10} {'modules':>8}  package, and module names that another one has, too")
    for package, held in sorted(rows.items(), key=lambda row: -total(row[1]).code_lines):
        names = sorted({module.name for module in held} & repeated)
        print(
            f"{total(held).code_lines:10,} {len(held):8}  {package:12} {' '.join(names)}".rstrip()
        )
    size = total(modules)
    print(f"{size.code_lines:10,} {size.modules:8}  total; {size.repeated_names} repeated names")
    problems = list(find_problems(modules, limits))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def read_modules(package: Path) -> Iterator[Module]:
    """Yield every module below the folder of the package."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        lines = count_code_lines(path.read_text(encoding="utf-8"))
        yield Module(parts[0] if len(parts) > 1 else TOP, path.stem, lines)


def count_code_lines(source: str) -> int:
    """Return the number of lines that are not blank, comments or docstrings."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and ast.get_docstring(node, clean=False) is not None:
                documented.update(range(first.lineno, (first.end_lineno or 0) + 1))
    lines = enumerate((line.strip() for line in source.splitlines()), start=1)
    return sum(bool(line) and line[0] != "#" and number not in documented for number, line in lines)


def repeated_names(modules: Iterable[Module]) -> set[str]:
    """Return the names that more than one module has."""
    counts = Counter(module.name for module in modules if module.name != "__init__")
    return {name for name, count in counts.items() if count > 1}


def total(modules: Iterable[Module]) -> Size:
    """Return the size of these modules together."""
    module_list = list(modules)
    lines = sum(module.code_lines for module in module_list)
    return Size(lines, len(module_list), len(repeated_names(module_list)))


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
