# `make` alone lists the targets.
# The first of 3.12 and 3.13 that can make virtual environments, also one of pyenv; make PYTHON=... chooses another.
USABLE := import sys, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for name in python3.12 python3.13 python3 \
    $$(pyenv prefix 3.12 2>/dev/null)/bin/python3 $$(pyenv prefix 3.13 2>/dev/null)/bin/python3; do \
    $$name -c '$(USABLE)' >/dev/null 2>&1 && echo $$name && break; done)
VENV   := .venv
BIN    := $(VENV)/bin
NPROC  ?= 2
ARGS   ?=
# Processes that run tests. Some quick tests wait, so there is one more of them than cores.
QUICK_WORKERS ?= 3
WORKERS ?= 2
TESTS  ?= tests
# Of a soak
MINUTES ?= 20
export OMP_NUM_THREADS ?= 1
# pytest keeps the test modules that it rewrote: collecting them again takes half of the time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install extras peers bench faults soak gpu-check gpu-carry te-rehearsal train check test test-all lint clean
PYTEST := $(BIN)/python -m pytest --dist loadfile
HEAVY  := engine or distributed or chaos or slow
QUICK  := not gpu and not nightly and not ($(HEAVY))

help: ## list the targets (the default)
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.project ## create .venv with pinned versions, or update it after a change

$(BIN)/python:
	@$(or $(PYTHON),false) -c '$(USABLE)' || { echo "No Python 3.12 or 3.13 with venv was found. Install one (Debian, Ubuntu: python3 and python3-venv), or run make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.requirements: $(wildcard requirements/*.txt requirements/*.sh) | $(BIN)/python
	requirements/install.sh $(VENV)
	@touch $@

$(VENV)/.project: setup.py $(VENV)/.requirements
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --no-warn-conflicts --editable .
	@touch $@

extras: install ## install the generators of reasoning-gym (compiles C)
	$(BIN)/python -m pip install --quiet --no-warn-conflicts --constraint requirements/constraints.txt -r requirements/reasoning-gym.txt

$(VENV)/peers: requirements/peers.txt requirements/constraints.txt | install
	rm -rf $@
	$(BIN)/python -m pip install --quiet --no-deps --constraint requirements/constraints.txt --target $@ -r requirements/peers.txt

peers: $(VENV)/peers ## install libraries that the kernels are compared with, in a separate folder

bench: peers ## benchmark the kernels against those libraries: make bench ARGS="--device cpu"
	cd kernels && env -u OMP_NUM_THREADS PYTHONPATH=$(CURDIR)/$(VENV)/peers $(CURDIR)/$(BIN)/python -m bench $(ARGS)

faults: install ## kill, stop and corrupt parts of real runs, and print what each run does: make faults ARGS="outlived --only collector"
	$(BIN)/python -m tests.lab.faults $(ARGS)

soak: install ## train for MINUTES with a random fault every two minutes: make soak MINUTES=20
	$(BIN)/python -m tests.lab.soak --minutes $(MINUTES) $(ARGS)

gpu-check: ## check the trainer on one GPU: make gpu-check ARGS="--part 1" PYTHON=python3
	env -u OMP_NUM_THREADS $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tests/lab/gpu_check $(ARGS)

gpu-carry: ## build archives for a GPU machine without network, and check them: make gpu-carry ARGS="--architecture 90"
	python3 requirements/gpu_carry.py gpu-carry $(ARGS)

.venv-te/.requirements: $(wildcard requirements/*constraints.txt requirements/te-rehearsal*)
	requirements/te-rehearsal.sh .venv-te
	@touch $@

te-rehearsal: .venv-te/.requirements ## run Transformer Engine's layers without a GPU: make te-rehearsal ARGS="--only steps"
	PYTHONPATH=$(CURDIR):$(CURDIR)/kernels CUDA_VISIBLE_DEVICES= .venv-te/bin/python -m tests.lab.te_rehearsal $(ARGS)

train: install ## train the quickstart on this machine: make train ARGS="seed=1" NPROC=2
	$(BIN)/torchrun --standalone --nproc-per-node $(NPROC) launch/train_rl.py experiment=quickstart parallel=$(if $(filter 1,$(NPROC)),single,ep2) $(ARGS)

check: lint ## run the linters and the quick tests
	$(PYTEST) --numprocesses $(QUICK_WORKERS) -q -m "$(QUICK)" $(TESTS)

test: install ## run all tests that need no GPU, except the nightly ones: make test TESTS=tests/config
	$(PYTEST) --numprocesses $(QUICK_WORKERS) -q -m "$(QUICK)" --durations=5 $(TESTS) || [ $$? = 5 ]
	$(PYTEST) --numprocesses $(WORKERS) -m "not gpu and not nightly and ($(HEAVY))" --durations=10 $(TESTS) || [ $$? = 5 ]

test-all: install ## run all tests that need no GPU, also the nightly ones
	$(PYTEST) --numprocesses $(WORKERS) -m "not gpu" --durations=20 $(TESTS) || [ $$? = 5 ]

lint: install ## check style and types with ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove the environment and the caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
