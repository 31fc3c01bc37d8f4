package main

import (
	"runtime"
	"sync"
)

// spareThreads makes the runtime keep n threads in reserve. When it needs one and
// the kernel has none to give, since a tool has used up the container's processes,
// it ends the process.
func spareThreads(n int) {
	var running, done sync.WaitGroup
	running.Add(n)
	for range n {
		done.Go(func() {
			runtime.LockOSThread() // so that no two share one
			running.Done()
			running.Wait()
			runtime.UnlockOSThread() // or it would end with the goroutine
		})
	}
	done.Wait()
}
