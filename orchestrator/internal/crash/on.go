//go:build crash

package crash

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// Variable says where to crash: POINT, or POINT:N for the Nth time.
const Variable = "BERTH_CRASH_AT"

var (
	point, nth = parse(os.Getenv(Variable))
	seen       atomic.Int64
)

func parse(text string) (string, int64) {
	point, count, ok := strings.Cut(text, ":")
	n, err := strconv.ParseInt(count, 10, 64)
	if !ok || err != nil {
		n = 1
	}
	return point, n
}

// At kills this process, as kill -9 does, if it is told to at this point.
func At(name string) {
	if name == point && seen.Add(1) == nth {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // nothing more is done, however slow the signal
	}
}
