# Two commands set everything up on a fresh machine:
#   make demo    train a GPT through dsc, against eager
#   make test    pass the tests
PYTHON ?= python3
VENV   ?= .venv
# The versions that the tests were run with; dsc itself takes torch 2.11 to 2.15.
TORCH  ?= torch==2.13.0 triton==3.7.1
RUN    := $(VENV)/bin/python

.PHONY: demo test lint bench bench-precision conformance clean

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --upgrade pip setuptools
	$(RUN) -m pip install -q $(TORCH)
	$(RUN) -m pip install -q -e '.[cli,dev]'
	touch $@

demo: $(VENV)/ready
	$(VENV)/bin/dsc demo

test: $(VENV)/ready lint
	$(RUN) -m pytest -q -n 2 --durations=15

lint: $(VENV)/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# one table of compile time, restarts, scale, the cache under stress, step time and bytes; ARGS="--quick --only restart"
bench: $(VENV)/ready
	$(RUN) benchmarks/all.py $(ARGS)

bench-precision: $(VENV)/ready
	$(RUN) benchmarks/precision.py $(ARGS)

# ARGS="--suite cases --only mutation", "--compare aot_eager,inductor --fresh", "--dynamic", "--part 0/20", "--json out.json"
conformance: $(VENV)/ready
	$(RUN) -m pip install -q -e '.[conformance]'
	PYTHONPATH=tests $(RUN) -m conformance $(ARGS)

clean:
	rm -rf $(VENV) build dist demo_out bench_out
