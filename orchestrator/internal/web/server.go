package web

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"

	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
)

// Backend is what the control socket gives access to. All methods may be called
// at the same time.
type Backend interface {
	Status(context.Context) (Status, error)
	Groups(context.Context) ([]Group, error)
	AddGroup(context.Context, NewGroup) (Group, error)
	UpdateGroup(ctx context.Context, folder string, change GroupChange) (Group, error)
	RemoveGroup(ctx context.Context, folder string) error
	StopGroup(ctx context.Context, folder string) (stopped bool, err error)
	StopDaemon() // does not wait
	Backup(context.Context, NewBackup) (Backup, error)
	// Audit returns up to limit refusals, newest first; folder may be empty.
	Audit(ctx context.Context, folder string, limit int) ([]Refusal, error)
	// Usage returns the last days, today included; folder may be empty.
	Usage(ctx context.Context, folder string, days int) ([]Usage, error)
	Outbox(context.Context) ([]Text, error)
	RetryTexts(context.Context, Texts) (n int, err error)
	DropTexts(context.Context, Texts) (n int, err error)
	Send(context.Context, NewMessage) (Accepted, error)
	// Answer waits up to wait for the state to leave AnswerPending.
	Answer(ctx context.Context, seq int64, wait time.Duration) (Answer, error)
	// Chat yields until ctx ends.
	Chat(ctx context.Context, folder string, after int64) iter.Seq2[Event, error]
	Channels
	TaskDesk
	MemoryDesk
}

const (
	maxBody = 1 << 20
	maxWait = time.Minute
)

// Listen opens the control socket for this user alone. It takes the place of one
// that a dead daemon left: the caller holds the root's lock.
func Listen(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove the old control socket: %w", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		if len(path) > 107 { // sockaddr_un
			return nil, berth.Errorf(berth.Invalid, "the path of the control socket is too long for a socket (%d of 107 bytes): choose a shorter root", len(path))
		}
		return nil, fmt.Errorf("listen on the control socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("protect the control socket: %w", err), l.Close())
	}
	return l, nil
}

// Serve answers on l until ctx ends; requests under way then end too.
func Serve(ctx context.Context, l net.Listener, b Backend, log *zap.Logger) error {
	server := &http.Server{
		Handler:           handler(b, log),
		ReadHeaderTimeout: 10 * time.Second,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ErrorLog:          zap.NewStdLog(log),
	}
	stop := context.AfterFunc(ctx, func() {
		grace, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if server.Shutdown(grace) != nil {
			server.Close()
		}
	})
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve the control socket: %w", err)
	}
	return nil
}

