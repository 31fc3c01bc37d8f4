package reap

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// childInfo is the kernel's siginfo_t for SIGCHLD. The part after the first
// three numbers is a union that stands at the alignment of a pointer.
type childInfo struct {
	_     [3]int32 // signo, errno, code
	union struct {
		_   [0]uintptr
		pid int32
	}
}

// childPID returns the pid in info; x/sys does not name the field.
func childPID(info *unix.Siginfo) int {
	return int((*childInfo)(unsafe.Pointer(info)).union.pid)
}
