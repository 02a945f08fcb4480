SHELL := /bin/bash
# Targets that call each other say nothing of it.
MAKEFLAGS += --no-print-directory
.SILENT:
.PHONY: help env test test-rest test-all test-long lint serve serve-pd demo bench peers packages settings reference dist lock clean

# Every target runs in the environment of the lock file, which is made on first use.
IN_ENV = env=$$(requirements/env.sh) && PATH="$$env/bin:$$PATH"
# What the system lacks is said before that takes minutes, by any Python.
LACKS = ! command -v python3 >/dev/null || python3 sglang_patches/launch/system.py

help:
	echo "make serve   a datastore and an SGLang server with it (MODEL= DRAFT_MODEL= EARLY_EXIT= PORT= ALGORITHM= DEVICE= DATASTORE=)"
	echo "make demo    a page in a browser: plain decoding and a method answer the same question (variables of make serve; PORT= is the page's)"
	echo "make serve-pd  the same with separate prefill and decode instances behind a router (PREFILLS= DECODES=)"
	echo "make test    the tests of every change, in two lanes side by side (ARGS='tests/unit -k name' for some)"
	echo "make test-all   these, and then what they leave out: what CI runs"
	echo "make test-rest  only what they leave out"
	echo "make test-long  all of them and what takes hours: a report under var/tests/long (RUNS='units versions' for some)"
	echo "make lint    ruff, import contracts, mypy"
	echo "make bench   drafting methods replayed, then plain decoding, NGRAM and SSSD served"
	echo "make peers   compiles Snowflake's suffix decoding for the benchmarks"
	echo "make packages  draws docs/packages.svg: which package imports which"
	echo "make settings  writes docs/settings.md from the table in docs/settings.py"
	echo "make reference  writes docs/flags.md, cli.md and metrics.md from the code"
	echo "make dist    wheel and sdist in dist/"
	echo "make env     makes the environment and prints its path"
	echo "make lock    resolves pyproject.toml into requirements/lock.txt, and for each earlier SGLang that is tested"
	echo "make clean   removes what running leaves in the checkout"

env:
	requirements/env.sh

test:
	$(LACKS) tests || echo "tests that need it are skipped (with CI set they fail)" >&2
	$(IN_ENV) python -m $(if $(strip $(ARGS)),pytest $(ARGS),tests.lanes)

test-rest:
	$(IN_ENV) python -m tests.lanes rest

test-all:
	first=0; $(MAKE) --no-print-directory test ARGS= || first=$$?; $(MAKE) --no-print-directory test-rest && exit $$first

test-long:
	$(IN_ENV) python -m tests.lanes long $(RUNS)

lint:
	$(IN_ENV) && export PATH && ruff check . && ruff format --check . && lint-imports && mypy

serve:
	$(IN_ENV) exec python -m sglang_patches.launch.serve $(ARGS)

serve-pd:
	$(LACKS) split
	$(IN_ENV) exec python -m sglang_patches.launch.serve_pd $(ARGS)

demo:
	$(IN_ENV) exec python -m sglang_patches.launch.demo $(ARGS)

bench:
	$(IN_ENV) && export PATH && model=$$(python -m sglang_patches.demo.model | tail -n 1) && \
	  python -m benchmarks.replay --nodes 8 16 --json var/bench/replay.json && \
	  python -m benchmarks.serve --model "$$model" --variants plain ngram sssd --batch 1 4 --count 10 --max-tokens 48 --json var/bench/serve.json && \
	  python -m benchmarks.roofline --json var/bench/roofline.json && \
	  python -m benchmarks.report var/bench && echo "bench: var/bench/README.md"

# The benchmarks compare with arctic-inference. It is published as source only, so it is compiled (CMake) and not in the lock.
peers:
	$(IN_ENV) && "$$env/bin/python" -m pip install --no-deps arctic-inference==0.3.0

packages:
	$(IN_ENV) python docs/packages.py $(ARGS)

settings:
	$(IN_ENV) python docs/settings.py

reference:
	$(IN_ENV) python docs/reference.py

# The wheel is built from the sdist, so the sdist has what a build needs.
dist:
	$(IN_ENV) && rm -rf dist && python -m build

# The files name no package index: whoever installs from one uses their own registry.
COMPILE = uv pip compile pyproject.toml --all-extras --python-version 3.11 --python-platform x86_64-manylinux_2_34 \
  --only-binary :all: --no-emit-index-url --no-annotate --quiet --custom-compile-command "make lock" $(ARGS)
lock:
	$(COMPILE) --output-file requirements/lock.txt
	for file in requirements/sglang-*.txt; do \
	  version=$${file#*sglang-} && echo "sglang==$${version%.txt}" | $(COMPILE) --constraints - --output-file $$file || exit 1; \
	done

clean:
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf build dist .hypothesis .ruff_cache .mypy_cache .import_linter_cache .pytest_cache *.egg-info
