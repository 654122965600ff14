# Everything that these targets install or deploy lies under DEMO_HOME; `make demo-clean` removes it.
# Each target first makes what it needs. The name is not KVP_…, since the deployment's own variables are called so and
# an exported one wins over its files.

DEMO_HOME ?= $(CURDIR)/.kvp
# Python 3.11 to 3.13, for all environments.
PYTHON ?= python3
# What the demo serves: smollm2 (a real model, 269 MB) or tiny (random weights, for quick tests).
MODEL ?= smollm2
# PyTorch's index of CPU wheels, where the usual index has none for this machine. Used for torch alone.
TORCH_INDEX_URL ?=
# Further arguments for ansible-playbook, pytest, uv and the benchmarks.
ANSIBLE_FLAGS ?=
PYTEST_FLAGS ?=
LOCK_FLAGS ?=
BENCH_FLAGS ?=

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

# Make splits its lists at blanks and virtual environments write their path into scripts.
ifneq ($(words $(CURDIR)),1)
$(error The path of this checkout holds a blank: $(CURDIR). Move it to a path without one)
endif
ifneq ($(words $(DEMO_HOME)),1)
$(error DEMO_HOME must be one path without blanks, it is '$(DEMO_HOME)')
endif
override DEMO_HOME := $(abspath $(DEMO_HOME))
ifeq ($(filter $(MODEL),smollm2 tiny),)
$(error MODEL must be smollm2 or tiny, it is '$(MODEL)')
endif

CONTROLLER := $(DEMO_HOME)/controller
DEV := $(DEMO_HOME)/dev
ENGINE := $(DEMO_HOME)/engine
L2_TEST := $(DEMO_HOME)/l2-test
MARKER := $(DEMO_HOME)/.kvpersist-home
PACKAGE := $(CURDIR)/plugins/module_utils/kvpersist
PLAYBOOK := PATH="$(CONTROLLER)/bin:$$PATH" ansible-playbook

# The demo's inventory reads these.
export DEMO_HOME
export DEMO_MODEL := $(MODEL)

##@ Demo: real LMCache and vLLM on this machine, without GPU, Docker or root

.PHONY: demo
demo: controller engine model ## Deploy, prove that the cache survives restarts, print the result
	$(PLAYBOOK) site.yml -l demo $(ANSIBLE_FLAGS)
	$(PLAYBOOK) site.yml -l demo --tags recover $(ANSIBLE_FLAGS)
	@"$(DEMO_HOME)/demo/bin/kvpersist" recover --last

.PHONY: demo-stop
demo-stop: ## Stop the demo's services, keep everything
	@if [ ! -d "$(DEMO_HOME)/demo" ]; then echo "demo-stop: nothing is deployed in $(DEMO_HOME)"; \
	else $(PLAYBOOK) playbooks/stop.yml -l demo $(ANSIBLE_FLAGS); fi

.PHONY: demo-clean
demo-clean: ## Stop the demo and remove DEMO_HOME
	@if [ ! -e "$(DEMO_HOME)" ]; then echo "demo-clean: $(DEMO_HOME) does not exist"; exit 0; fi; \
	if [ ! -f "$(MARKER)" ]; then \
	  echo "ERROR: $(DEMO_HOME) was not made by this project (no .kvpersist-home in it). Remove it by hand" >&2; exit 1; \
	fi; \
	$(MAKE) --no-print-directory demo-stop; \
	echo "demo-clean: removing $(DEMO_HOME)"; \
	rm -rf --one-file-system -- "$(DEMO_HOME)"

##@ Environments and model

.PHONY: controller
controller: $(CONTROLLER)/.stamp ## What runs ansible-playbook

.PHONY: engine
engine: $(ENGINE)/.stamp ## vLLM and LMCache, CPU builds

.PHONY: dev
dev: $(DEV)/.stamp ## Linters and test tools

.PHONY: model
model: $(DEMO_HOME)/models/$(MODEL)/config.json ## The model folder that the demo serves (MODEL=smollm2|tiny)

# demo-clean removes only a folder that holds this marker, so a folder with other things in it never gets one.
$(MARKER):
	@if [ -n "$$(ls -A "$(@D)" 2>/dev/null)" ]; then \
	  echo "ERROR: DEMO_HOME=$(@D) holds other files. Name an empty or a new folder" >&2; exit 1; \
	fi; \
	mkdir -p "$(@D)"; touch "$@"

$(CONTROLLER)/.stamp: requirements/controller.lock | $(MARKER)
	@$(PYTHON) scripts/make_venv.py "$(@D)" $<
	@touch "$@"

