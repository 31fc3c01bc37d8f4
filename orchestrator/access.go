package main

import (
	"path/filepath"
	"slices"
	"strings"

	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/dispatch"
	"berth/orchestrator/internal/gateway"
	"berth/orchestrator/internal/senders"
	"berth/orchestrator/internal/turn"
	"berth/orchestrator/internal/workspace"
)

// defaultSenders is the sender allowlist that holds if it is there, below the
// home folder.
const defaultSenders = ".config/berth/sender-allowlist.json"

// guests puts the sender allowlist into dispatch's words.
type guests struct {
	*senders.List
	aliases func(sender string) []string // other addresses of the same person; may be nil
	log     *zap.Logger
}

var _ dispatch.Senders = guests{}

// senderList returns where the sender allowlist of these settings is.
func senderList(cfg Config, tree *workspace.Tree) senders.Options {
	file, named := cfg.SenderAllowlist, cfg.SenderAllowlist != ""
	if !named && cfg.Home != "" {
		file = filepath.Join(cfg.Home, defaultSenders)
	}
	return senders.Options{File: file, Kept: filepath.Join(tree.StoreDir(), "sender-allowlist.json"), Required: named}
}

func (s guests) Admit(g berth.Group, m berth.Message) (store, wake bool) {
	if strings.HasPrefix(m.Sender, operator) {
		return true, true
	}
	var aliases []string
	if s.aliases != nil {
		aliases = s.aliases(m.Sender)
	}
	v := s.Decide(g.JID, g.Folder, m.Sender, aliases...)
	if v != senders.Allowed && s.LogDenied() {
		s.log.Info("sender is not on the list", zap.String("group", g.Folder), zap.String("sender", m.Sender), zap.Stringer("verdict", v))
	}
	return v != senders.Drop, v == senders.Allowed
}

func (s guests) Answer(m berth.Message) string {
	if !s.AnswerOnce(m.ChatJID, m.Sender) {
		return ""
	}
	return senders.Answer
}

// doors puts the gateway into turn's words.
type doors struct {
	*gateway.Gateway
	egress []string // of every group
	budget gateway.Budget
}

var _ turn.Gateway = doors{}

// newDoors returns the gateway of these settings.
func newDoors(cfg Config, tree *workspace.Tree, store gateway.Store, log *zap.Logger) (doors, error) {
	g, err := gateway.New(gateway.Config{
		Dir: tree.GatewayDir(), UID: tree.UID(), GID: tree.GID(), Location: cfg.Timezone,
		Anthropic: gateway.Anthropic{BaseURL: cfg.AnthropicBaseURL, APIKey: cfg.AnthropicAPIKey.Reveal, OAuthToken: cfg.ClaudeCodeOAuthToken.Reveal},
		OpenAI:    gateway.OpenAI{BaseURL: cfg.OpenAIBaseURL, APIKey: cfg.OpenAIAPIKey.Reveal},
		Gemini:    gateway.Gemini{BaseURL: cfg.GeminiBaseURL, APIKey: cfg.GeminiAPIKey.Reveal},
	}, store, log)
	return doors{g, cfg.Egress, cfg.Budget}, err
}

func (d doors) Open(run berth.Run, g berth.Group) (turn.Door, error) {
	door, err := d.Gateway.Open(gateway.Run{
		ID: run.ID, Folder: g.Folder, Egress: slices.Concat(d.egress, g.Container.Egress), Budget: d.budget,
	})
	if err != nil {
		return nil, err
	}
	return door, nil
}
