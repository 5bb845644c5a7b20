# Everything runs in .venv, made from requirements/<profile>.lock on first use.
PROFILE ?= cpu
PY := .venv/bin/python
FLASH_ATTN ?= 0
RUN_DIR ?= runs/$@-$(shell date +%Y%m%d-%H%M%S)
# where model=smollm2 expects it
DEMO_MODEL := cache/models/smollm2-135m

.PHONY: help venv quickstart demo screenshots test test-fast test-changed test-slow test-rest nightly soak mutants lint \
  rules wheel release-notes docs docs-commands faults models clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv:  ## make or update .venv from its lock file (PROFILE=cpu or cuda; FLASH_ATTN=1 builds flash-attn)
	@FLASH_ATTN=$(FLASH_ATTN) bash requirements/install.sh $(PROFILE)

quickstart: venv  ## train a model with RL on two CPU cores, in about five minutes
	@dir=$(RUN_DIR) && .venv/bin/rlcore train experiment=quickstart run_dir=$$dir && \
	printf '%s\n' "Look at $$dir/report.html: the curves, and answers before and after. Then try, from .venv/bin:" \
	  "  rlcore try task=digits n=5                   what the model is asked, and what the grader says" \
	  "  rlcore train experiment=quickstart schedule.max_staleness=8 run_dir=$$dir-stale   older samples" \
	  "  rlcore compare $$dir $$dir-stale     what that changed" "All pages: docs/index.md"

demo: venv  ## improve a real pretrained model by RL on two CPU cores
	.venv/bin/rlcore fetch name=smollm2-135m out=$(DEMO_MODEL)
	.venv/bin/rlcore train experiment=demo run_dir=$(RUN_DIR)

test: venv rules  ## what decides on a change: lint, import rules, types, and all tests but slow ones
	$(PY) tests/tiers.py test

test-fast: venv  ## the tests that start no process: a few minutes, for every edit
	$(PY) tests/tiers.py fast

test-changed: venv  ## the tests of modules that changed, slow ones too (BASE=<commit>, else main)
	$(PY) tests/tiers.py changed --base $(or $(BASE),main)

test-slow: venv  ## the tests marked slow
	$(PY) tests/tiers.py slow

test-rest: venv  ## slow tests: of what changed since BASE=<commit>, then share SHARD of six, for BUDGET_S
	$(PY) tests/tiers.py rest --base "$(BASE)" --shard $(or $(SHARD),0) --budget-s $(or $(BUDGET_S),1500)

nightly: venv  ## the tests marked nightly (all faults), documented commands (demo, docs), soak, mutants
	$(PY) tests/tiers.py nightly
	$(MAKE) docs-commands
	$(MAKE) models
	$(MAKE) referee
	$(MAKE) soak
	$(MAKE) mutants

soak: venv  ## quickstart for an hour, an actor killed every two minutes
	$(PY) -m benchmarks.faults.soak --minutes 60

mutants: venv  ## one wrong line at a time: do the tests notice? (COUNT=20 SEED=3: random ones, too)
	nice $(PY) -m benchmarks.mutants.mutants
	test -z "$(COUNT)" || nice $(PY) -m benchmarks.mutants.mutants --random $(COUNT) --seed $(or $(SEED),0)

rules: venv  ## ruff, import rules; warnings on style
	$(PY) -m ruff check rlcore tests benchmarks docs
	.venv/bin/lint-imports
	$(PY) tests/structure.py --warnings

lint: rules  ## ruff, import rules, mypy; warnings on style
	$(PY) -m mypy

wheel: venv  ## build a source distribution and a wheel into dist/, configuration and launchers inside
	$(PY) -c "from setuptools import build_meta; build_meta.build_sdist('dist')" > /dev/null
	$(PY) -m pip wheel -q --no-deps --no-build-isolation -w dist .

release-notes:  ## move changes/ into CHANGELOG.md (VERSION=0.3.0)
	python3 docs/changes.py --release $(VERSION)

.venv-docs/bin/mkdocs: requirements/docs.lock
	python3.11 -m venv --clear .venv-docs
	.venv-docs/bin/python -m pip install -q --disable-pip-version-check --no-deps -r $<
	touch $@

docs: .venv-docs/bin/mkdocs  ## build docs/ as a site into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

screenshots: venv  ## take the pictures of report, console and dashboard in docs/ (RUN_DIR=DIR, chromium)
	$(PY) docs/screenshots.py $(RUN_DIR)

docs-commands: venv  ## run the documented commands: the bash blocks that are tagged `run` (an hour)
	$(PY) tests/run_documented.py

faults: venv  ## cause every fault for real, rewrite benchmarks/results/faults_cpu.md (half an hour)
	$(PY) -m benchmarks.faults.faults --out benchmarks/results/faults_cpu.md

models: venv  ## prove every family of models or show its refusal, rewrite docs/models.md (half an hour)
	nice $(PY) -m benchmarks.models.models --out docs/models.md

referee: venv  ## judge the losses of released trainers, rewrite docs/referee.md (ten minutes)
	nice $(PY) -m benchmarks.peers.referee_peers --out docs/referee.md

clean:  ## remove .venv and caches
	rm -rf .venv .venv-docs site .pytest_cache .mypy_cache .ruff_cache
