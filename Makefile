# tidegate: the commands a person needs. `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help run test bench lab fuzz soak deny advisories fmt build profile install uninstall clean

PREFIX  ?= /usr/local
DESTDIR ?=
# Seconds that `make fuzz` spends on each target.
FUZZ_SECONDS ?= 600
# Scenarios that `make lab` runs: names, a paper's short name, or all.
LAB ?= all
# Scenarios that `make bench` runs, by a part of their names; docs/benchmarks.md is written only when all are run.
BENCH ?=
# Rounds of `make soak`.
KILL_ROUNDS ?= 200
# Simulated Trickles transfers of `make soak`.
TRICKLES_RUNS ?= 100000

CARGO_TARGET_DIR ?= $(CURDIR)/target
export CARGO_TARGET_DIR
release := $(CARGO_TARGET_DIR)/release

# Counts of what servers do most, by which release builds are guided (docs/decisions/0025); GUIDED= builds without them, and so do
# RUSTFLAGS of your own. They fit a binary that is built by itself: beside others its dependencies have other features, and all
# symbols other names.
GUIDED ?= $(CURDIR)/packaging/tidegate.profdata
ifneq ($(GUIDED),)
ifeq ($(origin RUSTFLAGS),undefined)
# Flags are separated by 0x1F, so that a path may have spaces. Code that has changed since is no news to whoever builds.
separator := $(shell printf '\037')
run bench lab build: export CARGO_ENCODED_RUSTFLAGS := -Cprofile-use=$(GUIDED)$(separator)-Cllvm-args=-no-pgo-warn-mismatch
endif
endif

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: ## build (the first time some 5 to 15 minutes on two cores) and start tidegate on 127.0.0.1:8080 before a slow demo site
	@scripts/setup run
	@exec scripts/run

test: ## everything that must hold: format, lints, licences, all tests, cache suite
	@scripts/setup test
	@scripts/test

bench: ## ratios against nginx, haproxy, varnish and a bare epoll responder (two quiet cores, 25 minutes; installs them from Debian)
	@scripts/setup run
	cargo build --release --locked -p tidegate
	cargo build --release --locked -p tidegate-bench
	TIDEGATE_BIN=$(release)/tidegate $(release)/tidegate-bench $(if $(BENCH),--only "$(BENCH)" --out $(CARGO_TARGET_DIR)/benchmarks.md)

lab: ## run the papers' experiments again and write docs/papers (two quiet cores; LAB: which, a quarter of an hour for all)
	@scripts/setup lab
	cargo build --release --locked -p tidegate -p tidegate-preload
	cargo build --release --locked -p tidegate-lab -p tidegate-conditioning -p tidegate-cc
	@status=0; $(release)/tidegate-lab run $(LAB) --out $(CARGO_TARGET_DIR)/lab || status=$$?; \
	$(release)/tidegate-lab report --results $(CARGO_TARGET_DIR)/lab --pages docs/papers && exit $$status

fuzz: ## run every fuzz target for FUZZ_SECONDS (needs nightly and cargo-fuzz)
	@scripts/fuzz $(FUZZ_SECONDS)

soak: ## kill -9 under load KILL_ROUNDS times; TRICKLES_RUNS simulated transfers; Trickles beside TCP for long
	@scripts/setup test
	cargo build --locked --workspace --bins --tests
	TIDEGATE_KILL_ROUNDS=$(KILL_ROUNDS) cargo nextest run --locked -p tidegate-e2e --test kill --no-capture
	TRICKLES_RUNS=$(TRICKLES_RUNS) cargo nextest run --locked --release -p tidegate-trickles --test simulation every_
	TRICKLES_LONG=1 cargo nextest run --locked --release -p tidegate-trickles --test bottleneck flows_beside_

deny: ## licences, bans and sources of dependencies
	cargo deny --workspace check licenses bans sources

advisories: ## known vulnerabilities of dependencies (fetches the RustSec database)
	cargo deny --workspace check advisories

fmt: ## format the sources
	cargo fmt --all

build: ## build the release binary, the C libraries and the preload libraries (the first time some 5 to 15 minutes on two cores)
	@scripts/setup run
	@$(if $(GUIDED),scripts/profile --fits)
	@[ -x $(release)/tidegate ] || echo "building with optimization: the first time this takes some 5 to 15 minutes on two cores"
	cargo build --release --locked -p tidegate -p tidegate-preload
	cargo build --release --locked -p tidegate-conditioning -p tidegate-cc \
		-p tidegate-trickles-preload -p tidegate-trickles-c

profile: ## renew the profile that guides release builds, after larger changes (some ten minutes)
	@scripts/setup profile
	@scripts/profile

install: build ## install binary, libraries, manual pages, completions, unit and example (PREFIX, DESTDIR)
	@scripts/install "$(DESTDIR)" "$(PREFIX)" "$(release)/tidegate"

uninstall: ## remove what install put there, except the configuration
	@scripts/install --remove "$(DESTDIR)" "$(PREFIX)"

clean: ## remove what was built
	cargo clean
	rm -rf fuzz/target tests/cache-suite/node_modules
