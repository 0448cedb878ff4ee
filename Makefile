# Everything a newcomer or CI needs; `make` lists it. Nothing has to be installed by hand.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
LINT := packages/drumline-lint
# Without bytecode files every rank would start slowly.
unexport PYTHONDONTWRITEBYTECODE

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: .venv/ready ## make .venv with drumline and its tools

# What a run needs, and no more.
.venv/run: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/ready: .venv/run $(LINT)/pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable $(LINT) --editable '.[dev]'
	# A folder of its own: its schema is all that tests use, and its other dependencies contradict ours.
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv/schemas aws-parallelcluster==3.16.1 marshmallow==3.26.2 tabulate==0.9.0
	touch $@

demo: .venv/run ## train MiniResNet on two ranks over the bundled digits
	$(BIN)/drumline train digits --procs 2 --run runs/demo --fresh

check: .venv/ready ## style, types and import order
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

quick: check ## style, types and unit tests: what to run before a commit
	$(BIN)/python -m pytest --quiet --numprocesses 4 --dist worksteal -m "not slow and not soak" tests/unit

docs: .venv/ready ## the documentation as a site in build/site; a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

metrics: .venv/ready ## the tables of docs/metrics.md, the dashboard and the alert rules, from the metrics' declarations
	$(BIN)/python -m tests.metrics_pages

tools: ## install what tests/multinode and the browser tests need with apt, where that is allowed
	@tests/multinode/install.sh

test: .venv/ready ## everything that must pass before a change lands
	$(MAKE) --jobs 2 --output-sync check docs tools
	$(BIN)/python -m pytest --numprocesses 6 --dist worksteal

test-newest: tools ## the test suite with the newest torch that pip finds, in a separate venv
	$(PYTHON) -m venv .venv-newest
	grep -v '^torch==' constraints.txt > .venv-newest/constraints.txt
	.venv-newest/bin/pip install --quiet --upgrade --constraint .venv-newest/constraints.txt --editable $(LINT) --editable '.[dev]' torch
	.venv-newest/bin/python -m pytest --numprocesses 4 --dist worksteal $(TESTS)

size: ## how large and how dense the code is, by part
	$(PYTHON) -m benchmarks.size

modules: .venv/run ## which modules one batch passes, from the command to the first optimizer.step
	$(BIN)/python -m benchmarks.modules_on_the_way

bench: .venv/ready ## compare the engine with everything on with a hand-written loop, on the CPU
	$(BIN)/python -m benchmarks cpu --device cpu

bench-gpu: .venv/ready ## compare steps, images and tokens on one GPU with Lightning, Fabric and Accelerate; and saves
	$(BIN)/python -m benchmarks step images resnet gpt save --limit 480

bench-data: .venv/ready ## what a batch costs on its way from workers to the training process
	$(BIN)/python -m benchmarks loading --device cpu

compare: .venv/ready ## five jobs in Lightning, Accelerate, HF Trainer and Drumline on two ranks: the tables of docs/compare.md
	$(BIN)/pip install --quiet --constraint constraints.txt --editable $(LINT) --editable ".[bench]"
	$(BIN)/python examples/compare/run.py

bench-exact: .venv/ready ## what exactness costs: the elastic step, the sample ledger, comparing replicas
	$(BIN)/python -m benchmarks elastic --device cpu
	$(BIN)/python -m benchmarks.ledger
	$(BIN)/python -m benchmarks.replicas

bench-doctor: .venv/ready ## how long the doctor plans and reports for 256 hosts
	$(BIN)/python -m benchmarks.doctor_scale

bench-preflight: .venv/ready ## what comparing ranks before the first step costs
	$(BIN)/python -m benchmarks.preflight

bench-watch: .venv/ready ## what the watchdog costs: a heartbeat, the heartbeats of a step, a run with it and without it, scrapes of /metrics
	$(BIN)/python -m benchmarks.heartbeats
	$(BIN)/python -m benchmarks.script_steps
	$(BIN)/python -m benchmarks.metrics_scrapes

bench-comm: .venv/ready tools ## what --dist.comm does to bytes, time and loss on links of 25 and 100 Mbit/s
	$(BIN)/python -m benchmarks.comm_hooks

bench-balance: .venv/ready ## what --data.balance auto brings with one of two ranks at half speed
	$(BIN)/python -m benchmarks.uneven_ranks

bench-sync: .venv/ready tools ## what --dist.sync does to bytes, steps a second and loss on links of 10 and 100 Mbit/s
	$(BIN)/python -m benchmarks.slow_links

bench-large: .venv/ready ## memory and time of a GPT that does not fit in ddp, in every mode, over 4 ranks on one large GPU
	$(BIN)/python -m benchmarks.large_gpt

bench-lost: .venv/ready ## a node is killed: steps lost and seconds paused where the others continue, and where all restart
	$(BIN)/python -m benchmarks.lost_nodes

