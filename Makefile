# Everything that people and CI run. A fresh machine needs Python 3.11 (with venv) and make, nothing else.
#   make setup   virtual environments with the pinned versions (done once; the other targets call it)
#   make test    all checks: formatting, lint, types, import rules, tests
#   make soak    the long campaigns in full      make bench   the benchmarks
#   make demo    trains, kills, resumes, and compares with an uninterrupted run
#   make lab     stops a training by hand and resumes it: what has to be saved (examples/resume_lab/README.md)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup test lint types tests soak bench demo lab clean

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := $(shell grep '^torch==' constraints.txt)
# Beside it one environment for each major version of transformers.
TRANSFORMERS := 4 5
TRANSFORMERS_READY := $(TRANSFORMERS:%=.venv-transformers%/.ready)
PACKAGES_OF := import sysconfig; print(sysconfig.get_path("purelib"))
WORKERS ?= 2
# Tests and trainers share few cores: one thread each, or OpenMP pools fight for them.
export OMP_NUM_THREADS ?= 1

help:
	@sed -n '2,6s/^#  *//p' Makefile

setup: $(READY) $(TRANSFORMERS_READY)

# torch goes in first and by its exact pin, so that nothing that depends on it can choose another build.
$(READY): constraints.txt setup.py pyproject.toml
	@echo "easyckpt: setting up $(VENV) (once)" >&2
	@for python in $${PYTHON:-} python3.11 python3; do \
	    if "$$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; \
	        then exec "$$python" -m venv --clear $(VENV); fi; \
	done; echo "easyckpt: needs Python 3.10 to 3.13 (tested with 3.11)" >&2; exit 1
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev,fuse]'
	@touch $@

# They have no pip and no torch of their own: they see what $(VENV) has through a .pth file. The pins are complete, so
# nothing is resolved, and no other torch can come in; that is checked all the same.
.venv-transformers%/.ready: requirements/transformers-%.txt $(READY)
	@echo "easyckpt: setting up $(@D) (once)" >&2
	$(BIN)/python -m venv --clear --without-pip $(@D)
	@$(BIN)/python -c '$(PACKAGES_OF)' > "$$($(@D)/bin/python -c '$(PACKAGES_OF)')/easyckpt.pth"
	$(BIN)/python -m pip --python $(@D)/bin/python install --quiet --no-deps --requirement $<
	$(BIN)/python -m pip --python $(@D)/bin/python check
	@$(@D)/bin/python -c 'import torch; found = torch.__version__; assert f"torch=={found}".startswith("$(TORCH)"), found'
	@touch $@

test: lint types tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

tests: $(READY) $(TRANSFORMERS_READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not soak" $(ARGS)

soak: $(READY) $(TRANSFORMERS_READY)
	$(BIN)/python -m pytest -n $(WORKERS) --maxschedchunk 1 -m soak --timeout 3600 $(ARGS)

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

demo: $(READY)
	$(BIN)/python examples/demo.py $(ARGS)

lab: $(READY)
	$(BIN)/python examples/resume_lab/lab.py $(ARGS)

clean:
	rm -rf $(VENV) $(TRANSFORMERS_READY:%/.ready=%) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
