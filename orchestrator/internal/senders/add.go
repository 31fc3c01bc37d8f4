package senders

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"unicode"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/listfile"
)

var errThere = errors.New("the sender counts already")

// Add puts a sender on the list in o.File: into the entry that decides about the
// chat, which belongs to the group of folder. there is true, and nothing is
// changed, if he counts there already. A list is never made: where none is,
// everybody counts, or the operator has to mend that. Other errors are of kind
// berth.Invalid.
func Add(o Options, chatJID, folder, sender string) (there bool, err error) {
	key := canonical(sender)
	if key == "" || key == "*" || len(key) > 256 || strings.ContainsFunc(key, unicode.IsControl) {
		return false, berth.Errorf(berth.Invalid, "%.80q is no sender", sender)
	}
	if _, err := os.Stat(o.File); errors.Is(err, os.ErrNotExist) {
		if New(o).Decide(chatJID, folder, sender) == Allowed {
			return true, nil
		}
		return false, berth.Errorf(berth.Invalid, "sender allowlist %s: it is not there: make it first", o.File)
	}
	err = listfile.Edit(o.File, func(data []byte) ([]byte, error) {
		l, err := parse(data)
		if err != nil {
			return nil, err
		}
		e, path := l.def, "/default"
		if name, ok := entryFor(data, chatJID, folder); ok {
			e, path = l.chats[canonical(name)], "/chats/"+strings.NewReplacer("~", "~0", "/", "~1").Replace(name)
		}
		if e.any || e.allow[key] {
			return nil, errThere
		}
		if e.allow == nil {
			return nil, errors.New("the entry for the chat has a fault: see berth status")
		}
		patch, err := json.Marshal([]map[string]string{{"op": "add", "path": path + "/allow/-", "value": key}})
		if err != nil {
			return nil, err
		}
		return listfile.Patch(data, patch)
	})
	if errors.Is(err, errThere) {
		return true, nil
	}
	if err != nil {
		return false, berth.Errorf(berth.Invalid, "sender allowlist %s: %w", o.File, err)
	}
	return false, nil
}

// entryFor returns the name, as the file spells it, of the entry that decides
// about a chat; ok is false if that is the default.
func entryFor(data []byte, chatJID, folder string) (name string, ok bool) {
	var file struct {
		Chats map[string]json.RawMessage `json:"chats"`
	}
	if err := json.Unmarshal(data, &file); err != nil {
		panic(fmt.Sprintf("a list that was just read: %v", err))
	}
	for _, want := range []string{canonical(chatJID), folder} {
		for name := range file.Chats {
			if want != "" && canonical(name) == want {
				return name, true
			}
		}
	}
	return "", false
}
