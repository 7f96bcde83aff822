# `make demo` and `make test` each set up .venv by themselves; nothing else has to be installed first.

PYTHON ?= python3
BIN := .venv/bin
# PyTorch's own index has small CPU builds. It is used where there is no GPU, unless pip is already told where to look
# (an index, mirror or wheel folder of your own), or TORCH_INDEX names another one.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := torch>=2.10,<2.14

.PHONY: demo test test-full test-gpu lint format docs clean

demo: .venv/.installed
	$(BIN)/qkv-engine env
	@printf '\nWhat is 47*86?\n'
	@answer=$$($(BIN)/qkv-engine chat --prompt 'What is 47*86?' </dev/null) && echo "$$answer" && test "$$answer" = 4042
	@printf '\n'
	$(BIN)/qkv-engine bench --batch-sweep 1,4,16 --input-len 64 --output-len 32 --repeats 1

test: .venv/.installed-test lint
	$(BIN)/pytest -n auto --dist loadfile -m "not slow and not gpu"

test-full: .venv/.installed-test lint
	$(BIN)/pytest -n auto --dist loadfile -m "not gpu"

test-gpu: .venv/.installed-test
	$(BIN)/pytest -m gpu

lint: .venv/.installed-test .typecheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/engine/typed_calls.py

# mypy cannot follow the folder map of pyproject.toml, so it gets the package as a folder of links.
.PHONY: .typecheck
.typecheck:
	@rm -rf .typecheck && mkdir -p .typecheck/qkv_engine
	@ln -s $(CURDIR)/engine/* $(foreach d,scheduler kernels models cli bench,$(CURDIR)/$(d)) .typecheck/qkv_engine/
	@ln -s $(CURDIR)/studies .typecheck/

format: .venv/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, in build/site; links and anchors that lead nowhere are errors.
docs: .venv/.installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .typecheck build dist *.egg-info

.venv/.torch:
	$(PYTHON) -m venv .venv
	@if command -v nvidia-smi >/dev/null 2>&1 || $(BIN)/pip config list | grep -Eq 'index-url|find-links'; then \
		$(BIN)/pip install -q "$(TORCH)"; \
	else \
		$(BIN)/pip install -q --index-url $(TORCH_INDEX) "$(TORCH)" || $(BIN)/pip install -q "$(TORCH)"; \
	fi
	@touch $@

.venv/.installed: .venv/.torch pyproject.toml
	$(BIN)/pip install -q -e '.[bench]'
	@touch $@

.venv/.installed-test: .venv/.installed pyproject.toml
	$(BIN)/pip install -q -e '.[test]'
	@touch $@
