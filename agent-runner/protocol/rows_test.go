package protocol

import (
	"bytes"
	"io"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// W02: a session id that could be more than a name is refused with its frame,
// in a stream and in a file.
func TestW02SessionIDs(t *testing.T) {
	for id, ok := range map[string]bool{
		"": true, "abc": true, "A.b-c_9": true, strings.Repeat("x", MaxSessionID): true,
		"../../evil": false, "a/b": false, `a\b`: false, "a b": false, "a\x00": false, "a\n": false, "é": false, strings.Repeat("x", MaxSessionID+1): false,
	} {
		f := Frame{Type: TypeOutput, Status: StatusSuccess, NewSessionID: id}
		sealed, err := Seal(f, "n")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Unseal(sealed, "n"); (err == nil) != ok {
			t.Errorf("%q in a file: %v", id, err)
		}
		data, err := Encode(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range (Stream{}).Frames(bytes.NewReader(data)) {
			if (err == nil) != ok {
				t.Errorf("%q in a stream: %v", id, err)
			}
		}
	}
}

// W05: a frame that never ends, in one line or in many, takes no more memory than
// two lines at their cap.
func TestW05UnterminatedFrame(t *testing.T) {
	piece := strings.Repeat("x", 1<<20)
	for name, tt := range map[string]struct {
		stdout io.Reader
		want   []string
	}{
		"one line":   {io.MultiReader(strings.NewReader(startLine), repeat(piece, 64)), []string{"broken frame: it is over the cap of 1048576 bytes", "unexpected EOF"}},
		"many lines": {io.MultiReader(strings.NewReader(startLine), repeat(piece[:1<<19]+"\n", 128)), []string{"broken frame: it has more than one line"}},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			var got []string
			for _, err := range (Stream{Nonce: "n"}).Frames(tt.stdout) {
				got = append(got, err.Error())
			}
			runtime.ReadMemStats(&after)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if used := after.TotalAlloc - before.TotalAlloc; used > 16<<20 {
				t.Errorf("%d bytes allocated for 64 MiB", used)
			}
		})
	}
}

// W07: no line of stdout is a frame by itself, be it the last one.
func TestW07NoFrameWithoutMarkers(t *testing.T) {
	const line = `{"status":"success","result":"x","nonce":"n"}`
	for _, stdout := range []string{line, line + "\n", "noise\n" + line + "\n", endLine + line, line + "\n" + endLine} {
		for _, s := range []Stream{{}, {Nonce: "n"}} {
			if got, log := read(s, strings.NewReader(stdout)); got != nil || !strings.Contains(log, line) {
				t.Errorf("%q: got %q, log %q", stdout, got, log)
			}
		}
	}
}

// W09: lines far beyond the buffer of any reader are read whole, frame or not.
func TestW09LongLinesAreReadWhole(t *testing.T) {
	for _, size := range []int{64<<10 - 1, 64 << 10, 64<<10 + 1, MaxResult} {
		text, noise := strings.Repeat("y", size), strings.Repeat("z", size)
		got, log := read(Stream{Nonce: "n"}, strings.NewReader(noise+"\n"+answer(text)+answer("after")))
		if !cmp.Equal(got, []string{text, "after"}) || log != noise+"\n" {
			t.Errorf("%d bytes: got %d frames, log of %d bytes", size, len(got), len(log))
		}
	}
}