$(ENGINE)/.stamp: requirements/engine-cpu.lock requirements/torch-cpu.lock | $(MARKER)
	@$(PYTHON) scripts/make_venv.py "$(@D)" $< --torch requirements/torch-cpu.lock --torch-index "$(TORCH_INDEX_URL)"
	@touch "$@"

# The link lets ansible-lint import what the modules import; without it the rule `args` skips each module silently.
$(DEV)/.stamp: requirements/dev.lock pyproject.toml | $(MARKER)
	@$(PYTHON) scripts/make_venv.py "$(@D)" $<
	@"$(@D)/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@ln -sfn "$(PACKAGE)" "$$("$(@D)/bin/python" -c 'import ansible.module_utils as m; print(list(m.__path__)[0])')/kvpersist"
	@touch "$@"

# The engine's packages without a test tool among them: the demo and the tests run the same environment.
$(L2_TEST)/.stamp: requirements/l2-test.lock | $(ENGINE)/.stamp
	@$(PYTHON) scripts/make_venv.py "$(@D)" $<
	@engine=$$("$(ENGINE)/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "$$engine" > "$$("$(@D)/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engine.pth"
	@touch "$@"

$(DEMO_HOME)/models/%/config.json: scripts/make_model.py | $(ENGINE)/.stamp
	@"$(ENGINE)/bin/python" scripts/make_model.py "$(@D)" --kind $*
	@touch "$@"

##@ Benchmarks

.PHONY: bench-hash
bench-hash: dev ## Hashing of a model against sha256sum (BENCH_FLAGS="--gigabytes 4")
	@PYTHONPATH=plugins/module_utils "$(DEV)/bin/python" benchmarks/hashing.py --folder "$(DEMO_HOME)" $(BENCH_FLAGS)

##@ Checks

.PHONY: test
test: lint test-quick test-l2 test-engine test-integration ## Everything: lint, unit, contract, disk tier, engine, integration

.PHONY: test-quick
test-quick: dev ## Unit and contract tests
	"$(DEV)/bin/pytest" tests/unit tests/contract $(PYTEST_FLAGS)

.PHONY: test-l2
test-l2: $(L2_TEST)/.stamp ## The disk tier inside LMCache, with every codec
	"$(L2_TEST)/bin/pytest" tests/unit/l2 tests/l2 $(PYTEST_FLAGS)

.PHONY: test-engine
test-engine: $(L2_TEST)/.stamp ## What is read from models, compared with the installed vLLM and transformers
	"$(L2_TEST)/bin/pytest" tests/engine $(PYTEST_FLAGS)

.PHONY: test-integration
test-integration: dev controller engine model ## The demo as a test: recovery, idempotence, check mode
	"$(DEV)/bin/pytest" tests/integration $(PYTEST_FLAGS)

.PHONY: lint
lint: lint-python lint-types lint-yaml lint-ansible lint-changelog ## All linters

.PHONY: lint-python lint-types lint-yaml lint-ansible lint-changelog
lint-python: dev
	"$(DEV)/bin/ruff" check .
	"$(DEV)/bin/ruff" format --check .

lint-types: dev
	"$(DEV)/bin/mypy"
	"$(DEV)/bin/mypy" scripts/make_venv.py

lint-yaml: dev
	"$(DEV)/bin/yamllint" --strict .

lint-ansible: dev
	PATH="$(DEV)/bin:$$PATH" ansible-lint --profile production --offline

lint-changelog: dev
	"$(DEV)/bin/antsibull-changelog" lint

.PHONY: format
format: dev ## Let ruff format and fix what it can
	"$(DEV)/bin/ruff" check --fix .
	"$(DEV)/bin/ruff" format .

##@ Generated files

.PHONY: docs
docs: dev ## Pages and example files in docs/, in three languages, from the declarations of settings and identity
	"$(DEV)/bin/kvpersist" config --write-docs docs

.PHONY: changelog
changelog: dev ## CHANGELOG.rst from changelogs/fragments, for the version of the package
	version=$$("$(DEV)/bin/python" -c 'import kvpersist; print(kvpersist.__version__)'); \
	"$(DEV)/bin/antsibull-changelog" release --version "$$version" --update-existing

.PHONY: lock
lock: dev ## requirements/*.lock from *.in (LOCK_FLAGS=--upgrade for newer versions)
	scripts/lock.sh "$(DEV)/bin/uv" $(LOCK_FLAGS)

.PHONY: wheel
wheel: controller ## dist/kvpersist-….whl, which the roles install on hosts
	"$(CONTROLLER)/bin/python" -m hatchling build --target wheel

.PHONY: help
help: ## This list
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@/ { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\nVariables: DEMO_HOME=%s PYTHON=%s MODEL=%s TORCH_INDEX_URL=%s\n' '$(DEMO_HOME)' '$(PYTHON)' '$(MODEL)' '$(TORCH_INDEX_URL)'