bench-scale: .venv/ready tools ## how far predictions of steps are from steps over slow links between hosts: the table of docs/scaling.md
	$(BIN)/python -m benchmarks.scale_grid

bench-lint: .venv/ready ## how long the linter takes for 1,000 files, and to start, on one core
	$(BIN)/python -m benchmarks.lint_speed --parts

bench-profile: .venv/ready ## compare the overlap and idle time of a profile on GPUs (RUN=folder) with Holistic Trace Analysis
	$(BIN)/pip install --quiet --constraint constraints.txt --target build/hta HolisticTraceAnalysis
	PYTHONPATH=build/hta $(BIN)/python -m benchmarks.hta_agreement $(RUN)

bench-overhead: .venv/ready ## what profiling costs: profiled steps, and those after them, against the steps before
	$(BIN)/python -m benchmarks.profile_overhead

bench-planted: .venv/ready ## whether drumline profile names planted bottlenecks first, about 10 minutes
	$(BIN)/python -m benchmarks.planted_profile benchmarks/planted/open

soak: .venv/ready tools ## the tests that are too long for every change, about 4 minutes
	$(BIN)/python -m pytest --numprocesses 4 --dist worksteal --timeout 600 -m soak

soak-profile: .venv/ready tools ## profiles of jobs with a planted bottleneck: is it named first, do changes bring what was predicted
	$(BIN)/python -m tests.planted_soak --count 3

soak-exact: .venv/ready ## hundreds of random kills and resumes, compared bit for bit
	$(BIN)/python -m tests.schedules --count 300

soak-restarts: .venv/ready tools ## repeated restarts under gloo, on two hosts and on one; all must succeed
	$(BIN)/python -m tests.multinode.restarts --count 20

soak-faults: .venv/ready tools ## hundreds of faults on two hosts: which rank is named, how soon, how many steps are lost; compared with torchrun
	$(BIN)/python -m tests.multinode.faults --count 360 --plain 3

soak-storm: .venv/ready tools ## one launch with a fault every 40 s for 30 minutes, unattended: does it recover, how much time is spent training
	$(BIN)/python -m tests.multinode.storm

soak-detach: .venv/ready tools ## a hundred detached jobs with random deaths and reboots: do they end as they should, is anything left
	$(BIN)/python -m tests.multinode.detached_soak --count 100

soak-calm: .venv/ready tools ## 10,000 healthy steps with pauses of every kind: no false alarm
	$(BIN)/python -m tests.multinode.faults --false-alarms

soak-forks: .venv/ready ## thousands of DataLoader workers forked right after broadcasts: none may hang
	$(BIN)/python -m tests.forks --count 10000
	$(BIN)/python -m tests.forks --count 400 --press

soak-modes: .venv/ready ## every --dist.mode against ddp, killed in each, and resumed from each in every other
	$(BIN)/python -m pytest --quiet --timeout 1800 tests/sharded_soak.py

soak-replicas: .venv/ready ## nodes that are lost at every bad moment, while the others continue and they join again
	$(BIN)/python -m pytest --quiet --timeout 1800 tests/lost_nodes_soak.py

soak-hsdp: .venv/ready ## 200 starts of a healthy hsdp job on four ranks, beside busy processes; none may crash
	$(BIN)/python -m tests.hsdp_starts --count 200 --busy 4
	$(BIN)/python -m tests.hsdp_starts --count 40 --press

soak-starts: .venv/ready ## 12 healthy starts of two ranks beside busy processes; none may report a stall before its first step
	$(BIN)/python -m tests.crowded_starts --count 12 --busy 6

soak-mutants: .venv/ready ## checks of security taken away one by one in a copy of the tree: tests/attacks must notice each
	$(BIN)/python -m tests.attacks.mutants

soak-properties: .venv/ready ## every property test with 1,000 examples
	$(BIN)/python -m pytest --quiet --numprocesses 4 --dist worksteal --timeout 1800 --hypothesis-profile soak -m hypothesis

soak-demo: .venv/run ## run the demo to its end: does it reach its accuracy?
	$(BIN)/python -m tests.multiproc.test_train_built_ins

clean: ## remove what the targets above made
	rm -rf .venv .venv-newest runs build *.egg-info $(LINT)/build $(LINT)/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: help setup demo check quick docs tools test size bench bench-gpu bench-data compare bench-exact bench-doctor bench-preflight bench-watch bench-comm bench-balance bench-sync bench-lost bench-large bench-scale bench-lint bench-profile bench-overhead bench-planted soak-profile soak-exact soak-modes soak-replicas soak-hsdp soak-starts soak-mutants soak-properties soak-demo soak-restarts soak-faults soak-storm soak-detach soak-calm soak-forks test-newest modules clean
