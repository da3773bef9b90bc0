# Two commands are enough: `make run` and `make test`. Everything installs into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup run test test-all check docs bench bench-peers test-flower-versions clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[images,plots,accounting,report,tensorboard,mlflow,wandb,parquet,onnx,huggingface,he,paillier,functional,flower,docs,dev]'
	@touch $@

run: setup
	$(BIN)/fedveil demo

# One process per core, one thread each: threads that spin for work starve the other processes, and where a test asks for
# two they wait without. Bytecode is kept, for tests start many interpreters; files go in their order
# (tests/conftest.py), so that the long ones do not come last.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST) -m 'not slow' $(ARGS)

test-all: setup
	$(PYTEST) $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Pages that follow from the code are written again first; the site then opens from disk, site/index.html (its search
# needs a server: python -m http.server -d site).
docs: setup
	$(BIN)/python -m tools.command_page
	$(BIN)/python -m tools.architecture_picture
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

# Peers live in .peers/, one environment each (3.6 GB in all); `make bench` shows them too, once they are there.
bench-peers: setup
	$(BIN)/python -m benchmarks.peers --make
	$(BIN)/python -m benchmarks.peers $(ARGS)

# The Flower part against every minor version of Flower that pyproject.toml lets in, each in an environment of its own.
test-flower-versions: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.flower_versions $(ARGS)

clean:
	rm -rf $(VENV) .peers .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
