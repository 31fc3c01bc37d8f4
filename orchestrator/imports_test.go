package main

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// mayImport says which of our packages a package may import directly; none of
// them may be reached in a roundabout way either, since each row names all.
// Arrows point down: main, then dispatch and turn, then what decides, then the
// words. An adapter fills an interface that a package above states, so it may
// import that one package, and never another adapter.
var mayImport = map[string]string{
	// the words
	"orchestrator/internal/berth": "",
	"agent-runner/protocol":       "",
	"orchestrator/internal/bell":  "",
	"orchestrator/internal/crash": "",
	// what decides
	"orchestrator/internal/queue":     "",
	"orchestrator/internal/listfile":  "",
	"orchestrator/internal/mount":     "berth listfile",
	"orchestrator/internal/senders":   "berth listfile",
	"orchestrator/internal/workspace": "berth protocol",
	"orchestrator/internal/schedule":  "berth",
	"orchestrator/internal/memory":    "berth",
	"orchestrator/internal/pairing":   "berth",
	"orchestrator/internal/command":   "berth memory pairing",
	"orchestrator/internal/outbox":    "berth crash",
	"orchestrator/internal/dispatch":  "berth crash queue",
	"orchestrator/internal/turn":      "berth crash mount protocol queue workspace",
	// adapters
	"orchestrator/internal/sqlite":   "berth memory schedule", // a task's next run, and which memory is the same, are found in the transaction that writes
	"orchestrator/internal/docker":   "berth crash protocol turn",
	"orchestrator/internal/ipc":      "berth crash memory protocol turn workspace",
	"orchestrator/internal/console":  "bell berth",
	"orchestrator/internal/web":      "berth",
	"orchestrator/internal/gateway":  "berth",
	"orchestrator/internal/whatsapp": "berth waformat waid wamsg wastate",
	// what WhatsApp says, without a connection
	"orchestrator/internal/whatsapp/waformat": "",
	"orchestrator/internal/whatsapp/waid":     "berth",
	"orchestrator/internal/whatsapp/wamsg":    "berth waid",
	"orchestrator/internal/whatsapp/wastate":  "",
	// what the programs of make demo, soak, bench and attack share; no part of the daemon
	"orchestrator/internal/rig": "berth docker sqlite",
	// for tests only: no row above may name it
	"orchestrator/internal/watest":         "",
	"orchestrator/internal/watest/watestd": "watest",
}

// owners are the libraries that only these packages may import.
var owners = map[string]string{
	"github.com/docker/docker": "orchestrator/internal/docker",
	"modernc.org/sqlite":       "orchestrator/internal/sqlite orchestrator/internal/whatsapp", // each has a database
	"github.com/yuin/goldmark": "orchestrator/internal/whatsapp/waformat",
	"go.mau.fi/whatsmeow": "orchestrator/internal/whatsapp orchestrator/internal/whatsapp/waid orchestrator/internal/whatsapp/wamsg " +
		"orchestrator/internal/whatsapp/wastate orchestrator/internal/watest",
}

func TestImports(t *testing.T) {
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}}|{{join .Imports " "}}`, "berth/...").Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for line := range strings.Lines(string(out)) {
		path, list, _ := strings.Cut(strings.TrimSpace(line), "|")
		pkg := strings.TrimPrefix(path, "berth/")
		allowed, known := mayImport[pkg]
		if known {
			seen++
		} else if strings.HasPrefix(pkg, "orchestrator/internal/") {
			t.Errorf("%s is not in the table: say what it may import", pkg)
		}
		for _, imported := range strings.Fields(list) {
			if ours, ok := strings.CutPrefix(imported, "berth/"); ok {
				name := ours[strings.LastIndex(ours, "/")+1:]
				if known && !slices.Contains(strings.Fields(allowed), name) {
					t.Errorf("%s imports %s and may import only: %s", pkg, ours, allowed)
				}
				if pkg == "orchestrator" && ours == "orchestrator/internal/watest" {
					t.Errorf("%s imports %s, which is for tests only", pkg, ours)
				}
				if strings.HasPrefix(pkg, "agent-runner") && strings.HasPrefix(ours, "orchestrator") {
					t.Errorf("%s imports %s: the box must not know the host", pkg, ours)
				}
				continue
			}
			for library, owner := range owners {
				if (imported == library || strings.HasPrefix(imported, library+"/")) && !slices.Contains(strings.Fields(owner), pkg) {
					t.Errorf("%s imports %s, which is for these alone: %s", pkg, imported, owner)
				}
			}
			if (pkg == "orchestrator/internal/berth" || pkg == "agent-runner/protocol") && strings.Contains(imported, ".") {
				t.Errorf("%s imports %s and may import the standard library only", pkg, imported)
			}
		}
	}
	if seen != len(mayImport) {
		t.Errorf("%d packages of the table exist, want %d: remove what is gone", seen, len(mayImport))
	}
}
