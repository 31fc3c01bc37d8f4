// Agent-runner is process 1 of a group's container. It reads one JSON object on
// stdin, drives an agent engine, takes further messages as files, and prints
// frames on stdout; package protocol says how.
//
// As "agent-runner sh -c COMMAND" it is a shell, for images that have none, and
// as "agent-runner tools" the server of the agent's tools.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strings"

	"golang.org/x/sys/unix"

	"berth/agent-runner/internal/emit"
	"berth/agent-runner/internal/engine"
	"berth/agent-runner/internal/forward"
	"berth/agent-runner/internal/input"
	"berth/agent-runner/internal/loop"
	"berth/agent-runner/internal/reap"
	"berth/agent-runner/internal/shell"
	"berth/agent-runner/internal/skills"
	"berth/agent-runner/internal/tools"
	"berth/agent-runner/internal/transcript"
	"berth/agent-runner/protocol"
)

func main() {
	switch {
	case len(os.Args) == 1:
		os.Exit(serve())
	case os.Args[1] == "sh":
		os.Exit(shell.Main(os.Args[2:]))
	case os.Args[1] == "tools" && len(os.Args) == 2:
		os.Exit(tools.Main(protocol.IPCDir, protocol.GroupDir))
	case os.Args[1] == "tools" && len(os.Args) == 4: // folders of a test
		os.Exit(tools.Main(os.Args[2], os.Args[3]))
	default:
		fmt.Fprintln(os.Stderr, "usage: agent-runner < input.json\n       agent-runner sh -c COMMAND\n       agent-runner tools")
		os.Exit(2)
	}
}

// serve is the runner in a real process.
func serve() int {
	logger := log.New(os.Stderr, "", 0)
	// Before anything secret is read: tools of the same user could otherwise read
	// this process's memory, and print frames through its stdout.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		logger.Printf("hide this process from its tools: %v", err)
	}
	if err := refuseRings(); err != nil {
		logger.Print(err)
	}
	spareThreads(8)
	// A small heap that is swept often: the runner mostly waits, next to an agent
	// that needs the container's memory.
	debug.SetGCPercent(50)
	// Of all signals, only the host's two mean something: a tool's mistaken SIGQUIT
	// is no reason to end, and a stdout that is gone is an error of the write and
	// not a deadly signal. Ignoring them would hand that on to every child.
	signal.Notify(make(chan os.Signal, 1))

	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT)
	go func() { cancel(signalled{(<-signals).(unix.Signal)}) }()

	var children reap.Children
	go children.Run(ctx)
	return run(ctx, os.Stdin, os.Stdout, &children, places{ipc: protocol.IPCDir, group: protocol.GroupDir, home: protocol.HomeDir}, logger)
}

// places are the folders that the host mounts.
type places struct{ ipc, group, home string }

// shareMemory gives the memory file of a folder the other name that engines look
// for, unless something has it. The link is for this container: the host reads no
// file through it.
func shareMemory(dir string, logger *log.Logger) {
	const file, name = "AGENTS.md", "CLAUDE.md"
	if _, err := os.Lstat(filepath.Join(dir, file)); err != nil {
		return
	}
	err := os.Symlink(file, filepath.Join(dir, name))
	// Only main may write what all groups share.
	if err != nil && !errors.Is(err, fs.ErrExist) && !errors.Is(err, unix.EROFS) && !errors.Is(err, fs.ErrPermission) {
		logger.Printf("share the memory file as %s: %v", name, err)
	}
}

// signalled is the cause of the end of a run that a signal ended.
type signalled struct{ signal unix.Signal }

func (s signalled) Error() string { return "stopped by " + s.signal.String() }

// run is one run from stdin to the exit code.
func run(ctx context.Context, stdin io.Reader, stdout io.Writer, children *reap.Children, at places, logger *log.Logger) int {
	frames := filepath.Join(at.ipc, "frames")
	in, err := protocol.ReadInput(stdin)
	if err != nil {
		emit.New(stdout, frames, "", "", logger).Emit(engine.Failed(&engine.Error{
			Class: protocol.ClassInput,
			Text:  "Failed to parse input: " + err.Error(),
		}))
		return 1
	}
	out := emit.New(stdout, frames, in.RunID, in.Nonce, logger)
	way, err := forward.Open(ctx, forward.Address, in.Gateway, logger)
	if err != nil {
		logger.Printf("no way out of this container: %v", err)
	}
	defer way.Close()
	shareMemory(at.group, logger)
	shareMemory(filepath.Join(filepath.Dir(at.group), "global"), logger)
	for _, dir := range []string{at.home, at.group} {
		if err := skills.Share(dir); err != nil {
			logger.Printf("share the skills: %v", err)
		}
	}
	said := transcript.Open(transcript.Config{Input: in, Home: at.home, Dir: at.group, Log: logger})
	defer said.Close()
	in.SystemPrompt = strings.TrimSpace(in.SystemPrompt + "\n\n" + said.Earlier())
	config := engine.Config{Input: in, WorkDir: at.group, Home: at.home, Children: children, Log: logger}
	config.Prompt = ""
	if in.Gateway != "" {
		config.Gateway = forward.Address
	}
	if config.Tools, err = tools.Servers(config); err != nil {
		logger.Print(err)
	}
	agent, err := open(config, out, exec.LookPath, logger)
	if err != nil {
		out.Emit(engine.Failed(err))
		return 1
	}

	inputDir := filepath.Join(at.ipc, "input")
	leasePath := filepath.Join(at.ipc, protocol.LeaseFile)
	watch, stop := context.WithCancel(ctx)
	defer stop()
	l := loop.Loop{
		Input:     in,
		Engine:    agent,
		Out:       out,
		Folder:    input.NewFolder(inputDir, logger),
		Wake:      input.Watch(watch, inputDir, leasePath, logger),
		LeasePath: leasePath,
		Children:  children,
		WorkDir:   at.group,
		Home:      at.home,
		Said:      said,
		Log:       logger,
	}
	err = l.Run(ctx)
	if !errors.Is(err, loop.ErrStillBusy) {
		if err := agent.Close(); err != nil {
			logger.Printf("close the engine: %v", err)
		}
	}
	if signal, ok := errors.AsType[signalled](err); ok {
		logger.Print(signal)
		return 128 + int(signal.signal)
	}
	if err != nil {
		return 1
	}
	return 0
}
