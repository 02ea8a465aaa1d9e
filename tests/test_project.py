"""Tests promises of the whole project, from its files and a fresh process."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import demo
import plain
import pytest
import size

import guards

ROOT = Path(__file__).resolve().parent.parent

# In pieces, so that this file does not match itself.
_REGISTRY = re.compile("|".join(["py" + r"pi\.org", "python" + r"hosted\.org", "npm" + r"js\.org"]))
_HOME = re.compile(r"(?<![\w.-])/(?:root|(?:home|Users)/[\w.-]+)/")
_SHARED_BY_ALL = {"/", "/tmp", "/var/tmp", "/home", "/mnt", "/opt", "/srv", "/src", "/usr/src"}


def test_changelog_starts_with_the_package_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == project["version"] == importlib.metadata.version("stenolog")


def test_classifiers_name_the_supported_pythons() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        found[1]
        for name in project["classifiers"]
        if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", name))
    ]
    supported = re.search(r"^supported=\((.*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert supported is not None
    assert listed == supported[1].split()
    assert project["requires-python"] == f">={listed[0]}"


@pytest.mark.slow
def test_the_parts_of_a_test_run_together_contain_every_test_once() -> None:
    def collect(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        command += ["tests/unit/test_records.py", *arguments]
        child = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        return [line for line in child.stdout.splitlines() if "::" in line]

    parts = [collect(f"--part={part}/3") for part in (1, 2, 3)]
    assert all(parts)
    assert sorted(test for part in parts for test in part) == sorted(collect())


def test_readme_has_no_relative_links_if_the_project_has_urls() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = re.findall(r"\]\(([^)\s]+)\)", (ROOT / project["readme"]).read_text())
    relative = [target for target in targets if not target.startswith(("https://", "#"))]
    assert not project.get("urls") or relative == []


def test_install_commands_work_in_a_clone() -> None:
    """Stenolog is on no package index, so its name cannot be installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys()
    folders = ("docs", "src", "scripts", "bench")
    nested = [path for name in folders for path in (ROOT / name).rglob("*.[mp][dy]")]
    assert len(nested) > 200
    files = ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")
    for path in (*(ROOT / name for name in files), *nested):
        text = path.read_text()
        for command in re.findall(r"(?:pip3? install|uvx --from) ([^`&|#\n]*)", text):
            assert not re.search(r"(?<![\w./-])stenolog\b(?! view)", command), f"{path}: {command}"
        named = re.findall(r"install_command\(['\"](\w+)['\"]\)", text)
        for command in re.findall(r"['\"](?:\.|stenolog)\[([\w,-]+)\]", text):
            named += command.split(",")
        assert set(named) <= extras, path


def test_no_file_contains_a_registry_or_a_path_of_this_machine() -> None:
    # The path of this clone must not occur either, unless every machine has such a folder.
    here = [str(place) for place in (ROOT, ROOT.parent) if str(place) not in _SHARED_BY_ALL]
    place = re.compile("|".join(rf"(?<![\w.-]){re.escape(name)}/" for name in here) or r"(?!)")
    # Transcripts of other programs contain home folders, and so does what `steno` prints of them.
    transcripts = (
        "tests/samples/transcripts/",
        "tests/unit/transfer/transcripts/",
        "tests/unit/cli/golden/",
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in _project_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        for pattern in (_REGISTRY, _HOME, place)
        if pattern.search(line)
        and not (pattern is _HOME and str(path.relative_to(ROOT)).startswith(transcripts))
    ]
    assert found == []


def test_importing_stenolog_loads_only_the_standard_library_and_msgspec() -> None:
    # msgspec first: it imports optional packages if they are installed.
    script = (
        "import sys, msgspec; before = set(sys.modules); import stenolog; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    loaded = set(child.stdout.split())
    assert "stenolog" in loaded
    assert loaded - sys.stdlib_module_names - {"stenolog", "msgspec"} == set()


def test_origin_names_every_package_that_pip_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {re.split(r"[><=]", text)[0] for text in project["dependencies"]}
    [row] = re.findall(r".*`pip install` installs .*", (ROOT / "docs/origin.md").read_text())
    assert [name for name in sorted(packages) if name not in row] == []


def test_every_guard_fits_the_code() -> None:
    assert guards.problems(guards.read_table(guards.TABLE)) == []


def test_a_guard_replaces_the_statement_below_its_comment(tmp_path: Path) -> None:
    source = tmp_path / "src" / "stenolog"
    source.mkdir(parents=True)
    (source / "one.py").write_text(
        "def f(a):\n"
        "    if (  # guard: long-condition\n"
        "        a > 0\n"
        "    ):\n"
        "        # guard: alone\n"
        "        # The reason.\n"
        "        return g(a)\n"
    )
    row = guards.Guard(name="alone", promise="P1", why="", replace="pass", test="")
    anchors, _ = guards.anchors(tmp_path)
    assert "        # The reason.\n        pass\n" in guards.broken(row, anchors)[1]
    row = replace(row, name="long-condition", part="a > 0", replace="True")
    assert "    if (  \n        True\n    ):\n" in guards.broken(row, anchors)[1]
    row = replace(row, part=None, replace="if False:")
    assert "    if False:\n        # guard: alone\n" in guards.broken(row, anchors)[1]


def test_guard_whose_replacement_uses_an_unknown_name_is_reported(tmp_path: Path) -> None:
    file = tmp_path / guards.SOURCE / "part.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "def call(self):\n    self._wait()  # guard: renamed\n\n\n"
        "def other(seconds):\n    is_late = seconds > 1\n    return is_late  # guard: local\n"
    )
    method = guards.Guard(name="renamed", promise="P1", why="", replace="self._hold()", test="")
    local = guards.Guard(name="local", promise="P1", why="", replace="return late", test="")
    problems = guards.problems([method, local], tmp_path)
    assert "renamed: the file has no _hold" in problems
    assert "local: the file has no late" in problems


