package protocol

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

const (
	startLine = "---BERTH_OUTPUT_START---\n"
	endLine   = "---BERTH_OUTPUT_END---\n"
)

func wrap(body string) string { return startLine + body + "\n" + endLine }

func answer(text string) string {
	return wrap(fmt.Sprintf(`{"status":"success","result":%q,"nonce":"n"}`, text))
}

// read returns what a stream yields, a line each, and its log.
func read(s Stream, r io.Reader) (got []string, logged string) {
	var log bytes.Buffer
	s.Log = &log
	for f, err := range s.Frames(r) {
		switch {
		case err != nil:
			got = append(got, err.Error())
		case f.Result != nil:
			got = append(got, string(*f.Result))
		default:
			got = append(got, "frame "+f.Type+f.Error)
		}
	}
	return got, log.String()
}

// W03: each case is also read a byte at a time.
func TestFrames(t *testing.T) {
	withNonce := Stream{Nonce: "n"}
	for _, tt := range []struct {
		name   string
		stream Stream
		stdout string
		want   []string
		log    string
	}{
		{"none", withNonce, "", nil, ""},
		{"one", withNonce, answer("hi"), []string{"hi"}, ""},
		{"two", withNonce, answer("a") + answer("b"), []string{"a", "b"}, ""},
		{"noise around", withNonce, "x\n" + answer("a") + "y\n\nz", []string{"a"}, "x\ny\n\nz\n"},
		{"crlf", withNonce, strings.ReplaceAll("x\n"+answer("a"), "\n", "\r\n"), []string{"a"}, "x\n"},
		{"last line without newline", withNonce, strings.TrimSuffix(answer("a"), "\n"), []string{"a"}, ""},
		{"W01 markers inside the text", withNonce, answer("a\n" + endLine + startLine + "b"), []string{"a\n" + endLine + startLine + "b"}, ""},
		{"marker not alone on its line", withNonce, " " + startLine + "x" + endLine + answer("a"), []string{"a"}, " " + startLine + "x" + endLine},
		{"stray end", withNonce, endLine + answer("a"), []string{"a"}, endLine},
		{"empty", withNonce, startLine + endLine + answer("a"), []string{"broken frame: it is empty", "a"}, ""},
		{"start inside", withNonce, startLine + answer("a"), []string{"broken frame: another one starts inside it", "a"}, ""},
		{"start after the body", withNonce, startLine + "{}\n" + answer("a"), []string{"broken frame: another one starts inside it", "a"}, ""},
		{"many lines", withNonce, startLine + "{\n}\n" + endLine + answer("a"), []string{"broken frame: it has more than one line", "a"}, "}\n" + endLine},
		{"unterminated", withNonce, startLine, []string{"unexpected EOF"}, ""},
		{"unterminated body", withNonce, startLine + `{"sta`, []string{"unexpected EOF"}, ""},
		{"not json", withNonce, wrap("oops") + answer("a"), []string{"broken frame: not JSON: invalid character 'o' looking for beginning of value", "a"}, ""},
		{"no nonce", withNonce, wrap(`{"status":"success","result":"x"}`) + answer("a"), []string{"a"}, wrap(`{"status":"success","result":"x"}`)},
		{"wrong nonce", withNonce, wrap(`{"status":"success","result":"x","nonce":"m"}`), nil, wrap(`{"status":"success","result":"x","nonce":"m"}`)},
		{"old runner", Stream{}, wrap(`{"status":"success","result":"x"}`), []string{"x"}, ""},
		{"other marker", Stream{Marker: "NANOCLAW"}, "---NANOCLAW_OUTPUT_START---\n" + `{"status":"success","result":null}` + "\n---NANOCLAW_OUTPUT_END---\n", []string{"frame "}, ""},
		{"result that is no string", Stream{}, wrap(`{"status":"success","result":{"a": [1]}}`), []string{`{"a":[1]}`}, ""},
		{"error frame", Stream{}, wrap(`{"status":"error","result":null,"error":"bad"}`), []string{"frame bad"}, ""},
		{"no status", Stream{}, wrap(`{"result":"x"}`), []string{`broken frame: status "" is neither success nor error`}, ""},
		{"no state", Stream{}, wrap(`{"type":"state","state":"x"}`), []string{`broken frame: state "x" is neither busy nor idle`}, ""},
		{"strange type", Stream{}, wrap(`{"type":"x"}`), []string{`broken frame: unknown frame type "x"`}, ""},
		{"negative number", Stream{}, wrap(`{"type":"ready","seq":-1}`), []string{"broken frame: sequence number -1 is negative"}, ""},
		{"evil session", Stream{}, wrap(`{"status":"success","newSessionId":"../../evil"}`), []string{`broken frame: session id "../../evil" is not 1 to 128 letters, digits, dots, - or _`}, ""},
		{"invalid utf-8", Stream{}, "\xff\n" + wrap("{\"status\":\"success\",\"result\":\"a\xffb\"}"), []string{"a\uFFFDb"}, "\xff\n"},
		{"result over its cap", Stream{}, wrap(`{"status":"success","result":"` + strings.Repeat("x", MaxResult+1) + `"}`), []string{"broken frame: result of 262145 bytes is over the cap of 262144"}, ""},
		{"frame over its cap", withNonce, wrap(`{"result":"`+strings.Repeat("x", MaxLine)+`"}`) + answer("a"), []string{"broken frame: it is over the cap of 1048576 bytes", "a"}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, log := read(tt.stream, strings.NewReader(tt.stdout))
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("frames (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.log, log); diff != "" {
				t.Errorf("log (-want +got):\n%s", diff)
			}
			if len(tt.stdout) > 1<<20 {
				return // a byte at a time takes long
			}
			got, log = read(tt.stream, iotest.OneByteReader(strings.NewReader(tt.stdout)))
			if !cmp.Equal(tt.want, got) || tt.log != log {
				t.Errorf("a byte at a time: %q, log %q", got, log)
			}
		})
	}
}

