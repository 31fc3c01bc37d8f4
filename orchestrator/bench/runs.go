package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	coldStarts    = 20
	fiveAtOnce    = 10
	bareStarts    = 30
	warmRounds    = 500
	requestRounds = 50                   // within what a group may ask for at once: beyond it, its wait would be measured
	pace          = 5 * time.Millisecond // between two rounds, as chats too have pauses
	readyMarker   = `"type":"ready"`
)

// cold measures cold starts, one alone and five at once.
func (b *bench) cold(ctx context.Context, r *report) (err error) {
	h, err := b.newHost(ctx, filepath.Join(b.dir, "cold"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	if _, err := h.start(ctx, slots); err != nil {
		return err
	}
	twins := make([]twin, slots)
	for i := range twins {
		l := h.eyes.lastLaunch(group(i).Folder)
		if twins[i], err = b.bare.twin(ctx, l.container, l.stdin); err != nil {
			return err
		}
	}
	if err := h.end(ctx, slots); err != nil {
		return err
	}

	one := row{what: "cold: message stored → first frame of a hardened container", unit: ms,
		note: "From the commit of a message to the arrival of the runner's first frame at the host. The floor is the same container, as the engine itself describes it, with the same stdin, by four bare API calls: create, attach, start, first byte of stdout."}
	if err := h.compare(ctx, b.bare, coldStarts, twins[:1], &one); err != nil {
		return err
	}
	r.add(one.withinRatio(1.25))

	five := row{what: "five cold starts at once", unit: ms,
		note: "From the first commit to the last of five first frames, five groups at once. The floor is five bare starts at once."}
	if err := h.compare(ctx, b.bare, fiveAtOnce, twins, &five); err != nil {
		return err
	}
	r.add(five.withinRatio(1.25))

	hard := row{what: "hardening: bare start with all of it", unit: ms,
		note: "The floor of row 1, four bare API calls, beside the same four calls for the same program and the same folders with no option else: no limits, all of the engine's usual rights, a writable root file system, the engine's log. Neither has a network."}
	for range bareStarts {
		for _, half := range []struct {
			twin twin
			into *[]float64
		}{{twins[0], &hard.ours}, {twins[0].unhardened(), &hard.floor}} {
			took, err := b.bare.startAll(ctx, []twin{half.twin})
			if err != nil {
				return err
			}
			*half.into = append(*half.into, millis(took))
		}
	}
	r.add(hard.withinRatio(1.05))
	return nil
}

// compare starts runs and their bare twins in turns.
func (h *host) compare(ctx context.Context, bare *bare, rounds int, twins []twin, into *row) error {
	for range rounds {
		ours, err := h.start(ctx, len(twins))
		if err != nil {
			return err
		}
		if err := h.end(ctx, len(twins)); err != nil {
			return err
		}
		floor, err := bare.startAll(ctx, twins)
		if err != nil {
			return err
		}
		into.ours = append(into.ours, millis(ours))
		into.floor = append(into.floor, millis(floor))
	}
	return nil
}

// start wakes the first n groups at once and returns the time from the first
// message stored to the last first frame.
func (h *host) start(ctx context.Context, n int) (time.Duration, error) {
	var wg sync.WaitGroup
	stored, errs := make([]time.Time, n), make([]error, n)
	for i := range n {
		wg.Go(func() { _, stored[i], errs[i] = h.send(ctx, i) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return 0, err
	}
	first := stored[0]
	for _, at := range stored {
		if at.Before(first) {
			first = at
		}
	}
	var last time.Time
	for range n {
		at, err := h.await(ctx, "a first frame", func(o output) bool { return strings.Contains(o.text, readyMarker) })
		if err != nil {
			return 0, err
		}
		if at.After(last) {
			last = at
		}
	}
	return last.Sub(first), nil
}

// warm measures what a running container adds to a message, and Berth to a
// request of a container.
func (b *bench) warm(ctx context.Context, r *report) (err error) {
	h, err := b.newHost(ctx, filepath.Join(b.dir, "warm"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	if _, err := h.start(ctx, 1); err != nil {
		return err
	}
	in := row{what: "warm: message stored → seen by the engine", unit: ms}
	out := row{what: "IPC file renamed → handled", unit: ms,
		note: "From the rename of a message file in the folder that a container writes to, to the commit of its outbox row. The floor is that of the row above, from the rename on."}
	floor := func() error {
		return bareWatch(ctx, filepath.Join(b.dir, "watched"), warmRounds/2, &in.floor, &out.floor)
	}
	if err := floor(); err != nil {
		return err
	}
	consumed := make(chan time.Time, 1)
	events, err := watch(h.ipc("input"), unix.IN_DELETE, func() error { consumed <- time.Now(); return nil })
	if err != nil {
		return err
	}
	defer events.Close()
	var acked []float64
	for range warmRounds {
		stored, ack, err := h.deliver(ctx)
		if err != nil {
			return err
		}
		taken, err := next(ctx, "the input file is consumed", consumed)
		if err != nil {
			return err
		}
		in.ours = append(in.ours, millis(taken.Sub(stored)))
		acked = append(acked, millis(ack.Sub(stored)))
	}
	in.note = fmt.Sprintf("From the commit of a message for an idle run to the removal of its input file, which the runner does once the engine has the text and an inotify reader on the host sees; one more commit lies in between, which need not reach the disk: which run was given the message. The acknowledgement is back at the host after %s (p99 %s). The floor is in one process: a file written beside and renamed into a folder, seen by a bare inotify reader, and one synced append to a file.", ms.write(p50(acked)), ms.write(quantile(acked, 0.99)))
	for i := range requestRounds {
		took, err := h.request(ctx, i)
		if err != nil {
			return err
		}
		out.ours = append(out.ours, millis(took))
	}
	if err := floor(); err != nil {
		return err
	}
	r.add(in.quick())
	r.add(out.quick())
	return nil
}

// deliver sends a message to the first group's idle run and returns when it was
// on disk and when its acknowledgement arrived.
func (h *host) deliver(ctx context.Context) (stored, acked time.Time, err error) {
	if err := h.idle(ctx, 0); err != nil {
		return stored, acked, err
	}
	if err := pause(ctx, pace); err != nil {
		return stored, acked, err
	}
	id, stored, err := h.send(ctx, 0)
	if err != nil {
		return stored, acked, err
	}
	acked, err = h.await(ctx, "an acknowledgement", func(o output) bool { return strings.Contains(o.text, id) })
	return stored, acked, err
}

// request drops a message file as the first group's container would.
func (h *host) request(ctx context.Context, i int) (time.Duration, error) {
	if err := pause(ctx, pace); err != nil {
		return 0, err
	}
	select {
	case <-h.queued: // an earlier answer
	default:
	}
	dir := h.ipc("messages")
	data, err := json.Marshal(map[string]string{"type": "message", "chatJid": group(0).JID, "text": "half way through"})
	if err != nil {
		return 0, err
	}
	tmp := filepath.Join(dir, ".tmp")
	if err := os.WriteFile(tmp, data, 0o644); err != nil {
		return 0, err
	}
	begin := time.Now()
	if err := os.Rename(tmp, filepath.Join(dir, fmt.Sprintf("%d.json", i))); err != nil {
		return 0, err
	}
	at, err := next(ctx, "a request is handled", h.queued)
	return at.Sub(begin), err
}

// ipc returns one of the folders of the first group's container.
func (h *host) ipc(name string) string {
	return filepath.Join(h.root, "data", "ipc", group(0).Folder, name)
}
