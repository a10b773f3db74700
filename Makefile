# Every target makes the environment it needs. `make help` lists them.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
REFEREES := .venv-referees
BIN := $(VENV)/bin
TORCH_FLOOR := $(shell sed -nE 's/^dependencies = .*"torch>=([0-9.]+)".*/\1/p' pyproject.toml)
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

# One thread per process, as there is a worker per core; what was compiled is kept, as many tests start processes.
# Stealing work gives either worker whole files, whose fixtures and cases are then made once.
TESTED := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
PYTEST := python -m pytest -n 2 --dist worksteal -rs --durations=10

.DEFAULT_GOAL := help
.PHONY: help demo bench test test-slow test-oldest test-browser lint format docs referees clean

help:  ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/ready  ## Train on digits with six optimizers, three seeds; the report is build/demo/report.html
	rm -rf build/demo
	$(BIN)/tekfac compare --out build/demo

bench: $(VENV)/bench-ready  ## What a step costs beside one of SGD; the page is build/bench/bench.md
	$(BIN)/tekfac bench --out build/bench

test: $(VENV)/ready  ## The tests that are run before every commit
	$(TESTED) $(BIN)/$(PYTEST) -m "not slow" tests

test-slow: $(VENV)/ready  ## The tests that take long, and the other cases of those that are run every time
	$(TESTED) $(BIN)/$(PYTEST) -m slow tests

test-oldest: $(OLDEST)/ready  ## The tests with the oldest torch that pyproject.toml admits, in an environment of its own
	$(TESTED) $(OLDEST)/bin/$(PYTEST) -m "not slow" tests

test-browser: $(VENV)/ready  ## The test that opens a report in headless Chromium (Debian's, installed if need be)
	command -v chromium > /dev/null || { $(SUDO) apt-get update && \
		$(SUDO) apt-get install -y --no-install-recommends chromium; }
	$(BIN)/python -m pytest tests/test_lab_report_browser.py

lint: $(VENV)/ready  ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready  ## Put the code into the style that `make lint` asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/docs-ready  ## The documentation as a site, build/docs/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

referees: $(REFEREES)/ready  ## Compare our blocks with curvlinops and kfac-jax, in an environment of their own
	OMP_NUM_THREADS=1 $(REFEREES)/bin/python -m pytest -q -c referees/pytest.ini referees

clean:  ## Remove the environments and caches
	rm -rf $(VENV) $(OLDEST) $(REFEREES) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# torch is pinned by constraints.txt: a newer one would bring several GB of CUDA packages.
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and f"tekfac needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}. Set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[lab,test,lint]'
	@touch $@

$(VENV)/docs-ready: $(VENV)/ready
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

$(VENV)/bench-ready: $(VENV)/ready
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	@touch $@

# No constraints.txt here: pip brings that torch with its CUDA packages, 6 GB.
$(OLDEST)/ready: pyproject.toml
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet torch==$(TORCH_FLOOR) -e '.[lab,test]'
	@touch $@

# Every version is pinned and --no-deps is meant: two of the packages ask for a torchvision that they do
# not need and that does not import beside a CPU build of torch.
$(REFEREES)/ready: referees/requirements.txt pyproject.toml
	$(PYTHON) -m venv --clear $(REFEREES)
	$(REFEREES)/bin/python -m pip install --quiet --no-deps -r referees/requirements.txt
	$(REFEREES)/bin/python -m pip install --quiet --no-deps -e .
	@touch $@
