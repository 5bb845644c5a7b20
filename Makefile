# Everything runs in .venv, made from requirements/<profile>.lock on first use.
PROFILE ?= cpu
PY := .venv/bin/python
RUN_DIR ?= runs/quickstart-$(shell date +%Y%m%d-%H%M%S)

.PHONY: venv quickstart test test-slow lint bench faults clean

venv:
	@bash requirements/install.sh $(PROFILE)

# Trains a model with reinforcement learning on two CPU cores, in a few minutes.
quickstart: venv
	.venv/bin/rlcore train experiment=quickstart run_dir=$(RUN_DIR)

# Lint, import rules, types, then every test that is not marked slow.
test: venv lint
	$(PY) -m pytest

test-slow: venv
	$(PY) -m pytest -m slow

lint: venv
	$(PY) -m ruff check rlcore tests benchmarks
	.venv/bin/lint-imports
	$(PY) -m mypy

# Every fault of docs/faults.md, caused for real in running jobs, and the table written there (about half an hour).
faults: venv
	$(PY) benchmarks/faults.py --out docs/faults.md

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
