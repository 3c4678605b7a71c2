# checkpoint-sidecar: `make demo` and `make test` need python3.11 or newer, make and a network; nothing else.

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do $$p -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)
VENV   ?= .venv
BIN    := $(VENV)/bin
INSTALL := $(BIN)/python .ci/install -c constraints.txt
STORE  ?= s3
JSON   ?= 0
# More processes than cores, because most tests wait: for a server, a deadline. Those of make test-slow train, too.
PROCESSES := 6
PROCESSES_SLOW := 5
PROCESSES_CLUSTER := 4
SCHEDULES ?= 100000
RUNS   ?= 100
# Of make test-oldest: constraints-$(OLDEST).txt.
OLDEST ?= oldest
# Of make campaign: most of a run is waiting.
AT_ONCE ?= 6
FIRST  ?= 0
# Suites with a target of their own.
ELSEWHERE := not docker and not cluster and not cuda and not dist

DIST   ?= dist
TOOLS  := .tools/bin
# A lock has the hashes of all files of a version, and names no index. -c: the versions that the tests run with.
COMPILE := $(TOOLS)/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --annotation-style line \
	--custom-compile-command 'make lock' -c constraints.txt $(if $(UPGRADE),--upgrade)
# Of make fuzz: of each target. Of make mutants: of all.
SECONDS ?= 60
TARGETS ?= all
MODULES ?=
# Of make soak.
MINUTES ?= 20

.DEFAULT_GOAL := help
# Tests start many interpreters: without bytecode each of them compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo compose-demo test test-cuda test-docker test-slow test-crowded test-long test-simulation test-python test-cluster test-cluster-all lint types format bench bench-hook bench-scale bench-sigterm bench-preemption bench-stall bench-start bench-webhook bench-all bench-peers clean simulate campaign coverage dist lock sbom audit test-dist test-oldest docs reference screenshot plots fuzz mutants bench-growth soak

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## preempt a training run, delete its volume, resume exactly (JSON=1: one JSON line; STORE=file: no S3 server)
	@$(BIN)/python -m examples.demo --store $(STORE) $(if $(filter 1,$(JSON)),--json)

compose-demo:  ## the same in containers (Docker with Compose; STORE=ceph: Ceph RGW instead of MinIO; COMPOSE_ARGS=--help)
	@$(PYTHON) -m examples.demo.compose $(if $(filter ceph,$(STORE)),--store ceph) $(if $(filter 1,$(JSON)),--json) $(COMPOSE_ARGS)

