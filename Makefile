# Everything a fresh machine needs: `make train` and `make test` create .venv by themselves.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python

.PHONY: help train reproduce test lint check wheel clean

help:                 ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

train: $(VENV)/installed    ## the main job: PPO plans Llama-3 8B on 8 A100-40 + 16 V100-16
	$(RUN) -m haap_rl.train +search=ppo

reproduce: $(VENV)/installed    ## the paper's tables into results/, overnight; `make reproduce quick=true` in some minutes
	$(RUN) -m experiments.reproduce quick=$(or $(quick),false) out=$(or $(out),results) docs=$(if $(filter true,$(quick)),none,docs)

test: $(VENV)/installed     ## the test suite (no network, no GPU; six to fifteen minutes on two cores)
	$(RUN) -m pytest -q -n 2

lint: $(VENV)/installed     ## formatter, linter and types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

check: lint test            ## lint, then test: run before every push

wheel:                      ## build the wheel and use it from an empty folder in an environment of its own
	bash tests/check_wheel.sh $(PYTHON)

clean:                ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
