package protocol

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReadInput(t *testing.T) {
	got, err := ReadInput(strings.NewReader(`{"prompt":"hi","groupFolder":"main","isMain":true,"secrets":{"K":"v"},"later":1}` + "\n"))
	want := Input{Prompt: "hi", GroupFolder: "main", IsMain: true, Secrets: map[string]string{"K": "v"}}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	for name, text := range map[string]string{
		"empty": "", "cut": `{"prompt":`, "two": `{} {}`, "a list": `[]`, "wrong type": `{"prompt":1}`,
		"too big": `{"prompt":"` + strings.Repeat("x", MaxInput) + `"}`,
	} {
		if _, err := ReadInput(strings.NewReader(text)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestReadMessage(t *testing.T) {
	for text, want := range map[string]Message{
		`{"type":"message","text":"a","id":"1"}`: {Type: TypeMessage, Text: "a", ID: "1"},
		`{"type":"message","text":"a"}`:          {Type: TypeMessage, Text: "a"},
		`{"type":"sync"}`:                        {Type: TypeSync},
		`{"type":"stop","id":"a"}`:               {Type: TypeStop, ID: "a"},
	} {
		if got, err := ReadMessage(strings.NewReader(text)); err != nil || got != want {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "{", "[]", "{}", `{"type":"message"}`, `{"type":"x","text":"a"}`, `{"type":"message","text":1}`} {
		if m, err := ReadMessage(strings.NewReader(text)); err == nil {
			t.Errorf("%s: read %+v", text, m)
		}
	}
}

func TestInputNamesSortLikeTheirNumbers(t *testing.T) {
	last := ""
	for _, seq := range []int64{0, 1, 9, 10, 99, 1 << 40, 1<<63 - 1} {
		name := InputName(seq)
		if name <= last || len(name) != InputNameWidth+len(".json") {
			t.Errorf("%s after %s", name, last)
		}
		last = name
	}
}

func TestValidSessionID(t *testing.T) {
	for id, want := range map[string]bool{
		"a": true, "A-b_c.9": true, strings.Repeat("x", MaxSessionID): true,
		"": false, "a/b": false, "../../evil": false, "a b": false, "a\n": false, "é": false, strings.Repeat("x", MaxSessionID+1): false,
	} {
		if got := ValidSessionID(id); got != want {
			t.Errorf("%q: %v", id, got)
		}
	}
}

func TestCanonical(t *testing.T) {
	for text, want := range map[string]bool{
		`{"type":"ready"}`:                    false,
		`{"type":"state","state":"idle"}`:     false,
		`{"status":"success"}`:                true,
		`{"status":"success","result":null}`:  true,
		`{"status":"success","result":""}`:    true,
		`{"status":"error","error":"broken"}`: true,
	} {
		var f Frame
		if err := json.Unmarshal([]byte(text), &f); err != nil {
			t.Fatal(err)
		}
		if got := f.Canonical(); got != want {
			t.Errorf("%s: %v", text, got)
		}
	}
}
