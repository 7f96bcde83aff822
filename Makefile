# `make demo` and `make test` each set up .venv by themselves; nothing else has to be installed first.

PYTHON ?= python3
BIN := .venv/bin
# With a GPU: the newest PyTorch, whose wheels bring gigabytes of CUDA libraries. Without one: the small CPU build of a
# version that is tested, from PyTorch's own index, or, if pip is told to look elsewhere (an index, mirror or wheel
# folder of your own), from there. `make test TORCH=torch` takes the newest; TORCH_INDEX names another index.
GPU_DRIVER := $(shell command -v nvidia-smi)
TORCH ?= $(if $(GPU_DRIVER),torch,torch==2.13.0)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: demo test test-full test-gpu bench-cpu bench-gpu lint format docs clean

demo: .venv/.installed
	$(BIN)/qkv-engine env
	@printf '\nWhat is 47*86?\n'
	@answer=$$($(BIN)/qkv-engine chat --prompt 'What is 47*86?' </dev/null) && echo "$$answer" && test "$$answer" = 4042
	@printf '\n'
	$(BIN)/qkv-engine bench --batch-sweep 1,4,16 --input-len 64 --output-len 32 --repeats 1

# One process more than cores, since tests of servers and of programs wait.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# Programs that tests start find compiled modules, whatever the environment asks.
COMPILED := PYTHONDONTWRITEBYTECODE=

test: .venv/.installed-test lint
	$(COMPILED) $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not gpu"

test-full: .venv/.installed-test .venv/.installed-clients lint
	$(COMPILED) $(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not gpu"

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

# The accuracy page on any model: make judge MODEL=Qwen/Qwen3-8B SAMPLES=100. A run that was stopped goes on where it
# was. Models other than the demo read the pages of this checkout, or the lines of DATA=FILE.jsonl, and tasks of
# lm-eval if it is installed (LM_EVAL= for none).
MODEL ?= demo
SAMPLES ?= 24
LM_EVAL ?= $(if $(filter-out demo,$(MODEL)),arc_easy$(comma)gsm8k)
comma := ,
JUDGED = $(RESULTS)/$(GPU:gpu=cpu)/judge-$(notdir $(MODEL))

.PHONY: judge
judge: .venv/.installed
	@mkdir -p $(dir $(JUDGED)) $(PICTURES)
	$(BIN)/python -m studies.judge $(MODEL) --samples $(SAMPLES) $(if $(DATA),--data $(DATA)) $(JUDGE_FLAGS) \
		$(if $(LM_EVAL),--lm-eval $(LM_EVAL)) --output $(JUDGED).jsonl --plot $(PICTURES)/$(notdir $(JUDGED)).png
	$(BIN)/python docs/make_tables.py

# Each part of bench-gpu is a target of its own, such as gpu-kitty or gpu-decode-8192.
GPU = $(or $(shell nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sed -n '1s/^NVIDIA //p' | tr 'A-Z ' 'a-z-'),gpu)
GPU_FILES = --output $(RESULTS)/$(GPU)/$(@:gpu-%=%).jsonl --plot $(PICTURES)/$(GPU)-$(@:gpu-%=%).png
PAPERS := $(addprefix gpu-,kitty kitty-prefill kvmix kivi patternkv xquant pm-kvq)
DECODE := $(addprefix gpu-decode-,2048 8192 32768)

.PHONY: $(PAPERS) $(DECODE) gpu-pareto gpu-check gpu-arrivals gpu-arrivals-below gpu-folders
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

# Speed is that of the shape's own spectral plan, answers are the demo model's with its plan of as many bits.
SPECTRAL := spectral-1.75.json
TASKS := ledger:40,lookup:100,addition:10,sorting:40
PARETO_KV = $(shell $(BIN)/python -c 'from qkv_engine.presets import main_presets; print(*main_presets(), sep=",")')

gpu-pareto: gpu-folders $(SPECTRAL) demo-$(SPECTRAL)
	$(BIN)/qkv-engine bench --pareto --sampled --shape qwen3-8b --input-len 7936 --output-len 256 --memory 80GiB \
		--kv $(PARETO_KV),$(SPECTRAL) --eval-plans demo-$(SPECTRAL) \
		--eval $(TASKS) --samples 100 $(GPU_FILES)

$(SPECTRAL) demo-$(SPECTRAL): .venv/.installed
	$(BIN)/qkv-engine plan --method spectral $(if $(filter demo-%,$@),--task $(TASKS),--shape qwen3-8b) \
		--budget 1.75bits --context 16777216 -o $@

gpu-check: gpu-folders
	$(BIN)/python -m studies.gpu_check --output $(RESULTS)/$(GPU)/check.jsonl

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
	@ln -s $(CURDIR)/engine/* $(foreach d,scheduler kernels models planner cli bench serve cluster,$(CURDIR)/$(d)) .typecheck/qkv_engine/
	@ln -s $(CURDIR)/studies .typecheck/

format: .venv/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without a network the tests of these clients are left out.
.venv/.installed-clients: .venv/.installed-test pyproject.toml
	-$(BIN)/pip install -q -e '.[clients]'
	@touch $@

# The site, in build/site; links and anchors that lead nowhere are errors.
docs: .venv/.installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .typecheck build dist *.egg-info

.venv/.torch:
	$(PYTHON) -m venv .venv
	@if [ -n '$(GPU_DRIVER)' ]; then \
		echo 'PyTorch: the build with CUDA libraries, some gigabytes'; $(BIN)/pip install -q '$(TORCH)'; \
	elif [ '$(origin TORCH_INDEX)' = file ] && $(BIN)/pip config list | grep -E 'index-url|find-links' >/dev/null; then \
		echo 'PyTorch: from where pip is configured to look'; $(BIN)/pip install -q '$(TORCH)'; \
	elif $(BIN)/pip index versions --retries 0 --index-url $(TORCH_INDEX) torch >/dev/null 2>&1; then \
		$(BIN)/pip install -q --index-url $(TORCH_INDEX) '$(TORCH)'; \
	else \
		echo 'PyTorch: $(TORCH_INDEX) cannot be reached; taking the build of PyPI, some gigabytes'; \
		$(BIN)/pip install -q '$(TORCH)'; \
	fi
	@touch $@

.venv/.installed: .venv/.torch pyproject.toml setup.py
	$(BIN)/pip install -q -e '.[bench]'
	@touch $@

.venv/.installed-test: .venv/.installed pyproject.toml
	$(BIN)/pip install -q -e '.[test]'
	@touch $@
