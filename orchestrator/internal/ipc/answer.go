package ipc

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"go.uber.org/zap"

	"berth/agent-runner/protocol"
)

// Bounds of what lies there.
const (
	maxAnswers     = 1000
	maxAnswerBytes = 16 << 20
	maxQuarantined = 100      // files a group
	maxKept        = 64 << 10 // bytes of each
)

// answered is an answer that lies there for the container to read.
type answered struct {
	name string
	size int
}

// answer tells the container what became of its request, if it gave an id to
// know the answer by.
func (b *inbox) answer(id string, result any, err error) {
	if id == "" {
		return
	}
	reply := struct {
		OK     bool   `json:"ok"`
		Error  string `json:"error,omitempty"`
		Result any    `json:"result,omitempty"`
	}{OK: err == nil, Result: result}
	if err != nil {
		reply.Error, reply.Result = err.Error(), nil
	}
	name := id + ".json"
	data, err := protocol.Marshal(reply)
	if err == nil {
		err = b.files.WriteResponse(name, data)
	}
	if err != nil {
		b.log.Warn("answer a request", zap.Error(err))
		return
	}
	// An id may be used again.
	b.answers = slices.DeleteFunc(b.answers, func(a answered) bool {
		if a.name == name {
			b.size -= a.size
		}
		return a.name == name
	})
	b.answers = append(b.answers, answered{name, len(data)})
	for b.size += len(data); len(b.answers) > maxAnswers || b.size > maxAnswerBytes && len(b.answers) > 1; {
		oldest := b.answers[0]
		// The next run has removed those of the one before.
		if err := b.files.RemoveResponse(oldest.name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			b.log.Warn("remove an old answer", zap.Error(err))
		}
		b.answers, b.size = b.answers[1:], b.size-oldest.size
	}
}

// quarantine keeps the beginning of a file that cannot be used, with the reason
// beside it.
func (b *inbox) quarantine(name string, data []byte, reason error) {
	dir := filepath.Join(b.ErrorDir, b.group.Folder)
	err := os.MkdirAll(dir, 0o700)
	var old []os.DirEntry
	if err == nil {
		old, err = os.ReadDir(dir)
	}
	if err == nil && len(old) >= 2*maxQuarantined { // a file and its reason
		return
	}
	why := reason.Error()
	if len(data) > maxKept {
		data, why = data[:maxKept], fmt.Sprintf("%s (its first %d bytes are kept)", why, maxKept)
	}
	if err == nil {
		err = errors.Join(
			os.WriteFile(filepath.Join(dir, name), data, 0o600),
			os.WriteFile(filepath.Join(dir, name+".reason"), []byte(why+"\n"), 0o600),
		)
	}
	if err != nil {
		b.log.Warn("quarantine a request", zap.Error(err))
	}
}
