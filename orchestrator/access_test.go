package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"go.uber.org/zap/zaptest"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/senders"
)

// A list may name people by their numbers, while WhatsApp names them otherwise.
func TestSenderByAnotherAddress(t *testing.T) {
	file := filepath.Join(t.TempDir(), "senders.json")
	text := `{"default": {"allow": [], "mode": "drop"}, "chats": {"family": {"allow": ["4915112345678@s.whatsapp.net"], "mode": "trigger"}}}`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	list := senders.New(senders.Options{File: file, Kept: filepath.Join(t.TempDir(), "kept.json"), Required: true})
	if alarm := list.Alarm(); alarm != "" {
		t.Fatal(alarm)
	}
	s := guests{list, func(sender string) []string {
		if sender == "77@lid" {
			return []string{"4915112345678@s.whatsapp.net"}
		}
		return nil
	}, zaptest.NewLogger(t)}
	g := berth.Group{Folder: "family", JID: "1@g.us"}
	got := make([]bool, 0, 2)
	for _, sender := range []string{"77@lid", "78@lid"} {
		_, wake := s.Admit(g, berth.Message{ChatJID: g.JID, Sender: sender})
		got = append(got, wake)
	}
	if !slices.Equal(got, []bool{true, false}) {
		t.Errorf("counted: %v, want the one with the number only", got)
	}
}
