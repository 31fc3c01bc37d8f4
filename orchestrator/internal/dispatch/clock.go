package dispatch

import (
	"context"
	"errors"
	"math"
	"os"

	"golang.org/x/sys/unix"
)

// watchClock tells when the clock is set, and when the machine wakes up. Where
// the kernel does not say so, nothing comes, and who waits has to look by himself.
func watchClock(ctx context.Context) <-chan struct{} {
	set := make(chan struct{}, 1)
	fd, err := unix.TimerfdCreate(unix.CLOCK_REALTIME, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return set
	}
	file := os.NewFile(uintptr(fd), "timerfd")
	// A timer that never ends, but for being cancelled.
	const flags = unix.TFD_TIMER_ABSTIME | unix.TFD_TIMER_CANCEL_ON_SET
	never := &unix.ItimerSpec{Value: unix.Timespec{Sec: math.MaxInt32 << 8}}
	if err := unix.TimerfdSettime(fd, flags, never, nil); err != nil {
		file.Close()
		return set
	}
	stop := context.AfterFunc(ctx, func() { file.Close() }) // ends the read
	go func() {
		defer stop()
		defer file.Close()
		for buf := make([]byte, 8); ; {
			if _, err := file.Read(buf); !errors.Is(err, unix.ECANCELED) {
				return
			}
			select {
			case set <- struct{}{}:
			default:
			}
			if unix.TimerfdSettime(fd, flags, never, nil) != nil {
				return
			}
		}
	}()
	return set
}
