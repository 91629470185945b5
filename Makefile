# Everything a newcomer needs. `make serve` and `make test` set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?=

.PHONY: serve test test-deep check bench

serve: $(VENV)/.serve
	$(BIN)/kiln serve $(MODEL)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The same rules on many more cases. SHARE=0.1 SEED=7 runs a tenth of them, drawn by the seed 7.
SHARE ?= 1
SEED ?= 0
test-deep: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	  --deep --share $(SHARE) --share-seed $(SEED)

check: $(VENV)/.dev
	failed=0; \
	$(BIN)/ruff check . || failed=1; \
	$(BIN)/ruff format --check . || failed=1; \
	$(BIN)/mypy || failed=1; \
	exit $$failed

bench: $(VENV)/.dev
	$(BIN)/kiln bench serving --random-input-len 30 --random-output-len 64 \
	  --random-range-ratio 0.6 --baseline transformers --output benchmarks

$(VENV)/.serve $(VENV)/.dev: pyproject.toml constraints.txt tools/setup_venv.sh
	PYTHON=$(PYTHON) sh tools/setup_venv.sh $(VENV) $(if $(filter %.dev,$@),dev,serve)
	@touch $@
