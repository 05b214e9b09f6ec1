# Two commands on a fresh machine with Python 3.11+ and make:
#   make demo    trains digits with 4 local workers, dense and sparse, three times each, compares the means, and draws them
#   make test    runs the tests (make test-all: also those that take long, and properties with twice the examples)
# One more, as root, in half an hour on a quiet machine:
#   make bench   measures everything in docs/performance.md and writes that page
# Three that look for trouble, the first one best as root:
#   make attack  400 runs with a fault each, in about an hour and a half; writes the table in docs/trust.md
#   make soak    10,000 steps, some minutes: nothing grows, all ranks stay alike
#   make fuzz    a million altered frames, greetings and files: no answer but the right one, or an error of our own
# And for those who publish:
#   make dist    builds a wheel and a source archive in dist/
#   make docs    builds the pages of docs/ as a site in site/, and fails on any broken link
# torch from PyPI may bring the CUDA libraries; TORCH_INDEX=... names an index with CPU builds, which spares them.

PYTHON ?= python3
TORCH_INDEX ?=
TESTS ?= tests
PYTEST_OPTIONS ?= -n 3 --dist loadgroup

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Tests start hundreds of processes: where Python was told to write no bytecode, each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all bench attack soak fuzz check format dist docs clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "spardl needs Python 3.11 or newer; give one with PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# The pinned torch first: a range with none installed makes pip look at builds of gigabytes.
	$(BIN)/pip install --no-compile -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0
	$(BIN)/pip install --no-compile -c constraints.txt -e ".[all,dev]"
	touch $@

demo: $(INSTALLED)
	mkdir -p runs/demo
	$(BIN)/spardl compare --recipe digits --epochs 8 --seeds 0,1,2 --workers 4 --methods dense,spardl --updates local --density 0.01 --pictures runs/demo --page runs/demo/demo.html
	@echo "The pictures are in runs/demo, and runs/demo/demo.html has them with the tables: open it in a browser."
	@echo "All workers share this machine, so fewer bytes save no time here; docs/performance.md has times on slower lines."

test: $(INSTALLED)
	$(BIN)/pytest $(PYTEST_OPTIONS) -m "not slow" $(TESTS)

test-all: $(INSTALLED)
	SPARDL_THOROUGH=1 $(BIN)/pytest $(PYTEST_OPTIONS) $(TESTS)

# The page is made of whatever has been measured; a benchmark that failed is named, and make fails.
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.suite; measured=$$?; $(BIN)/python -m benchmarks.report && exit $$measured

attack: $(INSTALLED)
	$(BIN)/python -m benchmarks.attack --trials 400 --seconds 7200 --page docs/trust.md

soak: $(INSTALLED)
	$(BIN)/python -m benchmarks.soak

fuzz: $(INSTALLED)
	$(BIN)/python -m benchmarks.fuzz --cases 1000000

check: $(INSTALLED)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy --strict
	$(BIN)/pytest -q tests/test_layers.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix src tests benchmarks examples
	$(BIN)/ruff format src tests benchmarks examples

# Without isolation: what builds is pinned and installed already.
dist: $(INSTALLED)
	$(BIN)/python -m build --no-isolation --outdir dist .
	@ls dist/*

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site begins at site/index.html; mkdocs serve shows it while you write."

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -prune -exec rm -rf {} +
