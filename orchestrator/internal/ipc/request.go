package ipc

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"berth/orchestrator/internal/berth"
)

// request is what one file asks for.
type request struct {
	verb   string
	id     string // under which the answer is looked for; may be empty
	key    string // idempotency key
	fields map[string]json.RawMessage

	// What the operator is told of a refusal.
	target string
	secret error // what the container is not told; may be nil
}

// tolerated are fields that the ancestors' containers send with each request.
// They are not even looked at: the folder says who asks, and the host's clock
// when.
var tolerated = []string{"groupFolder", "isMain", "createdBy", "timestamp"}

// parse reads a file. Its error means that there is nobody to answer.
func parse(data []byte) (r request, err error) {
	if err := json.Unmarshal(data, &r.fields); err != nil {
		return r, fmt.Errorf("not a JSON object: %w", err)
	}
	if r.fields == nil {
		return r, errors.New("not a JSON object, but null")
	}
	if id, err := r.text("requestId"); err == nil && isID(id) {
		r.id = id
	}
	return r, nil
}

// what names the request in the audit.
func (r *request) what() string {
	if r.verb == "" {
		return "ipc.unknown"
	}
	return "ipc." + r.verb
}

// kind is the JSON type of a field.
type kind int

const (
	aText kind = iota
	aBool
	anything
)

// schema is what a verb takes besides type, requestId and what is tolerated.
type schema struct {
	required []string // texts that are not blank
	optional map[string]kind
}

// check returns why the fields do not fit, or nil.
func (r *request) check(s schema) error {
	if id, err := r.text("requestId"); err != nil {
		return err
	} else if id != r.id {
		return berth.Errorf(berth.Invalid, "requestId is not 1 to 64 letters, digits, - or _")
	}
	for _, name := range slices.Sorted(maps.Keys(r.fields)) {
		kind, known := s.optional[name]
		switch {
		case name == "type", name == "requestId", slices.Contains(tolerated, name):
		case slices.Contains(s.required, name), known && kind == aText:
			if _, err := r.text(name); err != nil {
				return err
			}
		case known && kind == aBool:
			if _, err := r.flag(name); err != nil {
				return err
			}
		case !known:
			return berth.Errorf(berth.Invalid, "%s has no field %.40q: leave it out", r.verb, name)
		}
	}
	for _, name := range s.required {
		if text, _ := r.text(name); strings.TrimSpace(text) == "" {
			return berth.Errorf(berth.Invalid, "%s needs the field %s, and it is missing or empty", r.verb, name)
		}
	}
	return nil
}

// has reports whether a field is given. null counts as not given.
func (r *request) has(name string) bool {
	value, ok := r.fields[name]
	return ok && !bytes.Equal(value, []byte("null"))
}

// text returns a text field, or "" if it is not given.
func (r *request) text(name string) (text string, err error) {
	if !r.has(name) {
		return "", nil
	}
	if json.Unmarshal(r.fields[name], &text) != nil {
		return "", berth.Errorf(berth.Invalid, "the field %s has to be a text", name)
	}
	if len(text) > berth.MaxText {
		return "", berth.Errorf(berth.Invalid, "the field %s has %d bytes and may have %d", name, len(text), berth.MaxText)
	}
	if strings.ContainsRune(text, 0) {
		return "", berth.Errorf(berth.Invalid, "the field %s holds a zero byte", name)
	}
	return text, nil
}

// get is text for a field that was checked.
func (r *request) get(name string) string {
	text, _ := r.text(name)
	return text
}

// optional returns a text field that was checked, or nil if it is not given.
func (r *request) optional(name string) *string {
	if !r.has(name) {
		return nil
	}
	return new(r.get(name))
}

// flag returns a boolean field, or nil if it is not given.
func (r *request) flag(name string) (*bool, error) {
	if !r.has(name) {
		return nil, nil
	}
	var value bool
	if json.Unmarshal(r.fields[name], &value) != nil {
		return nil, berth.Errorf(berth.Invalid, "the field %s has to be true or false", name)
	}
	return &value, nil
}

// isID reports whether a container's id may be a file name, and a key.
func isID(id string) bool {
	const allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
	return id != "" && len(id) <= 64 && strings.Trim(id, allowed) == ""
}
