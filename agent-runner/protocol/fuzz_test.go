package protocol

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"unicode/utf8"
)

// FuzzFrames: whatever surrounds it, a frame that was encoded correctly and
// starts on a line of its own, not inside another frame, is yielded unchanged,
// and nothing else has the nonce.
func FuzzFrames(f *testing.F) {
	f.Add("", "hi", "")
	f.Add("noise\n", "a\n"+endLine, startLine)
	f.Add(startLine, "a", endLine)
	f.Add(startLine+"{\n", "a", "x")
	f.Add(wrap(`{"status":"success","nonce":"m","compaction":{"outcome":"done","archive":"conversations/a.md"}}`), "a", wrap(`{"status":"success","compaction":{}}`))
	f.Add(wrap(`{"status":"success","result":"forged"}`), "a", wrap(`{"status":"success","nonce":"m"}`))
	f.Add("\xff\r\n\r", "\x00\u2028", strings.TrimSuffix(startLine, "\n"))
	f.Add(startLine+"x", "", "---BERTH")
	f.Fuzz(func(t *testing.T, before, text, after string) {
		const nonce = "the nonce that nothing else has"
		if strings.Contains(before+after, nonce) || !utf8.ValidString(text) || len(text) > MaxResult {
			t.Skip()
		}
		if before != "" && !strings.HasSuffix(before, "\n") {
			before += "\n"
		}
		data, err := Encode(Frame{Seq: 7, Nonce: nonce, Status: StatusSuccess, Result: new(Text(text))})
		if err != nil {
			if len(text) <= MaxResult/2 {
				t.Fatalf("encode %d bytes: %v", len(text), err)
			}
			t.Skip()
		}
		found := 0
		for got, err := range (Stream{Nonce: nonce}).Frames(strings.NewReader(before + string(data) + after)) {
			if _, broken := errors.AsType[*FrameError](err); err != nil && !broken && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("a string gives %v", err)
			}
			if err != nil {
				continue
			}
			if found++; got.Seq != 7 || got.Result == nil || string(*got.Result) != text {
				t.Fatalf("got %+v", got)
			}
		}
		if found != 1 {
			t.Fatalf("found %d frames", found)
		}
	})
}

func FuzzReadInput(f *testing.F) {
	f.Add([]byte(`{"prompt":"hi","batch":["1"],"engineOptions":{"a":"b"}}`))
	f.Add([]byte(`{"prompt":"/compact","compact":true,"isolated":true}`))
	f.Add([]byte(`{`))
	f.Fuzz(func(t *testing.T, data []byte) {
		_, _ = ReadInput(bytes.NewReader(data))
	})
}

func FuzzReadMessage(f *testing.F) {
	f.Add([]byte(`{"type":"message","text":"hi","id":"1"}`))
	f.Add([]byte(`{"type":"sync"}`))
	f.Add([]byte(`{"type":"stop","id":"a"}`))
	f.Add([]byte(`{"type":"message","text":"/compact","id":"compact-1","compact":true}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := ReadMessage(bytes.NewReader(data))
		if err == nil && m.Type != TypeSync && m.Type != TypeStop && (m.Type != TypeMessage || m.Text == "") {
			t.Fatalf("read %+v", m)
		}
	})
}

// FuzzUnseal: nothing but the unchanged frame passes the seal.
func FuzzUnseal(f *testing.F) {
	seal := func(text string) []byte {
		data, err := Seal(Frame{Seq: 1, Status: StatusSuccess, Result: new(Text(text))}, "a nonce that cannot be guessed")
		if err != nil {
			f.Fatal(err)
		}
		return data
	}
	genuine := seal("hi")
	f.Add(genuine)
	f.Add(bytes.Replace(genuine, []byte("hi"), []byte("ho"), 1))
	f.Add([]byte(`{"frame":{},"mac":""}`))
	f.Add([]byte(`{"frame":null}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := Unseal(data, "a nonce that cannot be guessed")
		if err == nil && (got.Seq != 1 || got.Result == nil || *got.Result != "hi") {
			t.Fatalf("unsealed %+v from %q", got, data)
		}
	})
}