test: $(VENV)/.trainer  ## unit, property, store and process tests (PYTEST_ARGS='-k …' for some of them)
	$(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal --durations=10 -m "not slow and not rgw and not minio and $(ELSEWHERE)" $(PYTEST_ARGS)

simulate: $(VENV)/.trainer  ## check the invariants in 100,000 simulated schedules of nodes, pods and retention (SCHEDULES=, FIRST=; CONTRIBUTING.md)
	$(BIN)/python -m tests.simulation step $(FIRST):$$(($(FIRST) + $(SCHEDULES) * 85 / 100))
	$(BIN)/python -m tests.simulation retention $(FIRST):$$(($(FIRST) + $(SCHEDULES) * 5 / 100))
	$(BIN)/python -m tests.simulation job $(FIRST):$$(($(FIRST) + $(SCHEDULES) * 10 / 100))

campaign: $(VENV)/.trainer  ## real sidecars, pods and stores through faults that seeds choose (RUNS=, FIRST=, STORE=rgw,minio,moto,file; CONTRIBUTING.md)
	$(BIN)/python -m tests.campaign run $(FIRST):$$(($(FIRST) + $(RUNS))) --at-once $(AT_ONCE) $(if $(filter s3,$(STORE)),,--store $(STORE)) $(CAMPAIGN_ARGS)

fuzz: $(VENV)/.trainer  ## fuzz what parses documents, answers, settings, manifests and calls (SECONDS= of each, TARGETS=; x86-64; CONTRIBUTING.md)
	$(BIN)/python -m tests.fuzz $(TARGETS) --seconds $(SECONDS) $(FUZZ_ARGS)

mutants: $(VENV)/.trainer  ## change decisions of sidecar/core one at a time: a test must fail (SECONDS=600, MODULES='commit schedule.flush'; CONTRIBUTING.md)
	$(BIN)/python -m tests.mutants $(MODULES) --seconds $(if $(filter file,$(origin SECONDS)),600,$(SECONDS)) $(MUTANTS_ARGS)
soak: $(VENV)/.trainer  ## a checkpoint a second through a flaky store for 20 minutes; fails where anything grows (MINUTES=, STORE=moto|minio|rgw|file)
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --store $(if $(filter s3,$(STORE)),moto,$(STORE)) $(SOAK_ARGS)

coverage: $(VENV)/.trainer  ## branch coverage of the decisions (sidecar/core) and of the contract, by their own tests
	$(BIN)/python -m coverage run --branch --source=sidecar/core,trainer_hook/contract -m pytest tests/core tests/hook/contract
	$(BIN)/python -m coverage report --show-missing --skip-covered --fail-under=100

test-docker: $(VENV)/.trainer  ## build and run the images, and the compose scenario against Ceph RGW (Docker with Compose)
	$(BIN)/python -m pytest -m docker $(PYTEST_ARGS)

test-python: .tools/.installed  ## the sidecar's tests, but not the hook's, with another Python (OTHER_PYTHON=/path/to/python3.14)
	$(TOOLS)/uv venv --quiet --clear --python $(OTHER_PYTHON) .venv-other
	$(TOOLS)/uv pip install --quiet --python .venv-other/bin/python -c constraints.txt -e '.[test]'
	.venv-other/bin/python -m pytest -n $(PROCESSES) --dist worksteal --ignore tests/hook -m "not slow and not rgw and not minio and $(ELSEWHERE)" $(PYTEST_ARGS)

test-oldest: .venv-$(OLDEST)/.installed  ## the hook with the oldest PyTorch, transformers, … that pyproject.toml names (5 GB; OLDEST=transformers-4, OLDEST_ARGS)
	.venv-$(OLDEST)/bin/python -m pytest -n $(PROCESSES_SLOW) --dist worksteal -m "not crowded and $(ELSEWHERE)" tests/hook $(OLDEST_ARGS)

test-slow:  ## long process tests, and everything against Ceph RGW and MinIO (tests/{rgw,minio}/up): test-crowded, then test-long
	@$(MAKE) --keep-going test-crowded test-long

test-crowded: $(VENV)/.trainer .deepspeed/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=5 -m "crowded and $(ELSEWHERE)" $(PYTEST_ARGS) || [ $$? = 5 ]

test-long: $(VENV)/.trainer .deepspeed/.installed
	$(BIN)/python -m pytest -n $(PROCESSES_SLOW) --dist worksteal --durations=15 -m "(slow or rgw or minio) and not crowded and $(ELSEWHERE)" $(PYTEST_ARGS)

test-simulation: $(VENV)/.trainer  ## the long schedules of the simulation alone (make test-slow runs them, too)
	$(BIN)/python -m pytest -o cache_dir=.pytest_cache/$@ -m slow tests/simulation $(PYTEST_ARGS)

test-cuda: $(VENV)/.trainer  ## bit-identical resume and saves during training on one GPU (skipped where PyTorch finds none)
	$(BIN)/python -m pytest -m cuda $(PYTEST_ARGS)

test-cluster: $(VENV)/.trainer  ## evictions, preemptions and lost nodes, on the cluster of KUBECONFIG (tests/cluster/README.md)
	$(BIN)/python -m pytest -n $(PROCESSES_CLUSTER) --dist worksteal -m "cluster and not disruptive" tests/cluster $(PYTEST_ARGS) || [ $$? = 5 ]
	$(BIN)/python -m pytest -m disruptive tests/cluster $(PYTEST_ARGS) || [ $$? = 5 ]

test-cluster-all: $(VENV)/.trainer  ## start a cluster and run test-cluster on it, with JobSet, Kubeflow Trainer and Kueue (root, Docker, Go)
	tests/cluster/run jobset trainer kueue

test-dist: $(VENV)/.trainer  ## wheel and sdist, and each extra in an environment of its own (a package index)
	$(BIN)/python -m pytest -n 3 --dist worksteal -o cache_dir=.pytest_cache/$@ --durations=5 -m dist tests/dist $(PYTEST_ARGS)

dist: .tools/.installed  ## wheel and sdist in dist/, the same bytes for the same commit
	rm -rf dist build
	SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} $(TOOLS)/python -m build --no-isolation --outdir dist .
	rm -rf build
	$(TOOLS)/twine check --strict dist/*

sbom: .tools/.installed  ## what the sidecar's image installs, as CycloneDX, and the licences of that, in dist/
	rm -rf .sbom && $(PYTHON) -m venv --without-pip .sbom && mkdir -p $(DIST)
	$(TOOLS)/python -m pip --python .sbom install --quiet --disable-pip-version-check --require-hashes -r requirements-sidecar.lock
	$(TOOLS)/cyclonedx-py environment --pyproject pyproject.toml --mc-type application --output-reproducible --spec-version 1.6 \
		-o $(DIST)/checkpoint-sidecar-$$(.ci/version).cdx.json .sbom/bin/python
	.ci/sbom $(DIST)/checkpoint-sidecar-$$(.ci/version).cdx.json $$(.ci/version) >$(DIST)/licences.md
	rm -rf .sbom

audit: .tools/.installed  ## known vulnerabilities of what the locks name (CKPT_TEST_AUDIT=required: no answer is a failure)
	$(TOOLS)/python .ci/audit requirements-sidecar.lock requirements-build.lock requirements-tools.lock

lock:  ## versions and hashes that images and releases install (UPGRADE=1: also newer ones that pyproject.toml and constraints.txt allow)
	@test -x $(TOOLS)/uv || $(MAKE) .tools/.installed
	$(COMPILE) --extra sidecar --extra otel -o requirements-sidecar.lock pyproject.toml
	$(COMPILE) --group build -o requirements-build.lock
	$(COMPILE) --group build --group tools -o requirements-tools.lock

lint: $(VENV)/.trainer  ## ruff, import-linter, and no tracked file at the root that .ci/root does not name
	.ci/root
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.trainer  ## mypy --strict
	$(BIN)/mypy
	for minor in 10 12 13 14; do $(BIN)/mypy --python-version 3.$$minor -p trainer_hook || exit 1; done

format: $(VENV)/.trainer  ## rewrite the code in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.trainer  ## CPU, memory and time of transfers, beside peers and plain sockets (gcc, libssl-dev; peers: make bench-peers)
	$(BIN)/python -m benchmarks.transfer --work big,small --mib 512 --rounds 3 $(BENCH_ARGS)

bench-scale: $(VENV)/.trainer  ## requests, bytes, seconds and dollars of a commit by 1 to 10,000 nodes (simulated, two minutes)
	$(BIN)/python -m benchmarks.scale $(BENCH_ARGS)

bench-growth: $(VENV)/.trainer  ## start, resume decision, and cost of a commit with 5,000 checkpoints in the store (BENCH_ARGS='--store rgw --checkpoints 0,50000')
	$(BIN)/python -m benchmarks.growth $(BENCH_ARGS)

bench-all: $(VENV)/.trainer bench-peers  ## bench with TLS, Ceph RGW and a shaped link (root), and the slowdown of training beside uploads
	$(BIN)/python -m benchmarks.transfer --store sink,sink-tls,rgw,link --work big,four,small,hf $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.neighbour

bench-stall: $(VENV)/.trainer  ## how long a save stops training: blocking, CKPT_ASYNC=1, torch's async_save (CUDA where there is one)
	$(BIN)/python -m benchmarks.stall $(BENCH_ARGS)

bench-start: $(VENV)/.trainer  ## CPU time, wall time and memory of a start, beside the imports of its libraries (gcc, libssl-dev)
	$(BIN)/python -m benchmarks.start $(BENCH_ARGS)

bench-sigterm: $(VENV)/.trainer bench-peers  ## seconds from SIGTERM to durable beside the Kubeflow SDK's scheme, over a shaped link (root)
	$(BIN)/python -m benchmarks.sigterm $(BENCH_ARGS)

bench-preemption: $(VENV)/.trainer  ## time line of a preemption, with and without the sidecar, on the cluster of KUBECONFIG
	$(BIN)/python -m benchmarks.preemption $(BENCH_ARGS)

bench-hook: $(VENV)/.trainer  ## cost of the hook for a training script: per step, per interpreter
	$(BIN)/python -m benchmarks.hook_overhead $(BENCH_ARGS)
	$(BIN)/python -m torch.distributed.run --nproc_per_node=2 -m benchmarks.rank_consensus

bench-webhook: $(VENV)/.trainer  ## how long an API server waits for the webhook when 500 pods are created at once (openssl)
	$(BIN)/python -m benchmarks.webhook $(BENCH_ARGS)

docs: .venv-docs/.installed  ## the documentation as a site in build/site; fails on a link or an anchor that is not there
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --quiet $(DOCS_ARGS)

reference: $(VENV)/.trainer  ## write the pages that are made of the code: settings, commands, API, metrics, annotations, exit codes
	$(BIN)/python -m docs_site.reference

plots: $(VENV)/.trainer  ## draw docs/images/demo.svg from benchmarks/results/demo.json
	$(BIN)/python -m benchmarks.plots

screenshot: $(VENV)/.trainer  ## take docs/images/page.png anew: the live page beside a real sidecar and training (chromium; a minute)
	$(BIN)/python -m docs_site.screenshot

.venv-docs/.installed: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python .ci/install -c constraints.txt mkdocs-material
	@touch $@

bench-peers: .venv-peers/.installed  ## install the peers

# torch first and alone, as below.
.venv-peers/.installed: benchmarks/peers.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python .ci/install -c constraints.txt torch
	.venv-peers/bin/python .ci/install -r benchmarks/peers.txt
	@touch $@

# In a folder of its own, for its own tests: where it is installed, accelerate imports it into every process.
.deepspeed/.installed: $(VENV)/.trainer
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target .deepspeed \
		deepspeed einops hjson msgpack ninja psutil py-cpuinfo
	@touch $@

# What makes a release, apart from the tests' environment: with hashes, and without anything that is compiled here.
.tools/.installed: requirements-tools.lock
	$(PYTHON) -m venv .tools
	$(TOOLS)/python -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r requirements-tools.lock
	@touch $@

.venv-$(OLDEST)/.installed: constraints-$(OLDEST).txt pyproject.toml .tools/.installed
	$(PYTHON) -m venv .venv-$(OLDEST)
	$(TOOLS)/uv pip install --quiet --python .venv-$(OLDEST)/bin/python -c constraints-$(OLDEST).txt \
		-e '.[sidecar,transformers,torch,accelerate,lightning]' datasets httpx hypothesis ipykernel jupyter-client 'moto[server,s3]' \
		peft pytest pytest-asyncio pytest-timeout pytest-xdist pytorch-lightning torchdata
	@touch $@

clean:  ## remove the virtual environments and the demo's files
	rm -rf $(VENV) .python .venv-docs .venv-oldest .venv-transformers-4 .venv-other .venv-peers .deepspeed .demo .tools .sbom dist build

# What `make demo` needs, in a third of the time. torch first and alone: the newest release otherwise brings gigabytes of CUDA to a
# machine that only runs on its CPU. PyTorch's own index has a build without CUDA.
$(VENV)/.demo: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'no Python 3.11 or newer was found: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --cpu torch
	$(INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.trainer: $(VENV)/.demo
	$(INSTALL) -e '.[demo,dev]'
	@touch $@
