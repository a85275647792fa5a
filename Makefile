# Everything runs in .venv, which the first target that needs it makes: a bare clone is enough.
# `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/ready

# What can be given on the command line, e.g. make train MODEL=models/llama DATASET='a.jsonl b.jsonl'
MODEL ?=
DATASET ?=
OUT ?=
NPROC ?=
ARGS ?=

train_flags = $(if $(MODEL),--model '$(MODEL)') $(if $(DATASET),--dataset $(DATASET:%='%')) \
    $(if $(OUT),--output_dir '$(OUT)') $(ARGS)
OLDEST_VENV := .venv-oldest
oldest = $(shell sed -n 's/^transformers>=\([0-9.]*\),.*/\1.*/p' requirements.txt)
# Of the driver: to import torch for this takes seconds. Without GPUs, two processes.
count_gpus := import ctypes; n = ctypes.c_int(2); cuda = ctypes.CDLL("libcuda.so.1"); \
    cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(n)); print(n.value)
nproc = $(or $(NPROC),$(shell $(VENV)/bin/python -c '$(count_gpus)' 2>/dev/null),2)
# torchrun, whose report would follow the run's own last line; one process does not need it
launch = python $(if $(filter 1,$1),,-m fsdp_qlora.run.launch --standalone --nproc_per_node=$1)
newest_adapter = $(shell ls -t runs/*/adapter_model.safetensors 2>/dev/null | head -n 1)
run = $(or $(OUT),$(patsubst %/adapter_model.safetensors,%,$(newest_adapter)))

# Two processes, each of which takes a file after the other, the longest first.
two := --numprocesses auto --dist loadfile --no-loadscope-reorder

# What needs no launch of several processes; and what takes longest there: random rows, and the
# families once more, each in another shape, with another adapter, sliced or checked at the start.
fast := layer rounding forms models packing files chat memory cache limits
slower := any_row or many_rows or at_start_passes or shapes_equal or other_adapters or some_linears \
    or on_the_host or multimodal_model or bf16_norms or to_the_byte or sliced

nvcc = $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc) \
    $(wildcard /usr/local/cuda/bin/nvcc))
# Compute capabilities as flash-attn names them: 8.0, 8.6 and 8.9 are 80, 9.0 is 90.
gpu_archs = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
    | sed -n 's/^\([0-9][0-9]*\)\..*/\10/p' | sort -u)
empty :=
space := $(empty) $(empty)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train merge test test-fast test-slow test-oldest chaos lint flash-attn \
    can-build-flash-attn clean

help: ## When you want to know what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile
	@echo "Variables: MODEL= DATASET= OUT= NPROC= ARGS='any other flags' PYTHON=python3"

setup: $(READY) ## Before you call the scripts yourself: makes .venv with all they need

train: $(READY) ## To train: the built-in demo, or MODEL= on DATASET=, on all GPUs, else two CPU processes
	$(VENV)/bin/$(call launch,$(nproc)) train_fsdp_qlora.py $(train_flags)

merge: $(READY) ## After training: the newest run below runs/, or OUT=, as a plain bf16 model in its merged/
	$(if $(run),,$(error no run to merge below runs/: `make train` first, or name one with OUT=))
	$(VENV)/bin/python merge_adapters.py --adapter_dir '$(run)' --output_dir '$(run)/merged' $(ARGS)

test: $(READY) ## After any change: the commonest cases, less than five minutes on two cores; on the GPUs if any
	$(VENV)/bin/python -m pytest $(two) $(ARGS)

test-fast: $(READY) ## While you edit: layer, families, plan, data; less than a minute on two cores
	$(VENV)/bin/python -m pytest $(two) -k 'not ($(slower))' \
	    $(fast:%=tests/test_%.py) $(ARGS)

test-slow: $(READY) ## Before you push: all that make test leaves out but kills, most of an hour
	$(VENV)/bin/python -m pytest -m slow $(ARGS)

test-oldest: ## Before a release, and when a library is raised: make test on the oldest transformers
	$(MAKE) test VENV=$(OLDEST_VENV) PINS='transformers==$(oldest)'

chaos: $(READY) ## Before a release: kills, signals and faults by the hundred, 20 minutes
	$(VENV)/bin/python -m pytest -m chaos $(ARGS)

lint: $(READY) ## Before you commit: style and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy

# No cache: from there pip would take what it once built for another torch or GPU.
flash-attn: can-build-flash-attn $(READY) ## Once, on Ampere or Ada GPUs or for long rows: builds Flash Attention 2
	$(VENV)/bin/python -m pip install ninja packaging psutil setuptools wheel
	FLASH_ATTN_CUDA_ARCHS='$(subst $(space),;,$(gpu_archs))' CUDA_HOME='$(patsubst %/bin/nvcc,%,$(nvcc))' \
	    $(VENV)/bin/python -m pip install --no-build-isolation --no-cache-dir 'flash-attn>=2.8.3,<3'
	$(VENV)/bin/python -c 'import flash_attn; print("flash-attn", flash_attn.__version__, "works")'

can-build-flash-attn:
	$(if $(gpu_archs),,$(error no NVIDIA GPU, so no flash-attn; nothing else needs it))
	$(if $(filter-out 80 90 100 120,$(gpu_archs)),$(error flash-attn has no code for this GPU (compute\
	    capability $(gpu_archs:0=.x)); nothing else needs it))
	$(if $(nvcc),,$(error no CUDA compiler (nvcc), so no flash-attn; nothing else needs it))
	@true

clean: ## To start over, or before you give the folder away: removes .venv and caches, never runs/
	rm -rf $(VENV) $(OLDEST_VENV) .pytest_cache .ruff_cache .mypy_cache __pycache__ benchmarks/__pycache__ tests/__pycache__ \
	    fsdp_qlora/__pycache__ fsdp_qlora/*/__pycache__

$(READY): requirements.txt
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || { \
	    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	        echo "$(PYTHON) is not Python 3.10 or newer: make setup PYTHON=/path/to/python3.11" >&2; \
	        exit 1; }; \
	    $(PYTHON) -m venv --clear $(VENV); }
	$(VENV)/bin/python -m pip install --disable-pip-version-check -r requirements.txt $(PINS:%='%')
	@touch $@
	$(if $(and $(gpu_archs),$(nvcc)),@echo "Flash Attention 2 can be built here: make flash-attn")
