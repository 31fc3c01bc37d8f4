package docker

import (
	"math"
	"strconv"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/go-units"

	"berth/agent-runner/protocol"
	"berth/orchestrator/internal/turn"
)

// Labels of every container of ours. LabelInstall alone decides what is ours:
// several installs may share an engine, and names prove nothing.
const (
	LabelInstall  = "berth.install"
	LabelGroup    = "berth.group"
	LabelRun      = "berth.run"
	LabelProtocol = "berth.protocol"
	LabelKind     = "berth.kind"
)

// rendered is what the engine is asked to create.
type rendered struct {
	Name   string
	Config *container.Config
	Host   *container.HostConfig
}

// render is the one place that decides what a container looks like. cpuset are the
// processors that it may use, "" for all.
func render(spec turn.Spec, install, cpuset string) rendered {
	config := &container.Config{
		Image:        spec.Image,
		User:         strconv.Itoa(spec.UID) + ":" + strconv.Itoa(spec.GID),
		WorkingDir:   protocol.GroupDir,
		Env:          []string{"HOME=" + protocol.HomeDir},
		AttachStdin:  true,
		AttachStdout: true,
		AttachStderr: true,
		OpenStdin:    true,
		StdinOnce:    true,
		StopSignal:   "SIGTERM", // whatever the image says: the runner knows this one
		// An image's health check would run beside the agent for nobody.
		Healthcheck: &container.HealthConfig{Test: []string{"NONE"}},
		Labels: map[string]string{
			LabelInstall:  install,
			LabelGroup:    spec.Folder,
			LabelRun:      spec.RunID,
			LabelProtocol: strconv.Itoa(protocol.Version),
			LabelKind:     spec.Kind,
		},
	}
	if spec.TZ != "" {
		config.Env = append(config.Env, "TZ="+spec.TZ)
	}

	network := spec.Network
	if network == "" {
		network = "none"
	}
	period, quota := cpuShare(spec.CPUs)
	host := &container.HostConfig{
		// The runner must be process 1 itself: under Docker's init any tool of
		// the same user could write to /proc/1/fd/1, our stdout.
		Init:           new(false),
		CapDrop:        []string{"ALL"},
		SecurityOpt:    []string{"no-new-privileges"}, // and the engine's default seccomp profile
		ReadonlyRootfs: true,
		Tmpfs: map[string]string{
			// Agents compile and run things in /tmp, and could do so in their
			// home anyway: noexec would hinder them and stop nobody.
			"/tmp": "rw,exec,nosuid,nodev,mode=1777,size=256m",
			"/run": "rw,noexec,nosuid,nodev,mode=1777,size=16m",
		},
		// What lies in /tmp, /run and here counts as the container's memory.
		ShmSize:      64 << 20,
		IpcMode:      container.IPCModePrivate,
		CgroupnsMode: container.CgroupnsModePrivate, // with version 1 of cgroups, the engine's default is the host's
		// The files of a group belong to the user of its container by number, also
		// where the engine gives others shifted numbers (userns-remap).
		UsernsMode: "host",
		// When the host runs out of memory, an agent goes before the daemon, the
		// engine and everything else.
		OomScoreAdj: 500,
		NetworkMode: container.NetworkMode(network),
		Runtime:     spec.Runtime,
		// stdout is ours by attach; nothing of a chat goes to the engine's logs.
		LogConfig:     container.LogConfig{Type: "none"},
		RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyDisabled},
		Resources: container.Resources{
			Memory:     spec.Memory,
			MemorySwap: spec.Memory, // memory and swap together: no swap
			CPUPeriod:  period,
			CPUQuota:   quota,
			CpusetCpus: cpuset,
			PidsLimit:  new(spec.Pids),
			Ulimits: []*units.Ulimit{
				{Name: "nofile", Soft: 4096, Hard: 4096},
				{Name: "core", Soft: 0, Hard: 0}, // a core file would hold the runner's secrets
			},
		},
	}

	for _, m := range spec.Mounts {
		host.Mounts = append(host.Mounts, bind(m.Source, m.Target, m.ReadOnly, m.Alone))
	}
	if spec.Runner != "" {
		host.Mounts = append(host.Mounts, bind(spec.Runner, protocol.RunnerPath, true, true))
		config.Entrypoint = []string{protocol.RunnerPath}
	}
	return rendered{
		Name:   "berth-" + spec.Folder + "-" + spec.RunID,
		Config: config,
		Host:   host,
	}
}

// cpuShare returns, in microseconds, how much processor time a container gets in
// which period; zero is the engine's default and no limit. The shorter the period,
// the shorter a greedy container holds all processors before it has to pause, and
// the shorter everybody else waits. The kernel takes no quota below a millisecond.
func cpuShare(cpus float64) (period, quota int64) {
	if cpus <= 0 {
		return 0, 0
	}
	const shortest, longest, least = 10_000, 1_000_000, 1_000
	period = min(max(shortest, int64(math.Ceil(least/cpus))), longest)
	return period, max(least, int64(math.Round(cpus*float64(period))))
}

// bind returns a bind mount. As a struct and not as "source:target", because a
// path may hold a colon; and without creation of what is missing, because Docker
// would create it as root.
func bind(source, target string, readOnly, alone bool) mount.Mount {
	return mount.Mount{
		Type:     mount.TypeBind,
		Source:   source,
		Target:   target,
		ReadOnly: readOnly,
		BindOptions: &mount.BindOptions{
			Propagation: mount.PropagationRPrivate,
			// Read-only holds for the mount itself: another file system that is
			// mounted below the source would come along writable.
			NonRecursive: readOnly || alone,
		},
	}
}
