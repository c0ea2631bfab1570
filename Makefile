# `make demo` and `make test` start from a bare clone: scripts/setup.sh makes .venv and fills it. Stamps make the
# second run start at once.

VENV := .venv
BIN := $(VENV)/bin
TYPES := build/mypy
PACKAGES := runtime cache kernels

.PHONY: demo test lint clean

demo: $(VENV)/.ready-demo
	@$(BIN)/python scripts/beam_search.py

test: $(VENV)/.ready-dev
	@$(BIN)/python -m pytest

# mypy does not see packages of an editable install, so it gets a tree of links that looks like the installed package:
# links to files, since the folder kernels/cuda would hide kernels/cuda.py.
lint: $(VENV)/.ready-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@rm -rf $(TYPES)
	@for package in $(PACKAGES); do \
		mkdir -p $(TYPES)/pagefork/$$package && ln -s "$(CURDIR)/$$package"/*.py $(TYPES)/pagefork/$$package/ || exit 1; done
	@MYPYPATH=$(TYPES) $(BIN)/mypy --strict --namespace-packages --explicit-package-bases \
		$(foreach package,$(PACKAGES),-p pagefork.$(package))

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.ready-demo: pyproject.toml scripts/setup.sh
	@sh scripts/setup.sh demo
	@touch $@

$(VENV)/.ready-dev: pyproject.toml scripts/setup.sh
	@sh scripts/setup.sh demo,dev
	@touch $@
