# make train | make check | make test | make test-all | make lint | make install | make extras | make peers | make mutants
# make gpu-check | make gpu-bundle
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
NPROC  ?= 2
ARGS   ?=
WORKERS ?= 2
TESTS  ?= tests
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
TARGET_PYTHON ?= 3.12
.PHONY: help install extras peers mutants bench gpu-check gpu-bundle train check test test-all lint clean
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile
HEAVY  := engine or distributed or chaos or slow
QUICK  := not gpu and not nightly and not ($(HEAVY))

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.project ## make .venv with everything pinned; nothing happens when nothing changed

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.requirements: $(wildcard requirements/*.txt requirements/*.sh) | $(BIN)/python
	requirements/install.sh $(VENV)
	@touch $@

$(VENV)/.project: setup.py $(VENV)/.requirements
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --no-warn-conflicts --editable .
	@touch $@

extras: install ## add reasoning-gym's generators (compiles C)
	$(BIN)/python -m pip install --quiet --no-warn-conflicts --constraint requirements/constraints.txt -r requirements/reasoning-gym.txt

$(VENV)/peers: requirements/peers.txt requirements/constraints.txt | install
	rm -rf $@
	$(BIN)/python -m pip install --quiet --no-deps --constraint requirements/constraints.txt --target $@ -r requirements/peers.txt

peers: $(VENV)/peers ## add what the kernels are compared with (TRL, Liger-Kernel, verl, torchao), apart from the rest

$(VENV)/mutants: requirements/mutants.txt requirements/constraints.txt | install
	rm -rf $@
	$(BIN)/python -m pip install --quiet --no-deps --constraint requirements/constraints.txt --target $@ -r requirements/mutants.txt

mutants: $(VENV)/mutants ## change the code and see whether a unit test notices: make mutants ARGS="pure --only 'megatron_rl.credit*'"
	PYTHONPATH=$(CURDIR)/$(VENV)/mutants $(BIN)/python launch/studies/mutants/__main__.py $(ARGS)

bench: peers ## the kernels beside their peers: make bench ARGS="--device cpu"
	cd kernels && env -u OMP_NUM_THREADS PYTHONPATH=$(CURDIR)/$(VENV)/peers $(CURDIR)/$(BIN)/python -m bench $(ARGS)

gpu-check: ## all that one GPU can prove in nine minutes, with the Python at hand: make gpu-check ARGS="--small" PYTHON=python3
	env -u OMP_NUM_THREADS $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) launch/gpu_check.py $(ARGS)

gpu-bundle: install ## wheels that a GPU machine without network lacks: make gpu-bundle TARGET_PYTHON=3.12
	requirements/gpu-bundle.sh $(VENV) gpu-bundle $(TARGET_PYTHON)

train: install ## the quickstart on this machine: make train ARGS="seed=1" NPROC=2
	$(BIN)/torchrun --standalone --nproc-per-node $(NPROC) launch/train_rl.py experiment=quickstart parallel=$(if $(filter 1,$(NPROC)),single,ep2) $(ARGS)

check: lint ## linters and the quick tests: what to run while working
	$(PYTEST) -q -m "$(QUICK)" $(TESTS)

test: install ## every test that needs no GPU but the long grids: make test TESTS=tests/config
	$(PYTEST) -q -m "$(QUICK)" --durations=5 $(TESTS) || [ $$? = 5 ]
	$(PYTEST) -m "not gpu and not nightly and ($(HEAVY))" --durations=10 $(TESTS) || [ $$? = 5 ]

test-all: install ## every test that needs no GPU, with the long grids of the nightly run
	$(PYTEST) -m "not gpu" --durations=20 $(TESTS) || [ $$? = 5 ]

lint: install ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove the environment and caches, keep runs/
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
