# make demo   a real training job, watched, broken and judged     make test   every test     make check   linters and types
PYTHON ?= python3
VENV   ?= .venv
# On Linux PyPI's torch is a CUDA build of several GB; set TORCH="torch --index-url ..." to take a CPU build from elsewhere.
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
DEMO_ARGS ?=

.PHONY: demo test check test-fast test-jit test-slow test-base bench-replay bench-detect bench-kills bench-checkpoint chaos venv clean
.DELETE_ON_ERROR:

demo: $(VENV)/ready
	$(BIN)/python demo/run.py $(DEMO_ARGS)

test: check test-fast test-jit test-slow test-base

venv: $(VENV)/ready
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[all]' --group test --group lint
	# on all processors, and here: where Python may not write bytecode, each of the many processes would compile torch's imports anew
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	touch $@

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-fast: $(VENV)/ready
	$(BIN)/pytest -m 'not slow and not jit'

# tslearn and stumpy compile for half a minute in each process that uses them, so all their tests share one
test-jit: $(VENV)/ready
	$(BIN)/pytest -m 'jit and not slow'

test-slow: $(VENV)/ready
	$(BIN)/pytest -m slow

# what runs on every node must work with the base install alone
test-base: $(VENV)/base
	$(VENV)/base/bin/pytest -q tests/collect tests/architecture/test_node_budget.py -m 'not slow'
$(VENV)/base: $(VENV)/ready
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$@/bin/python -m pip install --quiet --no-compile . --group test

bench-replay: $(VENV)/ready
	$(BIN)/python benchmarks/replay.py

bench-detect: $(VENV)/ready
	$(BIN)/python benchmarks/detect.py

bench-kills: $(VENV)/ready
	$(BIN)/python benchmarks/kills.py

bench-checkpoint: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group bench
	$(BIN)/python benchmarks/checkpoint_ratios.py $(BENCH_ARGS)

# ten thousand schedules of faults; CHAOS_SEED, CHAOS_N and CHAOS_ONLY choose others
chaos: $(VENV)/ready
	@$(BIN)/python benchmarks/chaos.py

clean:
	rm -rf $(VENV) demo/run demo/report.html build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
