# `make demo` and `make test` each set up .venv by themselves; nothing else has to be installed first.

PYTHON ?= python3
BIN := .venv/bin
# PyTorch's own index has small CPU builds. It is used where there is no GPU, unless pip is already told where to look
# (an index, mirror or wheel folder of your own), or TORCH_INDEX names another one.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := torch>=2.10,<2.14

.PHONY: demo test test-full test-gpu bench-cpu bench-gpu lint format docs clean

demo: .venv/.installed
	$(BIN)/qkv-engine env
	@printf '\nWhat is 47*86?\n'
	@answer=$$($(BIN)/qkv-engine chat --prompt 'What is 47*86?' </dev/null) && echo "$$answer" && test "$$answer" = 4042
	@printf '\n'
	$(BIN)/qkv-engine bench --batch-sweep 1,4,16 --input-len 64 --output-len 32 --repeats 1

test: .venv/.installed-test lint
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow and not gpu"

test-full: .venv/.installed-test lint
	$(BIN)/pytest -n auto --dist loadfile -m "not gpu"

test-gpu: .venv/.installed-test
	$(BIN)/pytest -m gpu

# Measurements that the pages show, one file of JSON lines a subject. RESULTS=build/results PICTURES=build/results keeps
# them apart from the ones of the repository, for qkv-engine bench --compare.
RESULTS ?= results
PICTURES ?= docs/images

bench-cpu: .venv/.installed
	@mkdir -p $(RESULTS)/cpu $(PICTURES)
	$(BIN)/qkv-engine bench --kv bf16,int4,kivi-2 --batch-sweep 1,4,16 --input-len 256 --output-len 64 \
		--output $(RESULTS)/cpu/batch-sweep.jsonl --plot $(PICTURES)/cpu-batch-sweep.png
	$(BIN)/qkv-engine bench --kv bf16,auto --task ledger:40 --batch-sweep 8 --kv-memory 3x \
		--output $(RESULTS)/cpu/short-of-memory.jsonl
	$(BIN)/qkv-engine eval --kv bf16,int4,kivi-2,kitty-pro,patternkv --tasks lookup:100,addition:10 --samples 12 \
		--output $(RESULTS)/cpu/accuracy.jsonl

# Each part of bench-gpu is a target of its own, such as gpu-kitty or gpu-decode-8192.
GPU = $(or $(shell nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sed -n '1s/^NVIDIA //p' | tr 'A-Z ' 'a-z-'),gpu)
GPU_FILES = --output $(RESULTS)/$(GPU)/$(@:gpu-%=%).jsonl --plot $(PICTURES)/$(GPU)-$(@:gpu-%=%).png
PAPERS := $(addprefix gpu-,kitty kitty-prefill kvmix kivi patternkv xquant pm-kvq)
DECODE := $(addprefix gpu-decode-,2048 8192 32768)

.PHONY: $(PAPERS) $(DECODE) gpu-pareto gpu-arrivals gpu-arrivals-below gpu-folders
bench-gpu: $(PAPERS) $(DECODE) gpu-pareto gpu-arrivals gpu-arrivals-below

gpu-folders: .venv/.installed
	@mkdir -p $(RESULTS)/$(GPU) $(PICTURES)

gpu-kitty: SETTING = --shape qwen3-8b --sampled
gpu-kitty-prefill: SETTING = --shape qwen3-8b --repeats 1 --kv bf16,kitty,kitty-pro
gpu-kvmix gpu-kivi: SETTING = --shape llama-2-7b --sampled
gpu-patternkv: SETTING = --shape llama-3.1-8b --sampled --batch-sweep 16,32,48,64,96,128,160
gpu-xquant: SETTING = --shape mistral-7b --sampled
gpu-pm-kvq: SETTING = --shape llama-3.1-8b --sampled
$(PAPERS): gpu-%: gpu-folders
	$(BIN)/qkv-engine bench --preset $* $(SETTING) $(GPU_FILES)

$(DECODE): gpu-decode-%: gpu-folders
	$(BIN)/qkv-engine bench --sampled --shape qwen3-8b --kv bf16,int8,int4,kivi-2,auto --batch-sweep 1..max \
		--input-len $(shell expr $* - 256) --output-len 256 --memory 80GiB $(GPU_FILES)

gpu-pareto: gpu-folders
	$(BIN)/qkv-engine bench --pareto --sampled --shape qwen3-8b --input-len 7936 --output-len 256 --memory 80GiB \
		--eval ledger:40,lookup:100,addition:10,sorting:40 --samples 100 $(GPU_FILES)

plan.json: .venv/.installed
	$(BIN)/qkv-engine plan --shape qwen3-8b --budget 3bits --rungs 12 -o $@

gpu-arrivals gpu-arrivals-below: plan.json

gpu-arrivals: gpu-folders
	$(BIN)/qkv-engine bench --arrivals 24 --requests 96 --shape qwen3-8b --kv bf16,int4,auto,auto-2,plan.json --kv-memory 12GiB \
		--input-len 2048 --output-len 192 --goodput ttft:1000,tpot:50 $(GPU_FILES)

gpu-arrivals-below: gpu-folders
	$(BIN)/qkv-engine bench --arrivals 16 --requests 128 --shape qwen3-8b --kv bf16,int4,auto,auto-2,plan.json --kv-memory 12GiB \
		--input-len 512 --output-len 128 $(GPU_FILES)

lint: .venv/.installed-test .typecheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/engine/typed_calls.py

# mypy cannot follow the folder map of pyproject.toml, so it gets the package as a folder of links.
.PHONY: .typecheck
.typecheck:
	@rm -rf .typecheck && mkdir -p .typecheck/qkv_engine
	@ln -s $(CURDIR)/engine/* $(foreach d,scheduler kernels models cli bench serve,$(CURDIR)/$(d)) .typecheck/qkv_engine/
	@ln -s $(CURDIR)/cluster .typecheck/qkv_engine/ray
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

.venv/.installed: .venv/.torch pyproject.toml setup.py
	$(BIN)/pip install -q -e '.[bench]'
	@touch $@

.venv/.installed-test: .venv/.installed pyproject.toml
	$(BIN)/pip install -q -e '.[test]'
	@touch $@