func TestFramesEndsWithTheReadersError(t *testing.T) {
	gone := errors.New("connection lost")
	got, _ := read(Stream{Nonce: "n"}, io.MultiReader(strings.NewReader(answer("a")+startLine), iotest.ErrReader(gone)))
	want := []string{"a", gone.Error()}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestFramesStopsWhenAsked(t *testing.T) {
	for range (Stream{}).Frames(strings.NewReader(startLine + startLine + answer("a") + answer("b"))) {
		break
	}
}

// repeat is a reader of n times the same bytes, which need no memory.
func repeat(piece string, n int) io.Reader {
	var readers []io.Reader
	for range n {
		readers = append(readers, strings.NewReader(piece))
	}
	return io.MultiReader(readers...)
}

func TestLongLineNeedsLittleMemory(t *testing.T) {
	piece := strings.Repeat("x", 1<<20)
	stdout := io.MultiReader(
		repeat(piece, 64), strings.NewReader("\n"+answer("a")+startLine),
		repeat(piece, 64), strings.NewReader("\n"+endLine+answer("b")),
	)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var got []string
	for f, err := range (Stream{Nonce: "n"}).Frames(stdout) {
		if err != nil {
			got = append(got, err.Error())
		} else {
			got = append(got, string(*f.Result))
		}
	}
	runtime.ReadMemStats(&after)
	if diff := cmp.Diff([]string{"a", "broken frame: it is over the cap of 1048576 bytes", "b"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if used := after.TotalAlloc - before.TotalAlloc; used > 16<<20 {
		t.Errorf("%d bytes allocated for lines of 64 MiB", used)
	}
}

func TestEncodeIsRead(t *testing.T) {
	want := Frame{
		Type: TypeOutput, Seq: 7, RunID: "r", Nonce: "n", Status: StatusSuccess,
		Result: new(Text("<b> & \u2028\n" + endLine)), NewSessionID: "s", IDs: []string{"a"}, Usage: &Usage{InputTokens: 1, CostUSD: 0.5},
	}
	data, err := Encode(want)
	if err != nil {
		t.Fatal(err)
	}
	for got, err := range (Stream{Nonce: "n"}).Frames(bytes.NewReader(data)) {
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%v (-want +got):\n%s", err, diff)
		}
	}
}

func TestEncodeCutsTheResult(t *testing.T) {
	for _, unit := range []string{"x", "é", "小", "🤖"} {
		f := Frame{Status: StatusSuccess, Result: new(Text(strings.Repeat(unit, MaxResult+1)))}
		data, err := Encode(f)
		if err != nil {
			t.Fatal(err)
		}
		for got, err := range (Stream{}).Frames(bytes.NewReader(data)) {
			if err != nil {
				t.Fatal(err)
			}
			text := string(*got.Result)
			if len(text) > MaxResult || !strings.HasSuffix(text, "too long)") || strings.Contains(text, "\uFFFD") {
				t.Errorf("%s: %d bytes, ends with %q", unit, len(text), text[len(text)-60:])
			}
		}
		if len(*f.Result) != (MaxResult+1)*len(unit) {
			t.Error("the caller's frame was changed")
		}
	}
}

func TestEncodeRefusesWhatTheHostWould(t *testing.T) {
	if _, err := Encode(Frame{Error: strings.Repeat("x", MaxLine)}); err == nil {
		t.Error("a frame over the cap was encoded")
	}
}

func TestSeal(t *testing.T) {
	want := Frame{Type: TypeOutput, Seq: 3, RunID: "r", Nonce: "n", Status: StatusSuccess, Result: new(Text("hi <&>"))}
	data, err := Seal(want, "n")
	if err != nil {
		t.Fatal(err)
	}
	want.Nonce = ""
	got, err := Unseal(data, "n")
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	invalid, err := Seal(Frame{Status: StatusSuccess, NewSessionID: "../x"}, "n")
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		data  []byte
		nonce string
	}{
		"another nonce":   {data, "m"},
		"no nonce":        {data, ""},
		"changed":         {bytes.Replace(data, []byte("hi"), []byte("ho"), 1), "n"},
		"no mac":          {[]byte(`{"frame":{"status":"success"}}`), "n"},
		"cut":             {data[:len(data)-1], "n"},
		"empty":           {nil, "n"},
		"a plain frame":   {[]byte(`{"status":"success","result":"x"}`), "n"},
		"an invalid one":  {invalid, "n"},
		"not even a JSON": {[]byte("x"), "n"},
	} {
		if f, err := Unseal(tt.data, tt.nonce); err == nil {
			t.Errorf("%s: unsealed %+v", name, f)
		} else if _, ok := errors.AsType[*FrameError](err); !ok {
			t.Errorf("%s: %v is no FrameError", name, err)
		}
	}
}

// What a runner says of a compaction is bounded, and survives both ways.
func TestCompactionOfAFrame(t *testing.T) {
	for _, c := range []struct {
		compaction Compaction
		ok         bool
	}{
		{Compaction{Outcome: CompactionDone, Archive: "conversations/a.md"}, true},
		{Compaction{Outcome: CompactionNothing}, true},
		{Compaction{Outcome: CompactionUnable}, true},
		{Compaction{Outcome: CompactionFailed, Reason: strings.Repeat("x", maxReason)}, true},
		{Compaction{Outcome: CompactionFailed, Reason: strings.Repeat("x", maxReason+1)}, false},
		{Compaction{Outcome: CompactionDone, Archive: strings.Repeat("x", maxReason+1)}, false},
		{Compaction{Outcome: "perhaps"}, false},
		{Compaction{}, false},
	} {
		f := Frame{Seq: 1, Nonce: "n", Status: StatusSuccess, Compaction: &c.compaction}
		if !f.Canonical() {
			t.Errorf("%.40v: somebody waits for it", c.compaction)
		}
		data, err := Encode(f)
		if err != nil {
			t.Fatal(err)
		}
		for got, err := range (Stream{Nonce: "n"}).Frames(bytes.NewReader(data)) {
			if ok := err == nil && *got.Compaction == c.compaction; ok != c.ok {
				t.Errorf("%.40v: %v", c.compaction, err)
			}
		}
		sealed, err := Seal(f, "n")
		if err != nil {
			t.Fatal(err)
		}
		if got, err := Unseal(sealed, "n"); (err == nil && *got.Compaction == c.compaction) != c.ok {
			t.Errorf("sealed %.40v: %v", c.compaction, err)
		}
	}
}
