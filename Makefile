# `make help` lists the commands.
#
#   VENV=        use the Python that is active, and install nothing (VENV=PATH: the environment at PATH, as it is)
#   PYTHON=...   the Python that .venv is made with, or the active one; at least 3.11
#   PAGE=...     for page, html-fast, serve, bench and record: one page of the gallery, such as 02-fused-softmax; for the
#                last two also one chapter, such as chapter-5
#   WORKERS=2    processes that the tests share, auto for one a core; of what takes longer than make test auto is default
#   GALLERY_URL= where the site is published, for the canonical links that search engines read

VENV ?= .venv
PYTHON ?= python3
$(if $(word 2,$(VENV)),$(error VENV must be a path without spaces, got $(VENV)))
PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
# What every command waits for, before a look at what the environment lacks
INSTALLED := $(if $(filter .venv,$(VENV)),.venv/installed)

# Absolute, because pages run in a folder of their own.
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
export MPLBACKEND := agg
export GALLERY_COMMAND := make $(MAKECMDGOALS)$(if $(PAGE), PAGE=$(PAGE))

SPHINX = $(PY) -m sphinx -c . -n -W --keep-going
# A draft does not execute every page, and says so on each.
DRAFT = $(SPHINX) -A draft=1
# Is there while build/html holds what `make html` built without an error.
WHOLE := build/html.whole
PUBLISH = $(PY) docs/_ext/publish.py build/html "$(or $(DEST),build/site)" $(if $(VERSION),"$(VERSION)")
PAGES = $(or $(PAGE),*)
# Only a name is both: wildcard takes * and ? for patterns, and filter %.
IS_PAGE := $(and $(wildcard examples/$(PAGE).py),$(filter $(PAGE),$(basename $(notdir $(wildcard examples/*.py)))))
# What a command waits for that executes one page, where PAGE names none, or several
WRONG_PAGE := $(if $(PAGE),$(if $(IS_PAGE),$(if $(word 2,$(PAGE)),page-is-missing),page-is-missing))
# What a command that measures waits for, where PAGE names neither a page nor a chapter, or several
WRONG_MEASURE := $(if $(filter-out chapter-%,$(PAGE))$(word 2,$(PAGE)),$(WRONG_PAGE))
MORE_WORKERS := $(or $(WORKERS),auto)
WORKERS ?= 2

.PHONY: help html html-fast page serve publish test test-site audit fuzz test-triton evidence lint bench record outdated linkcheck clean check-site check-serve check-tests check-lint check-outdated check-gpu can-publish page-is-missing triton-is-missing site-is-built
.DEFAULT_GOAL := help
# `make clean html`, with any number of jobs, means one after the other.
.NOTPARALLEL:

help:  ## List these commands
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | awk -F'|' '{printf "  make %-12s %s\n", $$1, $$2}'

html: check-site  ## Execute the pages that changed and build the site into build/html
	@rm -f $(WHOLE)
	$(SPHINX) docs build/html
	@touch $(WHOLE)

html-fast: $(WRONG_PAGE) check-site  ## Build the site without executing the gallery's pages (the guide's code runs); with PAGE=..., execute that one
	@rm -f $(WHOLE)
	$(DRAFT) $(if $(PAGE),-D sphinx_gallery_conf.filename_pattern=/$(PAGE),-D plot_gallery=0) docs build/html

page: $(if $(PAGE),html-fast,page-is-missing)  ## Build the site and execute one page: make page PAGE=02-fused-softmax

serve: $(WRONG_PAGE) check-serve  ## Build the site, serve it at http://localhost:8000 and follow every change; PAGE=... as above
	@rm -f $(WHOLE)
	$(subst -m sphinx,-m sphinx_autobuild,$(DRAFT)) -A live=1 $(if $(PAGE),-D sphinx_gallery_conf.filename_pattern=/$(PAGE),-D plot_gallery=0) \
	  --watch examples --watch src --ignore "*/_generated/*" --ignore "*/tutorials/*" --ignore "*/python-api/generated/*" \
	  --ignore "*/__pycache__/*" --port 8000 docs build/html

publish: can-publish html  ## Add the site to the versions in DEST=build/site as VERSION=..., or as the tag or branch that is checked out
	$(PUBLISH)

# Each of the processes has a core. More threads would wait for one another.
test fuzz test-triton evidence: export OMP_NUM_THREADS := 1

test: check-tests  ## Run the tests
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup -m "not slow" --ignore tests/site

# A browser on a busy machine may miss a deadline. What fails twice is a fault.
test-site: site-is-built check-tests  ## Test the site that `make html` built, in a browser
	$(PY) -m pytest -n 2 --dist loadgroup -m "not slow" tests/site || $(PY) -m pytest -m "not slow" --last-failed tests/site

audit: site-is-built check-tests  ## Rate the built site with Lighthouse, on a machine that does nothing else, and compare it with a second build
	$(PY) -m pytest -n 0 -m slow -s tests/site

fuzz: check-tests  ## Test on some thousand inputs that hypothesis makes up anew, and run what else takes long
	$(PY) -m pytest -n $(MORE_WORKERS) --dist loadgroup -m slow --ignore tests/site

test-triton: $(if $(TRITON),,triton-is-missing) check-tests  ## Compile every kernel with another Triton: make test-triton TRITON=3.9.0
	$(PY) -m pip install --quiet --no-deps --target build/triton-$(TRITON) triton==$(TRITON)
	PYTHONPATH="$(CURDIR)/build/triton-$(TRITON):$(PYTHONPATH)" $(PY) -m pytest -n $(MORE_WORKERS) --dist loadgroup tests/test_compilation.py

evidence: check-gpu check-tests  ## Test on a GPU, with compute-sanitizer too, and write the tables to tests/records
	@command -v compute-sanitizer >/dev/null || \
	  { echo "make evidence: compute-sanitizer, of NVIDIA's CUDA toolkit, is not in the PATH" >&2; exit 1; }
	rm -rf build/evidence && mkdir -p build/evidence
	-$(PY) -m pytest -n $(MORE_WORKERS) --dist loadgroup -m "not slow" --ignore tests/site --junitxml=build/evidence/tests.xml
	-$(PY) -m pytest -n $(MORE_WORKERS) --dist loadgroup -m slow --ignore tests/site --junitxml=build/evidence/fuzz.xml
	$(PY) tests/every_kernel.py >/dev/null  # compiles, which under a tool takes much longer
	-for tool in memcheck racecheck initcheck synccheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --target-processes application-only \
	    --show-backtrace no --print-limit 0 $(PY) tests/every_kernel.py >build/evidence/$$tool.log 2>&1 & done; wait
	$(PY) tests/evidence.py build/evidence tests/records

lint: check-lint  ## Check style, and the generated pages for names that nothing defines
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) docs/_ext/gallery.py --all build/lint --keep-references
	$(PY) -m ruff check --select F401,F821,F823 build/lint
	$(if $(VENV),$(VENV)/bin/)zizmor --offline --quiet .github
	$(PY) -m sphinxlint -i docs/_generated -i docs/getting-started/tutorials -i docs/python-api/generated docs examples README.md

bench: $(WRONG_MEASURE) check-gpu  ## Measure on a GPU into build/records; PAGE=... measures one page
	$(call measure,build/records)

record: $(WRONG_MEASURE) check-gpu  ## Measure on a GPU and rewrite the records that the package ships
	$(call measure,src/triton_gallery/records)
	$(PY) docs/_ext/gallery.py --picture docs/_static/attention.svg

outdated: check-outdated  ## List the records whose kernels, launch or benchmark changed, and the commands that measure them anew
	@$(PY) docs/_ext/gallery.py --outdated

linkcheck: check-site  ## Check that external links answer
	$(DRAFT) -b linkcheck -D plot_gallery=0 docs build/linkcheck

clean:  ## Remove everything that was built; .venv stays, and so do the versions in build/site
	test ! -d build || find build -mindepth 1 -maxdepth 1 ! -name site -exec rm -rf {} +
	rm -rf docs/_generated docs/getting-started/tutorials docs/python-api/generated

# --- what the commands share ---

define measure
	$(PY) docs/_ext/gallery.py --all build/pages --keep-references
	$(if $(PAGE),@test -f build/pages/$(PAGE).py || { echo "make: $(PAGE) measures nothing" >&2; exit 1; })
	failed=; for page in build/pages/$(PAGES).py; do \
	  TRITON_GALLERY_RECORDS=$(1) $(PY) $$page || failed="$$failed $$page"; done; \
	  test -z "$$failed" || { echo "make: not measured to the end:$$failed" >&2; exit 1; }
endef

check-site check-serve check-tests check-lint check-outdated check-gpu: $(INSTALLED)
	@$(PY) docs/_ext/preflight.py $(@:check-%=%)

# Before the minutes that a build takes.
can-publish: check-site
	@$(PUBLISH) --check

site-is-built:
	@test -f $(WHOLE) || { echo "make: build/html holds no site, a draft, or what an error left; make html builds it" >&2; exit 1; }

page-is-missing:
	@echo "make: $(if $(PAGE),examples has no page $(PAGE); )name the page, such as PAGE=02-fused-softmax" >&2; exit 1

triton-is-missing:
	@echo "make: name the version, such as make test-triton TRITON=3.9.0" >&2; exit 1

# A constraint with a hash makes pip refuse every file without one, and a checkout has none. So there are steps: a pip that
# knows such constraints, what builds the package, the package, torch without CUDA where pip is told where to find it and
# there is no NVIDIA driver (as in CI; among files with a hash pip itself would take the larger), and what the package's
# extras ask for.
# Python compiles what it imports, of torch a small part, unless it may not keep that; pip compiles everything.
.venv/installed: PIP = .venv/bin/python -m pip install $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
.venv/installed: TORCH_CPU = $(shell sed -n 's/^\(torch==[0-9.]*\).*/\1+cpu/p' constraints.txt)
.venv/installed: constraints.txt pyproject.toml
	@$(PYTHON) docs/_ext/preflight.py python
	@$(PYTHON) -m venv .venv
	@echo "Installing into .venv, which takes some minutes; .venv/pip.log tells more."
	@{ sed -n '/^pip==/,/[^\\]$$/p' constraints.txt >.venv/pip.txt && $(PIP) --requirement .venv/pip.txt && \
	  $(PIP) --constraint constraints.txt hatchling editables && \
	  $(PIP) --no-deps --no-build-isolation --editable . && \
	  { command -v nvidia-smi || $(PIP) --constraint constraints.txt $(TORCH_CPU) || test -z "$$PIP_EXTRA_INDEX_URL" || \
	    echo "No torch without CUDA has its hash in constraints.txt for this Python; the larger one is installed." >&3; } && \
	  $(PIP) --constraint constraints.txt "triton-gallery[test,serve,lint]"; } 3>&2 >.venv/pip.log 2>&1 || \
	  { grep ERROR .venv/pip.log | tail -n 1; \
	    echo "triton-gallery: pip failed, see .venv/pip.log. No network? VENV= uses the active Python." >&2; exit 1; }
	@touch $@
