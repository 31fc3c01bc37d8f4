// Fakemodeld serves package fakemodel on its own, for engines in containers.
//
// It prints one line of JSON and serves until it is interrupted:
//
//	{"url":"http://127.0.0.1:34567"}
//
// OpenAI's paths are below url + "/v1", Anthropic's below url;
// GET url + "/_requests" tells what was asked so far.
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

	"berth/agent-runner/fakemodel"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "fakemodeld:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("fakemodeld", flag.ContinueOnError)
	flags.SetOutput(stderr)
	address := flags.String("listen", "127.0.0.1:0", "address to listen on")
	fake := fakemodel.New()
	flags.StringVar(&fake.Want, "key", "", "the key that requests have to carry; empty: any")
	if err := flags.Parse(args); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", *address)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: fake}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	err = json.NewEncoder(stdout).Encode(map[string]string{"url": "http://" + listener.Addr().String()})
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
