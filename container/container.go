// Package container holds what the agent image is made of, for the program that
// makes it.
package container

import (
	"embed"
	"io/fs"
)

// Dockerfile makes the full agent image. Its context is a folder with the program
// agent-runner.
//
//go:embed Dockerfile
var Dockerfile []byte

//go:embed skills
var skills embed.FS

// Skills are the skills that come with Berth: a folder each, with a SKILL.md in it.
func Skills() fs.FS {
	sub, err := fs.Sub(skills, "skills")
	if err != nil {
		panic(err) // the name is a good one
	}
	return sub
}
