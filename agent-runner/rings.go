package main

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// refuseRings takes io_uring from this process and all that it starts. Engines
// from version 25 on refuse it to containers by themselves, for the many holes that
// the kernel has had there; older ones let it through. Everything else is left to
// the engine's own profile.
func refuseRings() error {
	const (
		offsetOfNumber = 0
		x32            = 0x40000000 // marks a call of that ABI; the numbers are the same on all others
	)
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offsetOfNumber},
		{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: ^uint32(x32)},
		{Code: unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, Jf: 2, K: unix.SYS_IO_URING_SETUP},
		{Code: unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K, Jt: 1, K: unix.SYS_IO_URING_REGISTER},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	// All threads, or a tool might be started by one that was left out.
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return fmt.Errorf("refuse io_uring: %w", errno)
	}
	return nil
}
