# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# With this variable, each of the hundreds of programs that tests start would compile the library again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-paired test-single test-thorough test-tensorflow cuda lint types docs wheel release gpu micro clean help
.DELETE_ON_ERROR:

help:
	@echo "make demo    install, then train ResNet-20 on handwritten digits with 1 and 2 workers and draw the result"
	@echo "make test    install with [dev], then ruff, mypy and the tests"
	@echo "make test-thorough   the same with all cases of large tables, and more moments at which a process is killed"
	@echo "make test-tensorflow   the tests of the TensorFlow modules, in an environment of their own, .venv-tensorflow"
	@echo "make cuda    compile the CUDA kernels with a compiler from the package index, and check the library (docs/howto/cuda.md)"
	@echo "make docs    build the documentation into docs/_build/html"
	@echo "make micro   run the timings under benchmarks/micro"
	@echo "make wheel   build dist/*.whl"
	@echo "make release build and check what a release would publish, without publishing it (CONTRIBUTING.md)"
	@echo "make gpu     test and time everything that needs a GPU (DRY=1 prints the steps; docs/howto/gpus.md)"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps hold what the installation depends on; an editable install follows every other change by itself.
$(VENV)/.installed: pyproject.toml setup.py requirements/development.txt | $(BIN)/python
	$(PIP) install --quiet -c requirements/development.txt torch
	$(PIP) install --quiet -c requirements/development.txt -e '.[torch,vision,master,charts]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --quiet -c requirements/development.txt -e '.[dev]'
	touch $@

# A master that ran before the demo stays; the one that the demo starts must not be left behind, not even by Ctrl-C.
demo: $(VENV)/.installed
	if ! $(BIN)/mlbench get-dashboard-url >/dev/null 2>&1; then \
	  trap '$(BIN)/mlbench master --stop' EXIT; trap 'exit 130' INT TERM; fi; \
	$(BIN)/mlbench run demo 1 2 --task 1a --num-cpus 1 --replace --wait --output demo-results -- --dataset digits --channels-last

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# Two of these tests run at a time. Some wait for masters and browsers most of the time, and the others need one core only:
# threads that wait for each other's cores spin: a test of task 3a took 17 times the processor time with two of them.
# The remaining tests start workers of their own one after the other, and wait three quarters of their time, so they run beside
# the others.
PAIRED = $(addprefix tests/,aggregation browser cli client comparison compat30 contracts controlflow faults master optim references results security \
	dataset evaluation lr_scheduler models network observe ops prediction sweep tools tracking) $(wildcard tests/test_*.py tests/benchmarks/test_micro_*.py)
# The tests on which the time goes are named at the end.
SLOWEST = --durations=100 --durations-min=3
test: lint types
	$(MAKE) --no-print-directory --jobs 2 test-paired test-single
test-paired: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SLOWEST) -n 2 --dist worksteal $(PAIRED)
test-single: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SLOWEST) $(addprefix --ignore=,$(PAIRED))

# Before a release, and after a change of what all optimizers share.
test-thorough:
	MLBENCH_TEST_THOROUGH=1 MLBENCH_KILLS=20 $(MAKE) test

# TensorFlow has an environment of its own, so that the library's own one stays small. torch is there to be compared with.
TF_VENV = .venv-tensorflow
TF_PIP  = $(TF_VENV)/bin/python -m pip --disable-pip-version-check
$(TF_VENV)/.installed: pyproject.toml setup.py requirements/development.txt
	$(PYTHON) -m venv $(TF_VENV)
	$(TF_PIP) install --quiet -c requirements/development.txt torch
	$(TF_PIP) install --quiet -c requirements/development.txt -e '.[tensorflow]' 'pytest>=8.0' 'pytest-timeout>=2.3'
	touch $@

test-tensorflow: $(TF_VENV)/.installed
	$(TF_VENV)/bin/python -m pytest tests_tensorflow

# The compiler has an environment of its own, too. It needs no GPU, and takes the CUDA runtime of no other package.
CUDA_VENV = .venv-cuda
CUDA_PIP  = $(CUDA_VENV)/bin/python -m pip --disable-pip-version-check
$(CUDA_VENV)/.installed: pyproject.toml setup.py requirements/development.txt requirements/cuda.txt
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_PIP) install --quiet -c requirements/development.txt torch
	$(CUDA_PIP) install --quiet -c requirements/development.txt -e '.[torch]' -r requirements/cuda.txt 'pytest>=8.0' 'pytest-timeout>=2.3'
	touch $@

cuda: $(CUDA_VENV)/.installed
	CUDA_HOME=$$(echo $(CUDA_VENV)/lib/python*/site-packages/nvidia/cu13) \
	  $(CUDA_VENV)/bin/python -m mlbench_core.install_cuda_extensions | tee $(CUDA_VENV)/build.txt
	grep -q 'spilled registers: 0 bytes' $(CUDA_VENV)/build.txt
	$(CUDA_VENV)/bin/python -c 'import torch, mlbench_core.ops.pytorch; operators = torch.ops.mlbench; names = ("short_attention", "attention_score"); \
	  [print(getattr(operators, name + end).default._schema) for name in names for end in ("", "_backward")]'
	$(CUDA_VENV)/bin/python -m pytest tests/ops/test_cuda_library.py

docs: $(VENV)/.installed
	$(PIP) install --quiet -c requirements/development.txt -e '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -t sources -b html docs docs/_build/html

# The other scripts there need a data set or MPI, or take long. Each saves its figures with --save; report.py writes RESULTS.md from these.
MICRO = cli_start tracker cifar_batches linear_loading decoding awd_lstm shared_memory collectives task1a_epoch optimizers
micro: $(VENV)/.installed-dev
	for name in $(MICRO); do $(BIN)/python benchmarks/micro/$$name.py || exit 1; done

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m build --wheel

release: $(VENV)/.installed-dev
	$(PIP) install --quiet 'twine>=6'
	$(BIN)/python tools/release.py dist

# Nothing is installed, because a machine with a GPU may have no network: it takes the environment of the checkout if that
# exists, and otherwise the Python that has torch.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) tools/measure_gpu.py $(if $(DRY),--dry-run) $(if $(AGAIN),--again) \
	  $(if $(DATA),--data '$(DATA)') $(if $(ONLY),--only $(ONLY))

clean:
	rm -rf $(VENV) $(TF_VENV) $(CUDA_VENV) build dist docs/_build demo-results *.egg-info
