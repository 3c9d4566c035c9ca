# Needs Python 3.11 or newer, git and make; everything else goes into .venv.
# Another interpreter: PYTHON=python3.12 make test

PYTHON ?= python3
BIN := .venv/bin
# Made anew when the interpreter, the dependencies or their tested versions change.
READY := .venv/ready-with-$(subst /,-,$(PYTHON))
SCRATCH := build/check

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Otherwise the wheel's environment could see the caller's packages, or these sources.
unexport PYTHONPATH
# Otherwise each process of the tests could be told to compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-thorough test-all check check-style check-types check-wheel check-examples \
	check-demo check-slow check-oldest check-trackers check-frameworks nightly coverage docs tables format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' Makefile

demo: $(READY) ## Compare five algorithms on 4 uneven machines; ends with table and report
	$(BIN)/edgegossip compare quickstart

test: $(READY) ## Run the fast tests and the doctests, in a minute
	$(BIN)/pytest -q -n auto --dist loadfile

test-thorough: $(READY) ## Run the fast and the thorough tests, as CI does
	$(BIN)/pytest -q -n auto --dist loadfile -m "not slow"

test-all: $(READY) ## Run the slow tests too
	$(BIN)/pytest -q -m ""

check: check-style check-types docs check-wheel check-examples check-demo check-slow test-thorough ## Run all that CI runs, except check-oldest

check-style: $(READY) ## Check format, lint and spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell

check-types: $(READY) ## Check the types of sources, tests, studies, benchmarks and examples
	$(BIN)/mypy

docs: $(READY) ## Build the documentation as a site; warnings and dead links are errors
	$(BIN)/sphinx-build -qEW --keep-going -c docs/site -d build/site/doctrees . build/site/html
	@echo "read it: build/site/html/index.html"

