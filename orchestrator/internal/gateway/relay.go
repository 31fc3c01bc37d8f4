package gateway

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// bufferSize is the memory that one direction of one exchange takes, in bytes.
const bufferSize = 32 << 10

var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// The causes of an exchange that the gateway itself ends.
var (
	errIdle     = errors.New("nothing came for too long")
	errTooLarge = errors.New("the request is too large")
	errSpent    = errors.New("the run's bytes are spent")
)

// watch ends an exchange in which nothing moves.
type watch struct {
	timer *time.Timer
	idle  time.Duration
}

// newWatch returns ctx with an end after idle without a call of alive. When it
// ends before stop is called, unblock is called, and never afterwards.
func newWatch(ctx context.Context, idle time.Duration, unblock func()) (_ context.Context, _ *watch, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &watch{idle: idle, timer: time.AfterFunc(idle, func() { cancel(errIdle) })}
	var mu sync.Mutex
	over := false
	context.AfterFunc(ctx, func() {
		mu.Lock()
		defer mu.Unlock()
		if !over {
			unblock()
		}
	})
	return ctx, w, func() {
		mu.Lock()
		over = true
		mu.Unlock()
		w.timer.Stop()
		cancel(nil)
	}
}

func (w *watch) alive() { w.timer.Reset(w.idle) }

// upload is the body of a request on its way out. The transport may read it
// until it is closed, also after the answer began.
type upload struct {
	body   io.ReadCloser
	limit  int64          // bytes; 0: none
	spend  func(int) bool // may be nil; false ends the upload
	watch  *watch
	answer time.Duration // the wait for the answer, once all is sent

	sent atomic.Int64
	over atomic.Bool // the limit was reached
	done atomic.Bool // all was read
}

// newUpload returns the body of r, and ctx with an end when nothing moves.
func newUpload(ctx context.Context, w http.ResponseWriter, r *http.Request, l Limits) (context.Context, *upload, func()) {
	u := &upload{body: r.Body, answer: l.HeaderTimeout}
	// A host may answer before it has read everything. Otherwise the server would
	// take the rest of the body away from the transport at the answer's begin, and
	// the transport would give up the answer.
	_ = http.NewResponseController(w).EnableFullDuplex() // HTTP/1.1 always can
	// A transport waits for the body even when its context ended: without this a
	// container that stops in the middle of a request would hold it for ever.
	ctx, watch, stop := newWatch(ctx, l.IdleTimeout, func() {
		if !u.done.Load() {
			_ = http.NewResponseController(w).SetReadDeadline(time.Unix(1, 0)) // closed already
		}
	})
	u.watch = watch
	if r.ContentLength == 0 {
		u.ended()
	}
	return ctx, u, stop
}

func (u *upload) Read(p []byte) (int, error) {
	if u.limit > 0 {
		// One byte more than allowed tells a body that is too large from one
		// that just fits.
		p = p[:min(int64(len(p)), u.limit+1-u.sent.Load())]
	}
	n, err := u.body.Read(p)
	if sent := u.sent.Add(int64(n)); u.limit > 0 && sent > u.limit {
		u.over.Store(true)
		return 0, errTooLarge
	}
	if u.spend != nil && !u.spend(n) {
		return 0, errSpent
	}
	if err == io.EOF {
		u.ended()
	} else {
		u.watch.alive()
	}
	return n, err
}

func (u *upload) ended() {
	u.done.Store(true)
	u.watch.timer.Reset(u.answer)
}

func (u *upload) Close() error { return u.body.Close() }

// secret is a key that must not come back. Masked bytes keep their number, so
// that lengths stay true.
type secret string

func (s secret) mask(p []byte) {
	if s == "" {
		return
	}
	for from := 0; ; {
		i := bytes.Index(p[from:], []byte(s))
		if i < 0 {
			return
		}
		from += i
		for range len(s) {
			p[from] = '*'
			from++
		}
	}
}

func (s secret) maskString(text string) string {
	p := []byte(text)
	s.mask(p)
	return string(p)
}

// tail returns how many bytes at the end of p may be the begin of the secret.
func (s secret) tail(p []byte) int {
	for n := min(len(s)-1, len(p)); n > 0; n-- {
		if p[len(p)-n] == s[0] && string(p[len(p)-n:]) == string(s[:n]) {
			return n
		}
	}
	return 0
}

// download is the body of an answer on its way in.
type download struct {
	secret secret
	spend  func(int) bool // may be nil; false ends the download
	seen   func([]byte)   // may be nil; takes what was passed on
	watch  *watch
	idle   time.Duration // for a write to the container
}

// copy passes everything on as it comes. Only bytes that may be the begin of the
// secret wait for the next ones; the end of an event or of a line never does. On
// any error the answer is incomplete.
func (d *download) copy(w http.ResponseWriter, body io.Reader) error {
	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	out := http.NewResponseController(w)
	held := 0
	for {
		n, err := body.Read(buf[held:])
		d.watch.alive()
		if d.spend != nil && !d.spend(n) {
			return errSpent
		}
		n += held
		d.secret.mask(buf[:n])
		held = 0
		if err == nil {
			held = d.secret.tail(buf[:n])
		}
		if whole := buf[:n-held]; len(whole) > 0 {
			if err := out.SetWriteDeadline(time.Now().Add(d.idle)); err != nil {
				return err
			}
			if _, err := w.Write(whole); err != nil {
				return err
			}
			if err := out.Flush(); err != nil {
				return err
			}
			if d.seen != nil {
				d.seen(whole)
			}
		}
		copy(buf[:], buf[n-held:n])
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// usable reports whether an answer can be passed on: not one that wants to change
// the protocol, or has a number that is none.
func usable(resp *http.Response) bool { return resp.StatusCode >= 200 && resp.StatusCode <= 999 }

// passBack copies the headers of an answer that may be passed on.
func passBack(to, from http.Header, s secret, drop func(name string) bool) {
	for name, values := range from {
		if isHop(from, name) || drop(name) {
			continue
		}
		for _, value := range values {
			to.Add(name, s.maskString(value))
		}
	}
}
