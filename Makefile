# Every target creates .venv first if it is missing or if its requirements have changed.
PYTHON ?= python3
BIN := .venv/bin
WHEEL := .venv-wheel
# By path: otherwise a folder `shoal` beside a script, such as the checkout itself, would be imported instead.
EDITABLE := --config-settings editable_mode=compat -e

.PHONY: demo test test-slow test-wheel fuzz soak lint ratchet graph-guard gpu-build gpu-check docs bench clean

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(EDITABLE) '.[dev]'
	touch $@

.venv/installed-bench: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(EDITABLE) '.[dev,bench]'
	touch $@

.venv/installed-gpu-build: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(EDITABLE) '.[dev,gpu-build]'
	touch $@

demo: .venv/installed
	$(BIN)/python examples/demo.py

test: .venv/installed
	$(BIN)/python -m pytest -n 2 -m 'not slow'

test-slow: .venv/installed
	$(BIN)/python -m pytest -m slow

# Test the built package in a new environment, without extras.
test-wheel:
	rm -rf build $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(WHEEL)/dist .
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(WHEEL)/dist/*.whl
	$(WHEEL)/bin/python tests/wheel/try_wheel.py

# Damaged run folders, scenes, episode files and settings must be refused in one sentence or work.
fuzz: .venv/installed
	$(BIN)/python -m tests.fuzz

# Kill trainings at random moments, then train for an hour and check for leaks.
soak: .venv/installed
	$(BIN)/python -m tests.soak

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright --pythonpath $(BIN)/python

# Compare the numbers of small trainings with a revision: make ratchet BASE=main~3
ratchet: .venv/installed
	$(BIN)/python bench/ratchet.py $(BASE)

# Check on a CPU the code that a GPU records as CUDA graphs.
graph-guard: .venv/installed
	$(BIN)/python bench/graph_guard.py

# Compile every GPU kernel without a GPU and compare with a revision: make gpu-build BASE=main~3
gpu-build: .venv/installed-gpu-build
	$(BIN)/python bench/gpu_build.py --update $(if $(ARCHS),--archs $(ARCHS)) $(if $(BASE),--base $(BASE))

# Run tests and benchmarks that need a GPU, in parts of at most nine minutes: make gpu-check PART=1
gpu-check: .venv/installed
	$(BIN)/python bench/gpu_check.py $(PART)

docs: .venv/installed
	$(BIN)/mkdocs build --strict --quiet

bench: .venv/installed-bench
	$(BIN)/shoal bench cartpole
	$(BIN)/python bench/peers.py
	$(BIN)/python bench/host.py

clean:
	rm -rf .venv $(WHEEL) site build *.egg-info .pytest_cache .ruff_cache
