// Watestd runs the WhatsApp double on its own, for a daemon in another process.
//
// It prints one line of JSON and serves until it is interrupted:
//
//	{"url":"http://127.0.0.1:34567","root":"8f…","control":"http://127.0.0.1:34568"}
//
// The daemon has to send all requests to WhatsApp's hosts to url, and to trust
// root in place of WhatsApp's key. A test drives the double with JSON:
//
//	curl $control/peer -d '{"number":"15550002222","name":"Alice"}'
//	curl $control/send -d '{"number":"15550002222","to":"Family","text":"hello"}'
//	curl $control/received -d '{"number":"15550002222","timeout":10}'
//
// GET $control/ lists all verbs.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	"berth/orchestrator/internal/watest"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "watestd:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("watestd", flag.ContinueOnError)
	flags.SetOutput(stderr)
	address := flags.String("listen", "127.0.0.1:0", "loopback address of the server")
	control := flags.String("control", "127.0.0.1:0", "loopback address of the control")
	trace := flags.Bool("trace", false, "write all stanzas to stderr")
	if err := flags.Parse(args); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", *control)
	if err != nil {
		return err
	}
	if !listener.Addr().(*net.TCPAddr).IP.IsLoopback() {
		return errors.Join(fmt.Errorf("%s is not a loopback address", *control), listener.Close())
	}
	s, err := watest.Serve(*address)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	defer s.Close()
	if *trace {
		s.Trace(stderr)
	}
	server := &http.Server{Handler: s.Control()}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	err = json.NewEncoder(stdout).Encode(struct {
		watest.Hook
		Control string `json:"control"`
	}{s.Hook(), "http://" + listener.Addr().String()})
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
