SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help install serve test test-long check base demo-tenants attacks clean

help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# What serving, building and clients need: a third less than all.
$(VENV)/.serving: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[build,triton]'
	@touch $@

$(VENV)/.installed: $(VENV)/.serving
	$(BIN)/pip install --quiet --editable '.[all]'
	@touch $@

install: $(VENV)/.installed ## make .venv and install hplm with everything it needs

serve: $(VENV)/.serving ## install the demo if there is none, start Triton, serve until Ctrl-C (ARGS=--check: try and stop)
	@exec $(BIN)/hplm serve $(ARGS)

# Files with tests that need a quiet machine. Reading all other test files once more takes ten seconds.
ALONE = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests | sort)

test: install check ## run every check and test, with a real Triton server
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m 'not alone' $(ARGS)
	$(BIN)/pytest -m alone $(ALONE) $(ARGS)

test-long: install ## run the tests that repeat their events less often in `make test`, with the full numbers (20 minutes)
	HPLM_TEST_LONG=1 $(BIN)/pytest -m repeated tests/triton $(ARGS)

check: install ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

base: install ## convert MiniLM again and write the weights that the repository ships (about an hour on two cores)
	$(BIN)/hplm build base --store build/base --tokens 12000000 --batch-tokens 4096 --ship-to builder/hplm_builder/convert/shipped/minilm-ngrams

demo-tenants: install ## train the demo's tenants again and write the files that the repository ships (about ten minutes)
	$(BIN)/hplm build demo --ship-to builder/hplm_builder/fleet/shipped_demo

# A line for each command. On two cores malformed takes 4 minutes and wrong-keys 1; a missing fleet takes 10. Results go to build/attacks.
ATTACKED = build/fleet-minilm-1000/models
attacks: install ## attack a server with keys, and measure what keys and quotas cost (about half an hour; needs nginx)
	test -d $(ATTACKED) || $(BIN)/hplm build fleet --shape minilm --tenants 1000
	$(BIN)/hplm bench malformed --models $(ATTACKED) --json build/attacks/malformed.json
	$(BIN)/hplm bench wrong-keys --models $(ATTACKED) --json build/attacks/wrong-keys.json
	$(BIN)/hplm bench access-check --json build/attacks/access-check.json
	$(BIN)/hplm bench access-throughput --models $(ATTACKED) --texts pool --json build/attacks/access-throughput.json
	$(BIN)/hplm bench access-quotas --models $(ATTACKED) --json build/attacks/access-quotas.json
	$(BIN)/hplm bench access-revocation --models $(ATTACKED) --json build/attacks/access-revocation.json
	$(BIN)/hplm bench access-flood --models $(ATTACKED) --json build/attacks/access-flood.json
	$(BIN)/hplm bench recovery --models $(ATTACKED) --json build/attacks/recovery.json

clean: ## remove the demo, with all tenants that were made in it, after a question (YES=1: without)
	@if [ -d build/demo/store/tenants ] && [ -z "$(YES)" ]; then \
	  echo "A server over build/demo loses these tenants: $$(ls build/demo/store/tenants | head -n 8 | tr '\n' ' ')($$(ls build/demo/store/tenants | wc -l) in all)"; \
	  read -rp 'Remove build/demo? [y/N] ' answer && [ "$$answer" = y ] || { echo 'Nothing was done. If no person can answer, give YES=1.'; exit 1; }; \
	fi
	rm -rf build/demo