check-wheel: $(READY) ## Build the package, install it into an empty environment and use it
	rm -rf $(SCRATCH)/wheel && mkdir -p $(SCRATCH)/wheel/empty
	$(BIN)/python -m build --outdir $(SCRATCH)/wheel . > $(SCRATCH)/wheel/build.log 2>&1 \
		|| { cat $(SCRATCH)/wheel/build.log; exit 1; }
	$(BIN)/python -m venv $(SCRATCH)/wheel/venv
	$(SCRATCH)/wheel/venv/bin/pip install --quiet -c constraints.txt $(SCRATCH)/wheel/*.whl
	cd $(SCRATCH)/wheel/empty \
		&& ../venv/bin/edgegossip --help \
		&& ../venv/bin/edgegossip list \
		&& ../venv/bin/edgegossip demo --open no \
		&& ../venv/bin/edgegossip new mine --task tabular \
		&& ../venv/bin/edgegossip run mine/recipe.py:recipe --num-epochs 2 \
		&& ../venv/bin/edgegossip study "$(CURDIR)/studies/aggregation.py:fig7" --short \
		&& ../venv/bin/edgegossip run quickstart --num-epochs 2 \
		&& ../venv/bin/python -c "from edgegossip import *; print(Gossip(topology=ring(4), num_rounds=1))"
	$(SCRATCH)/wheel/venv/bin/pip install --quiet twine==7.0.0
	$(SCRATCH)/wheel/venv/bin/twine check --strict $(SCRATCH)/wheel/*.whl $(SCRATCH)/wheel/*.tar.gz

check-examples: $(READY) ## Run the examples, but for the one that needs an archive
	rm -rf $(SCRATCH)/examples && mkdir -p $(SCRATCH)/examples
	@set -e; for example in $(filter-out examples/uci_har.py,$(wildcard examples/*.py)); do \
		echo "running $$example"; \
		(cd $(SCRATCH)/examples && "$(CURDIR)/$(BIN)/python" "$(CURDIR)/$$example"); \
	done

check-demo: $(READY) ## Run a short form of the demo
	rm -rf $(SCRATCH)/demo
	$(BIN)/edgegossip compare quickstart --num-epochs 3 --out $(SCRATCH)/demo
	test -s $(SCRATCH)/demo/report.html && test -s $(SCRATCH)/demo/summary.json

check-slow: $(READY) ## Run the short forms of all studies, and all algorithms over sockets
	$(BIN)/pytest -q -n auto -m slow -k "short_form or over_sockets or at_once" tests/unit/test_at_once.py tests/unit/test_studies.py tests/unit/test_parity.py

check-oldest: ## Run the fast and thorough tests with the oldest versions that pyproject.toml allows
	rm -rf $(SCRATCH)/oldest && mkdir -p $(SCRATCH)/oldest
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
		| sed 's/>=/==/' > $(SCRATCH)/oldest/constraints.txt
	$(PYTHON) -m venv $(SCRATCH)/oldest/venv
	$(SCRATCH)/oldest/venv/bin/pip install --quiet -c $(SCRATCH)/oldest/constraints.txt -e .
	$(SCRATCH)/oldest/venv/bin/pip install --quiet -c constraints.txt pytest pytest-xdist hypothesis redis
	$(SCRATCH)/oldest/venv/bin/pip freeze
	$(SCRATCH)/oldest/venv/bin/pytest -q -n auto -m "not slow" -W ignore::DeprecationWarning -W ignore::FutureWarning

check-trackers: ## Try trackers, pandas and the export with the real packages
	rm -rf $(SCRATCH)/trackers && mkdir -p $(SCRATCH)/trackers
	$(PYTHON) -m venv $(SCRATCH)/trackers/venv
	$(SCRATCH)/trackers/venv/bin/pip install --quiet $$(grep '^torch==' constraints.txt) \
		pytest pytest-xdist hypothesis huggingface_hub -e '.[mlflow,pandas,tensorboard,trackio,wandb]'
	$(SCRATCH)/trackers/venv/bin/pip freeze
	$(SCRATCH)/trackers/venv/bin/pytest -q -m "" tests/unit/test_real_trackers.py \
		tests/unit/test_frame.py tests/unit/test_export.py tests/examples/test_tools_page.py

check-frameworks: ## Try the callbacks with the real Lightning, Transformers, Accelerate and PEFT
	rm -rf $(SCRATCH)/frameworks && mkdir -p $(SCRATCH)/frameworks
	$(PYTHON) -m venv $(SCRATCH)/frameworks/venv
	$(SCRATCH)/frameworks/venv/bin/pip install --quiet $$(grep '^torch==' constraints.txt) \
		pytest pytest-xdist hypothesis peft -e '.[lightning,transformers]'
	$(SCRATCH)/frameworks/venv/bin/pip freeze
	$(SCRATCH)/frameworks/venv/bin/pytest -q -m "" tests/unit/test_real_accelerate.py \
		tests/unit/test_real_lightning.py tests/unit/test_real_transformers.py \
		tests/examples/test_framework_examples.py

nightly: $(READY) ## Search with a new seed, for hours; SEARCH=fuzz and SEED=17 choose
	$(BIN)/python -m tests.nightly $(SEARCH) $(if $(SEED),--seed $(SEED))

coverage: $(READY) ## Say which lines and branches the fast and thorough tests leave out
	$(BIN)/pytest -q -n auto -m "not slow" --cov --cov-report=term --cov-report=html:$(SCRATCH)/coverage

tables: $(READY) ## Write the tables of docs/*.md anew, from the docstrings
	$(BIN)/python -m docs.tables

format: $(READY) ## Format the code and fix what lint can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove what the other targets made, but no runs
	rm -rf .venv .coverage* build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests studies examples benchmarks lab -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"{sys.executable} is \
	Python {sys.version.split()[0]}; 3.11 or newer is needed, e.g. PYTHON=python3.12 make")'
	rm -rf .venv
	$(PYTHON) -m venv .venv
	@echo "Installing what pyproject.toml asks for; PyTorch takes some minutes the first time."
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,docs]'
	@touch $@
