# Everything runs in .venv; a second run of any target installs nothing. `make` alone lists the targets.

PYTHON ?= python3
BIN := .venv/bin
# Named by content, not by time: a checkout that touches files without changing them reinstalls nothing.
STAMP := .venv/.lakehead-$(shell cat requirements/dev.lock pyproject.toml | cksum | cut -d' ' -f1)
# Options for the command a target ends in: make demo ARGS="--help", make lock ARGS=--upgrade
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup java class-archive postgres proxy browser demo test check bench lock clean crash soak sim sim-long fuzz mutants mutants-auto

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## create .venv and install from requirements/dev.lock

$(STAMP): requirements/dev.lock pyproject.toml
	@scripts/setup.sh "$(PYTHON)" "$@"

java: ; @scripts/ensure-java.sh

postgres: ; @scripts/ensure-postgres.sh

proxy: ; @scripts/ensure-nginx.sh

browser: ; @scripts/ensure-browser.sh

demo: $(STAMP) java  ## run the demo on real data (about two minutes)
	$(BIN)/lakehead demo $(ARGS)

.PHONY: shop
shop: $(STAMP) java  ## run the example shop: Spark through all layers, a live page (a minute or two; ARGS="--page 8080")
	$(BIN)/python -m examples.shop $(ARGS)

# The tests start many JVMs, and go without where it cannot be made.
class-archive: $(STAMP) java ; @$(BIN)/lakehead warm-spark .venv || true

test: $(STAMP) class-archive postgres proxy browser  ## run every test
	$(BIN)/python -m pytest -q -n 3 --dist loadgroup --durations=60 $(ARGS)

crash: $(STAMP) java  ## kill real processes at every named point, check the data (SEED=n; the better part of an hour)
	$(BIN)/python -m tests.crash $(if $(SEED),--seed $(SEED)) $(ARGS)

soak: $(STAMP) java  ## mixed load with kills, every process watched (MINUTES=60, SEED=n)
	$(BIN)/python -m tests.crash.soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(ARGS)

sim: $(STAMP)  ## simulate a whole deployment with faults from one seed (SEED=n)
	@$(BIN)/python -m tests.simulation $(or $(SEED),0)

sim-long: $(STAMP)  ## thousands of seeds on all cores, until one fails (SEED=first, SEEDS=how many)
	@$(BIN)/python -m tests.simulation $(or $(SEED),0) --seeds $(or $(SEEDS),5000)

fuzz: $(STAMP)  ## ask log, lake and DuckDB the same (SEED=first, CASES=how many or MINUTES=n)
	@$(BIN)/python -m tests.properties.predicate_fuzz $(SEED) $(if $(CASES),--cases $(CASES)) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

.PHONY: attack
attack: $(STAMP)  ## play the attacks that must be refused (part of make test, but for one that may take minutes)
	LAKEHEAD_EVERY_WAY=1 $(BIN)/python -m pytest -q tests/attack $(ARGS)

.PHONY: attack-fuzz
attack-fuzz: $(STAMP)  ## damaged messages to a server and its clients (SEED=first, CASES=how many of each kind; an hour)
	@$(BIN)/python -m tests.attack.wire_fuzz $(if $(SEED),--seed $(SEED)) $(if $(CASES),--cases $(CASES)) $(ARGS)

.PHONY: tls-cost
tls-cost: $(STAMP)  ## what TLS costs, through Lakehead and bare Flight (a minute; ARGS="--rounds 100")
	@$(BIN)/python -m tests.tls_cost $(ARGS)

.PHONY: audit sbom
audit: $(STAMP)  ## look for known vulnerabilities in what the lock installs (ADVISORIES=all.zip of OSV)
	@$(BIN)/python -m scripts.audit $(if $(ADVISORIES),--advisories $(ADVISORIES)) $(ARGS)

sbom: $(STAMP)  ## write what the wheel brings with it as CycloneDX (dist/lakehead-<version>.cdx.json)
	@$(BIN)/python -m scripts.sbom $(ARGS)

