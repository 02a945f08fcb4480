SHELL := /bin/bash
.SILENT:
.PHONY: help env test lint serve serve-pd bench peers lock clean

# Every target runs in the environment of the lock file; made on first use, quick afterwards.
IN_ENV = env=$$(requirements/env.sh) && PATH="$$env/bin:$$PATH"

help:
	echo "make serve   a datastore and an SGLang server with it (MODEL= PORT= ALGORITHM= DEVICE= DATASTORE=)"
	echo "make serve-pd  the same with prefill and decode on instances of their own, behind a router (PREFILLS= DECODES=)"
	echo "make test    every test (ARGS='tests/unit -k name' for some)"
	echo "make lint    ruff, import contracts, mypy"
	echo "make bench   drafting methods replayed, then plain decoding, NGRAM and SSSD served"
	echo "make peers   compiles Snowflake's suffix decoding for the benchmarks to compare with"
	echo "make env     the environment alone; prints its path"
	echo "make lock    resolve pyproject.toml into requirements/lock.txt"
	echo "make clean   what running leaves in the checkout"

env:
	requirements/env.sh

test:
	$(IN_ENV) python -m pytest $(ARGS)

lint:
	$(IN_ENV) && export PATH && ruff check . && ruff format --check . && lint-imports && mypy

serve:
	$(IN_ENV) exec python -m sglang_patches.launch.serve $(ARGS)

serve-pd:
	$(IN_ENV) exec python -m sglang_patches.launch.serve_pd $(ARGS)

bench:
	$(IN_ENV) && export PATH && model=$$(python -m sglang_patches.demo.model | tail -n 1) && \
	  python -m benchmarks.replay --nodes 8 16 --json var/bench/replay.json && \
	  python -m benchmarks.serve --model "$$model" --variants plain ngram sssd --batch 1 4 --count 10 --max-tokens 48 --json var/bench/serve.json && \
	  python -m benchmarks.roofline --json var/bench/roofline.json && \
	  python -m benchmarks.report var/bench && echo "bench: var/bench/README.md"

# What benchmarks compare with and the lock does not hold: arctic-inference comes as source alone and is compiled (CMake).
peers:
	$(IN_ENV) && "$$env/bin/python" -m pip install --no-deps arctic-inference==0.3.0

# No index address reaches the file: whoever installs it uses their own registry.
lock:
	uv pip compile pyproject.toml --all-extras --python-version 3.11 --python-platform x86_64-manylinux_2_34 \
	  --only-binary :all: --no-emit-index-url --no-annotate --quiet \
	  --custom-compile-command "make lock" --output-file requirements/lock.txt $(ARGS)

clean:
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf build dist .hypothesis .ruff_cache .mypy_cache .import_linter_cache .pytest_cache *.egg-info