func handler(b Backend, log *zap.Logger) http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, fn func(*http.Request) (any, error)) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			r.Body = http.MaxBytesReader(w, r.Body, maxBody)
			out, err := fn(r)
			if err != nil {
				fail(w, r, err, log)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(out) // the client went away
		})
	}
	handle("GET /v1/status", func(r *http.Request) (any, error) { return b.Status(r.Context()) })
	handle("GET /v1/groups", func(r *http.Request) (any, error) { return b.Groups(r.Context()) })
	handle("POST /v1/groups", func(r *http.Request) (any, error) {
		in, err := decode[NewGroup](r)
		if err != nil {
			return nil, err
		}
		return b.AddGroup(r.Context(), in)
	})
	handle("PATCH /v1/groups/{folder}", func(r *http.Request) (any, error) {
		in, err := decode[GroupChange](r)
		if err != nil {
			return nil, err
		}
		return b.UpdateGroup(r.Context(), r.PathValue("folder"), in)
	})
	handle("DELETE /v1/groups/{folder}", func(r *http.Request) (any, error) {
		return struct{}{}, b.RemoveGroup(r.Context(), r.PathValue("folder"))
	})
	handle("POST /v1/groups/{folder}/stop", func(r *http.Request) (any, error) {
		return b.StopGroup(r.Context(), r.PathValue("folder"))
	})
	handle("POST /v1/stop", func(*http.Request) (any, error) {
		b.StopDaemon()
		return struct{}{}, nil
	})
	handle("POST /v1/backup", func(r *http.Request) (any, error) {
		in, err := decode[NewBackup](r)
		if err != nil {
			return nil, err
		}
		return b.Backup(r.Context(), in)
	})
	handle("GET /v1/audit", func(r *http.Request) (any, error) {
		limit, err := strconv.Atoi(r.FormValue("limit"))
		if err != nil {
			return nil, berth.Errorf(berth.Invalid, "limit %q is no number", r.FormValue("limit"))
		}
		return b.Audit(r.Context(), r.FormValue("group"), limit)
	})
	handle("GET /v1/usage", func(r *http.Request) (any, error) {
		days, err := strconv.Atoi(r.FormValue("days"))
		if err != nil {
			return nil, berth.Errorf(berth.Invalid, "days %q is no number", r.FormValue("days"))
		}
		return b.Usage(r.Context(), r.FormValue("group"), days)
	})
	handle("GET /v1/outbox", func(r *http.Request) (any, error) { return b.Outbox(r.Context()) })
	handle("POST /v1/outbox/retry", func(r *http.Request) (any, error) {
		in, err := decode[Texts](r)
		if err != nil {
			return nil, err
		}
		return b.RetryTexts(r.Context(), in)
	})
	handle("POST /v1/outbox/drop", func(r *http.Request) (any, error) {
		in, err := decode[Texts](r)
		if err != nil {
			return nil, err
		}
		return b.DropTexts(r.Context(), in)
	})
	handle("POST /v1/messages", func(r *http.Request) (any, error) {
		in, err := decode[NewMessage](r)
		if err != nil {
			return nil, err
		}
		return b.Send(r.Context(), in)
	})
	handle("GET /v1/messages/{seq}/answer", func(r *http.Request) (any, error) {
		seq, err := strconv.ParseInt(r.PathValue("seq"), 10, 64)
		if err != nil {
			return nil, berth.Errorf(berth.Invalid, "message number %q is no number", r.PathValue("seq"))
		}
		var wait time.Duration
		if text := r.FormValue("wait"); text != "" {
			if wait, err = time.ParseDuration(text); err != nil {
				return nil, berth.Errorf(berth.Invalid, "wait %q is no duration, such as 20s", text)
			}
		}
		return b.Answer(r.Context(), seq, min(wait, maxWait))
	})
	mux.HandleFunc("GET /v1/groups/{folder}/chat", func(w http.ResponseWriter, r *http.Request) {
		after, err := strconv.ParseInt(r.FormValue("after"), 10, 64)
		if err != nil {
			fail(w, r, berth.Errorf(berth.Invalid, "after %q is no message number", r.FormValue("after")), log)
			return
		}
		stream(w, r, b.Chat(r.Context(), r.PathValue("folder"), after), log)
	})
	handleChannels(mux, handle, b, log)
	handleTasks(handle, b)
	handleMemory(handle, b)
	return mux
}

// stream writes one event a line as they come.
func stream[T any](w http.ResponseWriter, r *http.Request, events iter.Seq2[T, error], log *zap.Logger) {
	out := http.NewResponseController(w)
	enc := json.NewEncoder(w)
	begun := false
	begin := func() {
		if !begun {
			begun = true
			w.Header().Set("Content-Type", "application/x-ndjson")
			w.WriteHeader(http.StatusOK)
		}
	}
	for e, err := range events {
		if err != nil {
			if !begun {
				fail(w, r, err, log)
			}
			return
		}
		begin()
		if enc.Encode(e) != nil || out.Flush() != nil {
			return
		}
	}
	begin()
}

func decode[T any](r *http.Request) (T, error) {
	var in T
	dec := json.NewDecoder(r.Body)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&in); err != nil {
		return in, berth.Errorf(berth.Invalid, "the request is not understood: %w", err)
	}
	return in, nil
}

func fail(w http.ResponseWriter, r *http.Request, err error, log *zap.Logger) {
	f, status := failure(r, err, log)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(f) // the client went away
}

// failure is where errors become answers: those meant for people as they are,
// anything else in the log in full and outside as "internal error".
func failure(r *http.Request, err error, log *zap.Logger) (f Failure, status int) {
	if r.Context().Err() != nil {
		err = berth.Errorf(berth.Unavailable, "the daemon shuts down")
	}
	if known, ok := errors.AsType[*berth.Error](err); ok {
		return Failure{Error: err.Error(), Kind: known.Kind.String()}, map[berth.Kind]int{
			berth.Invalid: http.StatusBadRequest, berth.NotFound: http.StatusNotFound, berth.Conflict: http.StatusConflict,
			berth.Denied: http.StatusForbidden, berth.Unavailable: http.StatusServiceUnavailable, berth.Internal: http.StatusInternalServerError,
		}[known.Kind]
	}
	log.Error("control socket", zap.String("request", r.Method+" "+r.URL.Path), zap.Error(err))
	return Failure{Error: "internal error: see the daemon's log", Kind: berth.Internal.String()}, http.StatusInternalServerError
}
