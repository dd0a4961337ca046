# One command per study; `make help` lists them. Options go through ARGS, for example
#   make bench ARGS="--batch-sizes 1 16 --trials 50"
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
CHECKPOINT := output/best_model.pth
ARGS ?=

.PHONY: help setup train bench report mlp batching aa tune test check-metal check-cuda check-host msl claims lint format clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: $(READY) ## create .venv from requirements.txt (PEERS=1 adds ONNX Runtime and other peers)
ifdef PEERS
	$(RUN) -m pip install -r requirements-peers.txt
endif

$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "error: Python 3.11 or newer is needed; name one with PYTHON=/path/to/python3."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "error: Python's venv module is missing; install it (Debian: apt-get install python3-venv)."; exit 1; }
	@echo "Setting up .venv once: downloads about 0.4 GB on a Mac, 3 GB on Linux (PyTorch's CUDA build)."
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(CHECKPOINT): | $(READY)
	$(RUN) scr/train_mnist.py

train: $(READY) ## train the network on MNIST: output/best_model.pth and curves
	$(RUN) scr/train_mnist.py $(ARGS)

bench: $(READY) | $(CHECKPOINT) ## time the backends: output/per_trial.npz, plots, conclusions/benchmark_result.md
	$(RUN) scr/benchmark.py $(ARGS)

report: $(READY) ## rebuild plots and conclusions from output/per_trial.npz
	$(RUN) scr/report.py $(ARGS)

mlp: $(READY) ## study 2, fusing MLPs: output/mlp_fusion, conclusions/mlp_fusion.md
	$(RUN) scr/mlp_fusion.py $(ARGS)

batching: $(READY) ## study 3, what a batch costs: output/batching, conclusions/batching.md
	$(RUN) scr/batching.py $(ARGS)

tune: $(READY) | $(CHECKPOINT) ## search this machine for faster tiles of the kernels; `make bench` then uses them
	$(RUN) scr/tune.py $(ARGS)

aa: $(READY) | $(CHECKPOINT) ## the same backends under two names: are differences found? `make report` then quotes how often
	$(RUN) scr/benchmark.py --tag aa --again --batch-sizes 1 16 64 --no-layers $(ARGS)

claims: $(READY) ## recompute the numbers in the README files from the runs they name
	$(RUN) scr/claims.py $(ARGS)

test: $(READY) ## all tests
	$(RUN) -m pytest $(ARGS)

check-metal: $(READY) ## on a Mac: every kernel against float64, and through Apple's compiler; prints what to send back
	$(RUN) tests/kernels/check.py --target metal $(ARGS)

check-cuda: $(READY) ## on NVIDIA: every kernel against float64
	$(RUN) tests/kernels/check.py --target cuda $(ARGS)

check-host: $(READY) ## on the CPU: every kernel against float64
	$(RUN) tests/kernels/check.py --target host $(ARGS)

msl: $(READY) ## write the complete Metal text of every kernel instance to output/msl
	$(RUN) tests/kernels/check.py --write-msl output/msl $(ARGS)

lint: $(READY) ## style, format and types
	$(RUN) -m ruff check scr tests
	$(RUN) -m ruff format --check scr tests
	$(RUN) -m mypy

format: $(READY) ## mend what lint can mend
	$(RUN) -m ruff check --fix scr tests
	$(RUN) -m ruff format scr tests

clean: ## remove the environment, caches and generated kernel texts; keeps output/ and conclusions/
	rm -rf $(VENV) scr/kernels/.cache tests/kernels/.cache output/msl .pytest_cache .ruff_cache .mypy_cache
	find scr tests -name __pycache__ -type d -prune -exec rm -rf {} +
