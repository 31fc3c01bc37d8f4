// Package container holds what the agent image is made of, for the program that
// makes it.
package container

import _ "embed"

// Dockerfile makes the full agent image. Its context is a folder with the program
// agent-runner.
//
//go:embed Dockerfile
var Dockerfile []byte
