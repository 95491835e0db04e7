# Every target works in a fresh clone: it creates .venv and installs what it needs, once.
#   make test ARGS="-m 'not slow' tests/wire"      ARGS goes to the program behind any target
#   make bench BASE=bench-output/before.json       compares with a saved run
#   make bench CASES=cuda                          some cases or groups only
#   make test PYTHON=python3.13                    another interpreter (only when .venv is created)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
TORCH  := $(shell grep '^torch==' constraints.txt)
ARGS   ?=
BASE   ?=
CASES  ?=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.SECONDARY:
.PHONY: help demo test test-engines engines check format bench conformance chaos docs ptx clean

help:  ## what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(VENV)/.installed-demo  ## train a small network over three local workers
	$(BIN)/python examples/demo.py $(ARGS)

test: check  ## check, then all tests (short profile), as three processes; with ARGS, those only
	@$(BIN)/python -m compileall -q src tests examples # once: where Python is told to write no bytecode, each process would
	$(BIN)/python -m tests.parts $(ARGS)

test-engines: $(VENV)/.installed-dev engines  ## tests on Ray, torchrun, Slurm and MPI, installed here as far as possible
	-$(MAKE) --no-print-directory $(VENV)/.installed-ray
	TELEGRAD_TEST_ENGINES=1 $(BIN)/python -m pytest --durations=10 tests/engines $(ARGS)

# Slurm and MPI from the system's packages: only as root, and only if they are there; else their tests are skipped, with
# a reason.
engines:
	@for each in slurmctld:slurm-wlm munged:munge mpirun:openmpi-bin; do \
	  command -v $${each%:*} > /dev/null || { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && \
	  { DEBIAN_FRONTEND=noninteractive timeout 240 apt-get install -qq -y --no-install-recommends $${each#*:} || \
	  { timeout 120 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 240 apt-get install -qq -y \
	  --no-install-recommends $${each#*:}; }; } > /dev/null 2>&1; } || \
	  echo "$${each%:*} is not here and could not be installed: its tests are skipped"; done

check: $(VENV)/.installed-dev  ## formatting, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev  ## put formatting and imports right
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-bench  ## Telegrad and torch.distributed.rpc side by side
	$(BIN)/python -m benchmarks --json bench-output/latest.json $(if $(BASE),--base $(BASE)) $(if $(CASES),--cases $(CASES)) $(ARGS)

conformance: $(VENV)/.installed-dev  ## PyTorch's own tests of these modules, run on Telegrad
	$(BIN)/python -m tests.conformance $(ARGS)

chaos: $(VENV)/.installed-dev  ## kills, cuts, fuzzing and soak at full length
	$(BIN)/python -m pytest --hypothesis-profile=long -m "chaos or long" $(ARGS)

docs: $(VENV)/.installed-docs  ## the site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

# An old version of PTX on purpose: the kernel needs nothing newer, and drivers refuse versions newer than themselves.
ptx:  ## the kernel of CUDA messages from its source; needs nvcc
	nvcc -arch=compute_75 -ptx -O3 src/telegrad/cuda/copy_kernel.cu -o - | sed -e '/^\/\//d' -e 's/^\.version .*/.version 6.5/' \
	  | sed -e '1i // Made from copy_kernel.cu by `make ptx`.' -e '/./,$$!d' > src/telegrad/cuda/copy_kernel.ptx

clean:  ## what the other targets wrote, except .venv
	rm -rf build dist site bench-output demo-output examples-output .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# The order matters: the pinned torch first and alone, so that no other requirement chooses one. Then what the package
# and the extra need, then the package itself, without asking for anything more.
$(VENV)/.installed-torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Telegrad needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch $@

REQUIREMENTS = import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
	print(*p["build-system"]["requires"], *p["project"]["dependencies"], \
	*p["project"]["optional-dependencies"][sys.argv[1]], sep="\n")

$(VENV)/.installed-%: $(VENV)/.installed-torch pyproject.toml
	$(BIN)/python -c '$(REQUIREMENTS)' $* > $(VENV)/requirements-$*.txt
	$(PIP) --requirement $(VENV)/requirements-$*.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@
