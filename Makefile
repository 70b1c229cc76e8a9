# make demo            train a small Llama on this machine, print the report, serve TensorBoard (SERVE=0: do not serve)
# make test            lint, types, import layers, tests
# make clean           remove the virtual environment and the demo's runs

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PORT ?= 6006
SERVE ?= 1
PYTEST_ARGS ?= -q -n 2 --dist loadfile

BIN := $(VENV)/bin
DEMO := log/demo
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input
# torch's profiler prints probe lines that say nothing to a user
WITHOUT_PROBES := grep --line-buffered -v -e '^USDT:' -e '^$$'

.PHONY: demo test chromium clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	@rm -rf $(DEMO)/real
	@n=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)'); \
	echo "== training the example with FSDP2 on $$n process(es) into $(DEMO)/real"; \
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $$n \
	    examples/train.py --parallel fsdp2 --logdir $(DEMO)/real 2>&1 | $(WITHOUT_PROBES)
	@echo "== simulating a node of 8 MI300X as a second run"
	@rm -rf $(DEMO)/simulated_*
	@$(BIN)/tb-chopper simulate $(DEMO) --preset mi300x-llama3-8b --layers 8 --steps 4
	@echo "== report"
	@$(BIN)/tb-chopper analyze $(DEMO)
ifneq ($(SERVE),0)
	@echo "== TensorBoard starts; the Chopper tab: http://localhost:$(PORT)/#chopper (Ctrl-C ends it)"
	@$(BIN)/tensorboard --logdir $(DEMO) --port $(PORT)
else
	@echo "== $(BIN)/tensorboard --logdir $(DEMO) shows it at http://localhost:$(PORT)/#chopper"
endif

test: $(VENV)/.test chromium
	@echo "== ruff, mypy, import layers"
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@echo "== tests"
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

$(VENV)/bin/python:
	@echo "== virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make one (Debian: apt install python3-venv)" >&2; exit 1; }

# A torch that is there already (a CUDA or ROCm build, say) stays.
$(VENV)/.torch: | $(VENV)/bin/python
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "== installing $(TORCH) (the first time: minutes)"; $(PIP) "$(TORCH)"; }
	@touch $@

$(VENV)/.demo: setup.py $(VENV)/.torch
	@echo "== installing tb-chopper and what it needs"
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.test: setup.py $(VENV)/.torch
	@echo "== installing tb-chopper with its test tools"
	@$(PIP) -e '.[test]'
	@touch $@

# The browser tests skip where it is missing.
chromium:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	    && echo "== installing chromium" && apt-get -qq update && apt-get -qq install -y chromium >/dev/null; } \
	    || echo "no chromium here: the browser tests will be skipped"

clean:
	rm -rf $(VENV) $(DEMO)
