package whatsapp

import (
	waLog "go.mau.fi/whatsmeow/util/log"
	"go.uber.org/zap"
)

// clientLog lets whatsmeow write through zap.
type clientLog struct{ *zap.SugaredLogger }

func wrap(l *zap.Logger) waLog.Logger { return clientLog{l.Sugar()} }

// Debugf drops what whatsmeow tells of every stanza: it holds the texts of
// messages.
func (clientLog) Debugf(string, ...any) {}

func (l clientLog) Sub(module string) waLog.Logger { return clientLog{l.Named(module)} }

// quiet is libsignal's logger.
type quiet struct{}

func (quiet) Debug(string, string)   {}
func (quiet) Info(string, string)    {}
func (quiet) Warning(string, string) {}
func (quiet) Error(string, string)   {}
func (quiet) Configure(string)       {}
