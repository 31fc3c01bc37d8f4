# Two commands on a fresh machine: make run, make test.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

GO      ?= go
BIN     := $(CURDIR)/bin
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
BUILD   := CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w -X main.version=$(VERSION)'
PACKAGES = ./orchestrator/... ./agent-runner/...

.PHONY: help
help: ## list what can be made
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: run
run: engine build ## set everything up, start the daemon in the background, and chat with it
	@$(BIN)/berth run --detach --sample-groups
	@if [ -t 0 ] && [ -t 1 ]; then exec $(BIN)/berth chat main; fi; \
	echo; \
	echo 'Berth runs in the background, with the groups main, family and work. Talk to them:'; \
	echo '  bin/berth chat main                                 in a terminal; every message is answered'; \
	echo '  bin/berth send -g family --wait "@Andy hello"       one message, one answer'; \
	echo '  bin/berth status                                    what runs'; \
	echo '  bin/berth stop --daemon                             end it'

.PHONY: demo
demo: engine build ## play the uses of Berth with real containers and say what each step proves
	@$(GO) run ./orchestrator/demo -berth $(BIN)/berth

.PHONY: test
test: gvisor build check ## check, then all tests, with the race detector and a real engine
	$(GO) test -race -tags docker -timeout 9m $(PACKAGES)

ENGINES ?= $(HOME)/.cache/berth/engines
TABLES  ?= .

.PHONY: test-engines
test-engines: engine build ## real agent programs (2 GB, kept in ENGINES=~/.cache/berth/engines) against a fake provider; needs root
	agent-runner/internal/engine/enginetest/fetch.sh $(ENGINES)
	@command -v debootstrap >/dev/null || { apt-get update -qq && apt-get install -y -qq debootstrap; } >/dev/null
	@[ -x $(ENGINES)/rootfs/usr/local/bin/claude ] || { rm -rf $(ENGINES)/rootfs; container/make-rootfs.sh $(ENGINES)/rootfs \
		$(ENGINES)/node_modules/opencode-linux-x64/bin/opencode $(ENGINES)/node_modules/@anthropic-ai/claude-code-linux-x64/claude; }
	BERTH_ENGINES_ROOTFS=$(ENGINES)/rootfs $(GO) test -race -tags docker,engines -timeout 20m -run 'TestRealEngines' ./orchestrator
	BERTH_ENGINES=$(ENGINES) $(GO) test -tags engines -timeout 40m -run '$(TABLES)' ./agent-runner/internal/engine/enginetest

.PHONY: check
check: ## formatting, vet, staticcheck, import directions
	@unformatted=$$(gofmt -l orchestrator agent-runner); if [ -n "$$unformatted" ]; then echo "gofmt would change: $$unformatted"; exit 1; fi
	$(GO) vet -tags docker,crash,engines $(PACKAGES)
	$(GO) tool staticcheck -tags docker $(PACKAGES)
	$(GO) test -run TestImports ./orchestrator

.PHONY: vuln
vuln: ## known vulnerabilities (needs the network)
	$(GO) tool govulncheck -tags docker $(PACKAGES)

.PHONY: crash
crash: engine ## kill the daemon at each step of a message, 5 times each, and count what is lost or doubled
	$(GO) test -tags docker,crash -count 1 -timeout 30m -v -run 'TestCrash(Tasks|Requests|SilentTasks)?$$' ./orchestrator -args -times $(or $(TIMES),5) | grep -v '_test.go:.*daemon:'

.PHONY: soak
soak: engine build ## a storm of kills on a hundred groups for MINUTES=20, with an auditor; writes docs/reliability.md
	$(GO) run ./orchestrator/soak -berth $(BIN)/berth -minutes $(or $(MINUTES),20) -out docs/reliability.md

.PHONY: attack
attack: engine build ## let one group attack the host and the others for SECONDS=40, and judge what came of each attack
	$(GO) run ./orchestrator/attack -berth $(BIN)/berth -seconds $(or $(SECONDS),40)

.PHONY: fuzz
fuzz: ## fuzz everything that strangers write, SECONDS=60 each
	@for pkg in $$($(GO) list $(PACKAGES)); do \
		for name in $$($(GO) test -list '^Fuzz' $$pkg | grep ^Fuzz); do \
			echo "$$pkg $$name"; \
			out=$$($(GO) test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(or $(SECONDS),60)s -fuzzminimizetime 100x $$pkg 2>&1) || { echo "$$out"; exit 1; }; \
			echo "$$out" | tail -n 2; \
		done; \
	done

.PHONY: bench
bench: engine build ## measure Berth beside the bare floor and write docs/benchmarks.md
	$(GO) run ./orchestrator/bench -berth $(BIN)/berth -out docs/benchmarks.md -rootfs "$(wildcard $(ENGINES)/rootfs)"

.PHONY: build
build: ## build bin/berth and bin/agent-runner
	@mkdir -p $(BIN)
	$(BUILD) -o $(BIN)/berth ./orchestrator
	$(BUILD) -o $(BIN)/agent-runner ./agent-runner

.PHONY: image
image: engine build ## build the agent image
	$(BIN)/berth image build

.PHONY: engine
engine:
	@docker/ensure-engine.sh

.PHONY: gvisor
gvisor:
	@docker/ensure-engine.sh --runsc

.PHONY: clean
clean: ## remove what was built; live data stays
	rm -rf $(BIN)
