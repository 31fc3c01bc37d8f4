package listfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

type sample struct {
	Name string         `json:"name"`
	List []sample       `json:"list"`
	Map  map[string]any `json:"map"`
}

var sampleNames = map[string][]string{"": {"name", "list", "map"}, "list/*": {"name"}}

func TestDecode(t *testing.T) {
	for name, tt := range map[string]struct {
		text    string
		unknown []string
		want    string // in the error
	}{
		"good":            {`{"name": "a", "list": [{"name": "b"}], "map": {"any": 1, "thing": {}}}`, nil, ""},
		"unknown":         {"{\n\"x\": 1,\n\"list\": [{\"y\": {\"y\": 1}}]}", []string{`line 2: "x" means nothing here`, `line 3: "y" means nothing here`}, ""},
		"twice":           {"{\"name\": \"a\",\n\"NAME\": \"b\"}", nil, `line 2: "NAME" stands there twice`},
		"twice by a sign": {`{"list": [], "liſt": []}`, nil, "twice"},
		"twice inside":    {`{"map": {"a": {"b": 1, "b": 2}}}`, nil, "twice"},
		"wrong type":      {"{\n\n\"name\": 1}", nil, `line 3: "name" is a number: a string would be right`},
		"wrong whole":     {"[]", nil, "an object would be right"},
		"comment":         {"{} // no", nil, "line 1"},
		"comma":           {"{\n\"name\": \"a\",\n}", nil, "line 3"},
		"empty":           {" \n", nil, "empty"},
		"deep":            {strings.Repeat(`{"map":`, 1<<16), nil, "depth"},
	} {
		t.Run(name, func(t *testing.T) {
			var into sample
			unknown, err := Decode([]byte(tt.text), &into, sampleNames)
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
			if !slices.Equal(unknown, tt.unknown) && tt.want == "" {
				t.Errorf("got %q, want %q", unknown, tt.unknown)
			}
		})
	}
}

// Of editors at the same time none undoes the other's work, and a reader never
// sees half of it.
func TestEditsAtTheSameTime(t *testing.T) {
	file := filepath.Join(t.TempDir(), "dir", "list.json")
	const editors = 8
	var wg sync.WaitGroup
	for i := range editors {
		wg.Go(func() {
			err := Edit(file, func(data []byte) ([]byte, error) {
				if data == nil {
					data = []byte("[]")
				}
				return Patch(data, fmt.Appendf(nil, `[{"op": "add", "path": "/-", "value": %d}]`, i))
			})
			if err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			if data, err := Read(file); err == nil && !json.Valid(data) {
				t.Errorf("read %q", data)
			}
		})
	}
	wg.Wait()
	data, err := Read(file)
	var got []int
	if err != nil || json.Unmarshal(data, &got) != nil || len(got) != editors {
		t.Errorf("got %q, %v, want %d numbers", data, err, editors)
	}
}

func TestFailedEditLeavesTheFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "list.json")
	if err := os.WriteFile(file, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	no := errors.New("no")
	if err := Edit(file, func([]byte) ([]byte, error) { return nil, no }); !errors.Is(err, no) {
		t.Errorf("got %v, want %v", err, no)
	}
	if data, err := Read(file); err != nil || string(data) != "{}" {
		t.Errorf("got %q, %v", data, err)
	}
}

// FuzzDecode: what is taken has one meaning, and can be edited.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{`{}`, `{"name":"a","list":[{"name":"b","x":1}]}`, `{"name":1}`, `{"a":{"A":1,"a":2}}`, `[]`, `null`, `{"list":null}`, `{"map":{"\u0061":1,"a":2}}`, "{//\n}"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var into sample
		if _, err := Decode(data, &into, sampleNames); err != nil {
			return
		}
		if !json.Valid(data) {
			t.Fatalf("%q is taken", data)
		}
		if data = []byte(strings.TrimSpace(string(data))); data[0] != '{' {
			return
		}
		edited, err := Patch(data, []byte(`[{"op": "add", "path": "/name", "value": "edited"}]`))
		if err != nil {
			t.Fatalf("%q cannot be edited: %v", data, err)
		}
		want := into
		want.Name = "edited"
		var got sample
		if _, err := Decode(edited, &got, sampleNames); err != nil {
			if strings.Contains(err.Error(), "twice") {
				return // "Name" was there, and now "name" is
			}
			t.Fatalf("%q became %q: %v", data, edited, err)
		}
		if a, b := fmt.Sprint(got), fmt.Sprint(want); a != b {
			t.Errorf("%q became %q: got %s, want %s", data, edited, a, b)
		}
	})
}
