# All packages are installed in .venv, once, and again when a requirements file changes, and with them the command
# .venv/bin/zeroplay. Variables:
#   PYTHON=/path/to/python3   interpreter for .venv (3.11 to 3.13); by default the first one that is found
#   CORPUS=path               `make quickstart`: a folder of English texts or a file of passages; '': the miniature world
#   EVAL=file ENCODER=lexical with CORPUS: questions of your own; another index than BM25
#   WORKDIR=folder SEED=n     workdir and seed of `make quickstart`
#   ARGS='--config.FIELD=VALUE …'  further flags of `make quickstart`
PYTHON ?=
# With `=` variables of the same name in the shell have no effect; those of the command line do.
CORPUS =
EVAL =
ENCODER = bm25
WORKDIR = $(if $(CORPUS),,runs/quickstart)
SEED = 0
ARGS =
ifeq ($(CORPUS),)
ifneq ($(findstring command,$(origin EVAL) $(origin ENCODER)),)
$(error EVAL and ENCODER have no effect without CORPUS; add CORPUS=folder)
endif
endif
# The shell reads these from its environment, so that blanks and quotes in a path stay as they are.
export CORPUS EVAL WORKDIR

RUN := .venv/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check
# Installs .venv/bin/zeroplay, which runs the package of this folder: not where .venv is a link, to that of another
# folder. Without build isolation pip takes the setuptools of the requirements, and no network.
COMMAND := test -L .venv || $(PIP) --no-deps --no-build-isolation --editable .
TEST := $(RUN) -m pytest -q
# Test processes: one more than cores, because many tests wait for a command.
JOBS = $$($(RUN) -c 'import os; print(min(4, os.cpu_count() + 1))')

.DEFAULT_GOAL := help
.PHONY: help check quickstart test test-world results test-long lint bench release docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s%s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

check: # where .venv exists, its Python is checked
	@launch/python.sh $(or $(wildcard $(RUN)),$(PYTHON)) > /dev/null

.venv/ready: requirements.txt pyproject.toml | check
.venv/ready-test: requirements-test.txt requirements.txt requirements-docs.txt requirements-bucket.txt pyproject.toml | check
.venv/ready-docs: requirements-docs.txt | check
.venv/ready .venv/ready-test .venv/ready-docs:
	@test -x .venv/bin/pip || { echo '== new environment in .venv'; "$$(launch/python.sh $(PYTHON) 2> /dev/null)" -m venv .venv; }
	@echo '== installing $< into .venv (once; a few minutes, mostly downloads)'
	@$(PIP) -r $<
	@$(if $(filter-out .venv/ready-docs,$@),$(COMMAND))
	@touch $@

.venv/tpu-compiler: requirements-aot.txt .venv/ready-test
	@echo '== installing $< into $@ (once)'
	@$(PIP) --no-deps --upgrade --target $@ -r $<
	@touch $@

quickstart: .venv/ready ## self-play on this machine, from installation to report; CORPUS=folder: on your texts
ifeq ($(CORPUS),)
	@echo "== self-play into $$WORKDIR, seed $(SEED); it can be stopped at any time; the same command resumes it"
	@$(RUN) -m zeroplay_jax.main --config=configs/quickstart.py --workdir="$$WORKDIR" --config.seed=$(SEED) $(ARGS)
else
	@$(RUN) -m zeroplay_jax.quickstart --corpus "$$CORPUS" $${WORKDIR:+--workdir "$$WORKDIR"} $${EVAL:+--config.eval.file="$$EVAL"} \
	  --encoder '$(ENCODER)' --seed '$(SEED)' $(ARGS)
endif

# Files of tests in up to four processes.
PARALLEL = $(TEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: .venv/ready-test ## the tests of the core
	@echo '== tests of the core'
	@$(PARALLEL) -m 'not long and not results' --ignore=tests/world --ignore=tests/extras

test-world: .venv/ready-test .venv/tpu-compiler ## the tests of extras, and of commands of pages, notebooks and launch scripts
	@echo '== tests of extras, pages, notebooks and launch scripts'
	@$(PARALLEL) -m 'not long and not results' tests/world tests/extras

results: .venv/ready-test .venv/tpu-compiler ## the tests of benchmarks and of stored figures
	@echo '== benchmarks and stored figures'
	@$(PARALLEL) -m 'not long and results'

test-long: .venv/ready-test ## the tests that take minutes
	@echo '== long tests'
	@$(TEST) -m long

lint: .venv/ready-test ## ruff, mypy, shellcheck and hadolint
	@echo '== lint, format, types, scripts'
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(dir $(RUN))shellcheck .ci/run launch/*.sh
	@$(dir $(RUN))hadolint Dockerfile

bench: .venv/ready-test ## rollout and update speed, compared with other engines where they are installed
	@echo '== rollout and update benchmark'
	@$(RUN) -m benchmarks.rollout

release: ## sdist and wheel in dist/, tried in an empty environment of every Python that is here
	@launch/release.sh

docs: .venv/ready-docs ## build the documentation site into site/
	@echo '== building the documentation site into site/'
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

clean: ## remove the caches of the tools (runs and .venv stay)
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
