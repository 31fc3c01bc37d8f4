package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestClean(t *testing.T) {
	tests := map[string]string{
		"plain\tänd\n小爪 🤖":                "plain\tänd\n小爪 🤖",
		"\x1b[31mred\x1b[0m":              "[31mred[0m",
		"\x1b]0;title\x07x":               "]0;titlex",
		"\x1b]52;c;aGk=\x1b\\":            "]52;c;aGk=\\",
		"a\rb\bc\x7fd\x00e":               "abcde",
		"\u009b2Jx\u0085y":                "2Jxy",
		"\x9b2J\xff":                      "\ufffd2J\ufffd",
		"user\u202etxt.exe\u2066\u2069":   "usertxt.exe",
		"\u200emark\u200f\u061c\u2028end": "markend",
	}
	for in, want := range tests {
		if got := clean(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
	if got, want := cleanLine(" a\n\x1bb\t c "), "a b c"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func FuzzClean(f *testing.F) {
	f.Add([]byte("\x1b[2J小爪\r\n\xc2"), 3)
	f.Add([]byte("\u202e\u009b\xe2\x80"), 1)
	f.Fuzz(func(t *testing.T, data []byte, cut int) {
		want := clean(string(data))
		if !utf8.ValidString(want) || strings.ContainsFunc(want, hostile) || clean(want) != want {
			t.Errorf("%q: got %q", data, want)
		}
		// Written in two pieces it is the same, up to a rune that never ended.
		var out bytes.Buffer
		w := &cleanWriter{w: &out}
		if len(data) > 0 {
			cut = min(max(cut, -cut, 0), len(data))
		} else {
			cut = 0
		}
		for _, piece := range [][]byte{data[:cut], data[cut:]} {
			if n, err := w.Write(piece); n != len(piece) || err != nil {
				t.Fatalf("got %d, %v", n, err)
			}
		}
		if got := out.String() + clean(string(w.rest)); got != want {
			t.Errorf("%q cut at %d: got %q, want %q", data, cut, got, want)
		}
	})
}

func TestPrintJSON(t *testing.T) {
	var out bytes.Buffer
	a := &app{stdout: &out}
	in := map[string]string{"a": "\x1b[2J\u009b\u202e\x7f小爪\n\t"}
	if err := a.printJSON(in); err != nil {
		t.Fatal(err)
	}
	if strings.ContainsFunc(out.String(), hostile) {
		t.Errorf("got %q: it could command a terminal", out.String())
	}
	var got map[string]string
	if err := json.Unmarshal(out.Bytes(), &got); err != nil || got["a"] != in["a"] {
		t.Errorf("got %q, %v, want %q", got, err, in)
	}
}