check: $(STAMP)  ## lint, format, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports --no-logo

mutants: $(STAMP) postgres  ## break central lines one at a time, see that tests notice
	$(BIN)/python -m tests.mutation $(ARGS)

.PHONY: fuzz-spark
fuzz-spark: $(STAMP) java  ## ask Spark the same of log, union and lake, local and cluster (CASES=how many)
	LAKEHEAD_SPARK_CASES=$(or $(CASES),10) LAKEHEAD_SPARK_CONDITIONS=40 \
		$(BIN)/python -m pytest -q tests/properties/test_spark_predicates.py --timeout 3600 $(ARGS)

.PHONY: cluster
cluster: $(STAMP) java  ## submit an application to Spark clusters in every way of the guide (some minutes)
	LAKEHEAD_EVERY_WAY=1 $(BIN)/python -m pytest -q tests/integration/test_spark_clusters.py $(ARGS)

.PHONY: spark41
# The clusters of test_spark_clusters.py have the PySpark of .venv alone.
SPARK_TESTS := tests/unit/spark tests/attack/test_spark.py \
	$(filter-out %/test_spark_clusters.py,$(wildcard tests/integration/test_spark_*.py)) \
	tests/properties/test_spark_predicates.py tests/properties/test_change_feed.py
spark41: $(STAMP) java  ## run Spark's tests with PySpark 4.1 (half an hour; SPARK_TESTS="some of them")
	@scripts/ensure-spark41.sh
	PYTHONPATH=$(CURDIR)/.venv/spark41$(if $(PYTHONPATH),:$(PYTHONPATH)) \
		$(BIN)/python -m pytest -q --timeout 600 $(SPARK_TESTS) $(ARGS)

mutants-auto: $(STAMP)  ## break lines at random, count what tests notice (ARGS="log --count 50 --seed 2"; hours)
	$(BIN)/python -m tests.mutation.auto $(ARGS)

bench: $(STAMP) java  ## measure throughput and latency on this machine (PEERS=1: beside RocksDB and Redis, too)
	$(if $(PEERS),@scripts/ensure-peers.sh)
	$(BIN)/python -m benchmarks $(ARGS)

.PHONY: tpch
tpch: $(STAMP) java  ## the 22 queries of TPC-H, half hot, beside plain files (SCALE=0.1, ARGS=--spark)
	$(BIN)/python -m tests.tpch $(if $(SCALE),--scale $(SCALE)) $(ARGS)

.PHONY: bench-quick bench-page
QUICK := --rows 200000 --only embedded --only loopback --only smallwrites --only lake --only growth
bench-quick: $(STAMP)  ## measure for three minutes, tell which ratios moved since benchmarks/results/quick.json
	$(BIN)/python -m benchmarks $(QUICK) --compare benchmarks/results/quick.json $(ARGS)

.PHONY: paths
paths: $(STAMP)  ## measure where a call's time goes, save benchmarks/results/paths.json (two minutes)
	$(BIN)/python -m benchmarks --only paths --save benchmarks/results/paths.json $(ARGS)

bench-page: $(STAMP)  ## write the pages docs/benchmarks.md and docs/performance.md from benchmarks/results
	@$(BIN)/python -m scripts.benchmark_page

lock: $(STAMP)  ## resolve requirements/dev.in again into dev.lock
	$(BIN)/uv pip compile requirements/dev.in --output-file requirements/dev.lock --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" --quiet $(ARGS)
	$(BIN)/uv pip compile requirements/peers.in --output-file requirements/peers.lock --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" --quiet $(ARGS)
	$(BIN)/uv pip compile requirements/spark41.in --output-file requirements/spark41.lock --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" --quiet --no-deps $(ARGS)

clean:  ## remove caches, builds and what the demo left; keeps .venv
	rm -rf build dist lakehead-demo spark-warehouse metastore_db derby.log artifacts
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