def test_a_guard_without_a_comment_or_with_two_is_reported(tmp_path: Path) -> None:
    source = tmp_path / "src" / "stenolog"
    source.mkdir(parents=True)
    (source / "one.py").write_text("a = 1  # guard: twice\nb = 1  # guard: twice\n")
    row = guards.Guard(name="missing", promise="P1", why="", replace="pass", test="")
    found = " ".join(guards.problems([row], tmp_path))
    assert "twice: in src/stenolog/one.py and in src/stenolog/one.py" in found
    assert "missing: no line below src/stenolog has the comment `guard: missing`" in found
    assert "the comment `guard: twice` has no row" in found


def test_size_counts_lines_with_code_only() -> None:
    source = """\"\"\"A module.\"\"\"

# A comment.
import os  # one


class A:
    \"\"\"Documentation
    of two lines.\"\"\"

    limit = 1
    \"\"\"The documentation of a field.\"\"\"

    def f(self) -> str:
        return \"\"\"a text

        of three lines\"\"\"
"""
    assert size.count_code_lines(source) == 6
    assert size.count_statements(source) == 5


def test_size_above_a_limit_is_reported(tmp_path: Path) -> None:
    for name in ("one/store.py", "two/store.py", "two/__init__.py", "new/bigger.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("a = 1\n" * (3 if "new" in name else 1))
    (tmp_path / "one" / "queries.sql").write_text("-- All sessions.\nSELECT 1;\n\nSELECT 2;\n")
    modules = list(size.read_modules(tmp_path))
    assert size.total(modules) == size.Size(6, 6, modules=4, repeated_names=1, sql_lines=2)
    assert list(size.find_problems(modules, {"statements": 6, "modules": 4})) == []
    limits = {"statements": 2, "modules": 3, "repeated_names": 0, "new": {"statements": 2}}
    assert list(size.find_problems(modules, limits)) == [
        "src: 3 statements; the limit in [tool.stenolog.size] is 2",
        "src: 1 repeated names; the limit in [tool.stenolog.size] is 0",
        "new: 3 statements; the limit in [tool.stenolog.size.new] is 2",
    ]


def test_phrases_to_translate_are_found_in_sources_and_pages(tmp_path: Path) -> None:
    source, page = tmp_path / "one.py", tmp_path / "page.md"
    source.write_text(
        "def f():\n    '''Return the newest log.'''\n    # Where nobody waits.\n"
        "    raise ValueError('the file stands beside the log')\n"
    )
    page.write_text("# Page\n\nThe file is mended.\n\n```python\n# nobody\n```\n")
    words, places = plain.check([tmp_path])
    assert words == 4 + 3 + 6 + 2 + 4
    assert sorted((place.path.name, place.line, place.phrase) for place in places) == [
        ("one.py", 3, "nobody"),
        ("one.py", 4, "beside the"),
        ("one.py", 4, "stands beside"),
        ("page.md", 3, "mended"),
    ]


def test_phrase_check_fails_above_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("Another process has the lock, so the caller waits for it.\n" * 100)
    assert plain.main([str(page)]) == 0
    page.write_text("Somebody has the lock, so the caller waits for it.\n" * 100)
    assert plain.main([str(page)]) == 1
    assert "100 phrases to translate in 1,000 words: 100.0 per 1,000" in capsys.readouterr().out


def test_no_test_module_imports_another_one_or_a_conftest() -> None:
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in _imports_of_tests(path.read_text())
    ]
    assert found == [], "move what they share to tests/support"


def test_an_import_of_a_test_module_is_found_in_every_form() -> None:
    source = (
        "import crash.test_kill9\nfrom crash import test_leases as leases\n"
        "from unit.cli.conftest import steno\nfrom . import conftest\nfrom .conftest import say\n"
        "def f():\n    from test_project import ROOT\n"
        "import support.needs\nfrom support import contract\n"
    )
    assert sorted(_imports_of_tests(source)) == [
        "conftest",
        "conftest.say",
        "crash.test_kill9",
        "crash.test_leases",
        "test_project.ROOT",
        "unit.cli.conftest.steno",
    ]


def _imports_of_tests(source: str) -> list[str]:
    """Return the dotted names that a module imports from test modules and conftests."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = [node.module] if node.module else []
            names += [".".join([*package, alias.name]) for alias in node.names]
    return [
        name
        for name in names
        if any(part == "conftest" or part.startswith("test_") for part in name.split("."))
    ]


def _project_files() -> list[Path]:
    """Return every file that is or would be committed; without git, all but hidden folders."""
    # safe.directory: a clone may belong to another user.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others"]
    try:
        listed = subprocess.run(
            [*command, "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.split("\0")
        paths = [ROOT / name for name in listed if name]
    except (FileNotFoundError, subprocess.CalledProcessError):
        paths = [
            path
            for path in ROOT.rglob("*")
            if not any(
                part.startswith(".") or part == "__pycache__"
                for part in path.relative_to(ROOT).parts[:-1]
            )
        ]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize(("keep", "text"), [("", "is removed at the end"), ("1", "is kept")])
def test_demo_says_what_happens_to_its_folder(
    monkeypatch: pytest.MonkeyPatch, keep: str, text: str
) -> None:
    monkeypatch.setenv("KEEP", keep)
    assert text in demo.folder_text(Path("folder"))
