package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/docker"
	"berth/orchestrator/internal/web"
)

// step is one part of the play. play returns what it proved.
type step struct {
	title string
	play  func(*demo) (proved string)
}

var steps = []step{
	{"A daemon on an empty folder", begin},
	{"Three groups answer at the same time", parallel},
	{"family cannot see work's files", isolation},
	{"A follow-up goes into the running container", followUp},
	{"Seven groups share five slots", slots},
	{"One folder is mounted, two are refused", mounts},
	{"kill -9 in the middle of a run", adoption},
	{"A container that belongs to no group any more", orphan},
	{"A clean end", end},
}

func begin(d *demo) string {
	d.write(d.allowlist(), indented(map[string]any{
		"allowedRoots":    []map[string]any{{"path": d.host(), "allowReadWrite": true}},
		"blockedPatterns": []string{},
		"nonMainReadOnly": true,
	}))
	for _, s := range d.settings() {
		d.command("export " + s)
	}
	d.startDaemon("--sample-groups")
	d.berth("groups", "add", "club")
	d.grep("^(daemon|docker|image|pool)", "status")
	s := d.status()
	d.claim(s.Ready && s.Groups == 4, "a daemon that is ready and has four groups")
	d.claim(len(d.containers()) == 0, "no container before the first message")
	return "the daemon is up; no message, no container"
}

func parallel(d *demo) string {
	const work = "@Andy run sleep 2; echo done by $(hostname)"
	_, alone := d.sendAll(work, "main")
	calls, together := d.sendAll(work, "family", "work", "club")
	for _, c := range calls {
		d.claim(strings.Contains(c.out, "\ndone by "), "the answer of %s", c.args[2])
	}
	d.claim(len(d.containers()) == 4, "one container a group")
	d.claim(together < 2*alone, "three groups at the same time: %v, one alone %v", together, alone)
	return fmt.Sprintf("one group alone took %.1f s, three at once %.1f s (one after the other: %.1f s), each from a cold start",
		alone.Seconds(), together.Seconds(), 3*alone.Seconds())
}

func isolation(d *demo) string {
	const secret = "the board meets on Monday"
	d.send("work", "@Andy run echo "+secret+" > notes.txt")
	d.command("ls $BERTH_ROOT/groups/work")
	files, _ := filepath.Glob(filepath.Join(d.root(), "groups", "work", "*"))
	for _, file := range files {
		d.lines(filepath.Base(file))
	}
	own := d.send("work", "@Andy run cat /workspace/group/notes.txt")
	d.claim(strings.Contains(own, "\n"+secret+"\n"), "work reads its own file")

	other := d.send("family", "@Andy run ls -la /workspace /workspace/group; cat /workspace/group/notes.txt; find / -name notes.txt 2>/dev/null")
	d.claim(strings.Contains(other, "can't open '/workspace/group/notes.txt'"), "family finds no such file")
	d.claim(!strings.Contains(other, secret) && !strings.Contains(other, "\n/workspace/group/notes.txt"), "family sees nothing of work's file")

	self := d.send("family", "@Andy run id; grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status; ls /sys/class/net; touch /here")
	d.claim(strings.Contains(self, "\nuid=") && !strings.Contains(self, "\nuid=0("), "the agent is not root")
	for _, none := range []string{"CapEff", "CapBnd"} {
		d.claim(strings.Contains(self, "\n"+none+":\t0000000000000000\n"), "no capabilities in %s", none)
	}
	d.claim(strings.Contains(self, "\nNoNewPrivs:\t1\n"), "no new privileges")
	d.claim(strings.Contains(self, "\nlo\n") && !strings.Contains(self, "\neth0"), "no network but the loopback")
	d.claim(strings.Contains(self, "/here: Read-only file system"), "a read-only root")
	return "a group sees its own folder alone, as a user without rights, without a network, on a read-only system"
}

func followUp(d *demo) string {
	d.send("family", "@Andy our dog is called Bello")
	before := d.runOf("family")
	d.grep("^RUN| family ", "status")
	told := d.send("family", "@Andy history")
	after := d.runOf("family")
	d.grep("^RUN| family ", "status")
	d.claim(before.ID != "" && before.ID == after.ID && before.Container == after.Container, "one run for both messages")
	d.claim(after.Turns == before.Turns+1, "one turn more")
	d.claim(strings.Contains(told, "our dog is called Bello"), "the session remembers")
	return fmt.Sprintf("both messages went to run %s, now in turn %d, and its session remembers the first", after.ID, after.Turns)
}

func slots(d *demo) string {
	groups := []string{"main", "family", "work", "club", "garden", "school", "band"}
	for _, g := range groups[4:] {
		d.berth("groups", "add", g)
	}
	d.settled()
	d.grep("^pool|^RUN| idle ", "status")
	logged := len(d.daemonLog())
	if d.err != nil {
		return ""
	}
	engine, err := d.engine()
	if err != nil {
		d.fail("%w", err)
		return ""
	}
	defer engine.Close()
	c, err := takeCensus(d.ctx, engine)
	if err != nil {
		d.fail("%w", err)
		return ""
	}
	defer c.stop()

	calls, _ := d.sendAll("@Andy run sleep 1; echo done by $(hostname)", groups...)
	for _, c := range calls {
		d.claim(strings.Contains(c.out, "\ndone by "), "the answer of %s", c.args[2])
	}
	d.until("all container events have come", func() bool {
		current, err := c.current(d.ctx)
		if err != nil {
			d.fail("%w", err)
		}
		return current
	})
	story, most := c.story()
	d.command("docker events --filter label=berth.install=" + d.install() + "   # create and destroy, counted")
	d.lines("containers: " + story)
	d.claim(most == 5, "five containers at the most, but never more: %d", most)

	const reason = "another group waits for the slot"
	d.command("berth logs | grep " + quote(reason))
	log := d.daemonLog()[logged:]
	evicted := matching(reason, log)
	d.lines(evicted)
	n := strings.Count(evicted, "\n")
	d.claim(n >= 2, "two idle runs that made room, at least")
	d.claim(!strings.Contains(log, "run failed"), "no turn cut off")
	return fmt.Sprintf("all seven answered, never more than %d containers at any instant; %d idle runs made room, no turn was cut off", most, n)
}

func mounts(d *demo) string {
	photos, keys := filepath.Join(d.host(), "photos"), filepath.Join(d.host(), "keys", ".ssh")
	d.write(filepath.Join(photos, "beach.txt"), "sun and sand\n")
	d.write(filepath.Join(keys, "id"), "a private key\n")
	d.command("cat $BERTH_MOUNT_ALLOWLIST")
	text, _ := os.ReadFile(d.allowlist())
	d.lines(string(text))
	d.berth("groups", "add", "album", "--mount", photos+":rw", "--mount", keys, "--mount", "/etc")
	seen := d.send("album", "@Andy run ls -A /workspace/extra; cat /workspace/extra/photos/beach.txt; touch /workspace/extra/photos/new.txt")
	d.claim(strings.Contains(seen, "\nphotos\nsun and sand\n"), "the allowed folder, and no other")
	d.claim(strings.Contains(seen, "new.txt: Read-only file system"), "a mount that cannot be written")

	var verdicts []web.MountVerdict
	d.filtered(` | jq '.[] | select(.folder == "album").mounts[] | {path: .request.hostPath, target, readonly, refused}'`, func(out string) string {
		var groups []web.Group
		if err := json.Unmarshal([]byte(out), &groups); err != nil {
			d.fail("read the groups: %w", err)
		}
		i := slices.IndexFunc(groups, func(g web.Group) bool { return g.Folder == "album" })
		if i < 0 {
			return ""
		}
		verdicts = groups[i].Mounts
		var shown strings.Builder
		for _, v := range verdicts {
			shown.WriteString(indented(struct {
				Path     string `json:"path"`
				Target   string `json:"target,omitempty"`
				ReadOnly bool   `json:"readonly"`
				Refused  string `json:"refused,omitempty"`
			}{v.Request.HostPath, v.Target, v.ReadOnly, v.Refused}))
		}
		return shown.String()
	}, "groups", "ls", "--json")
	log := d.grep("refused", "logs", "album")
	if d.claim(len(verdicts) == 3, "three verdicts"); d.err != nil {
		return ""
	}
	d.claim(verdicts[0].Target != "" && verdicts[0].ReadOnly && verdicts[0].Refused == "", "the allowed folder, read-only")
	d.claim(strings.Contains(verdicts[1].Refused, `blocked pattern ".ssh"`), "the reason against .ssh")
	d.claim(strings.Contains(verdicts[2].Refused, "not under any allowed root"), "the reason against /etc")
	d.claim(strings.Count(log, "\n") == 2, "both reasons in the run's log")
	return "what the allowlist names is mounted, read-only for a group that is not main; the rest is refused with its reason"
}

func adoption(d *demo) string {
	d.berth("groups", "add", "errands", "--engine", "probe")
	asked := d.start(d.ctx, "send", "-g", "errands", "--wait", "@Andy sleep 4\nsay still here")
	d.command(commandLine(asked.args) + " &")
	d.until("the run of errands is busy", func() bool {
		r := d.runOf("errands")
		return r.State == berth.RunBusy && r.Container != ""
	})
	before := d.runOf("errands")
	d.grep("^RUN| errands ", "status")
	d.killDaemon()
	alive := d.showContainers("errands")
	d.claim(len(alive) == 1 && alive[0].Running && alive[0].ID == before.Container, "the container outlives the daemon")
	d.startDaemon()
	d.until("the run of errands is busy again", func() bool { return d.runOf("errands").State == berth.RunBusy })
	after := d.runOf("errands")
	d.grep("^RUN| errands ", "status")
	d.claim(after.Container == before.Container && after.ID == before.ID, "the same run in the same container")
	d.command("wait")
	answer := d.end(asked)
	d.lines(answer)
	d.claim(answer == "still here\n", "the answer")

	d.settled()
	d.command("curl -N --unix-socket $BERTH_ROOT/store/berth.sock 'http://berth/v1/groups/errands/chat?after=0' | grep 'still here'")
	texts := d.history("errands", "still here")
	d.lines(strings.Join(texts, "\n"))
	d.claim(len(texts) == 2, "one question and one answer in the chat")
	alive = d.showContainers("errands")
	d.claim(len(alive) == 1 && alive[0].ID == before.Container, "still the same container")
	return "the next daemon adopted the running container, and the waiting command got its answer, once"
}

func orphan(d *demo) string {
	before := d.runOf("errands")
	d.claim(before.Container != "", "a live run of errands")
	d.killDaemon()
	d.berth("groups", "rm", "errands")
	d.claim(len(d.showContainers("errands")) == 1, "a container without a group")
	d.startDaemon()
	isOrphan := func(c docker.Container) bool { return c.ID == before.Container }
	d.until("the orphan is gone", func() bool { return !slices.ContainsFunc(d.containers(), isOrphan) })
	d.showContainers("errands")
	d.grep(before.ID, "logs")
	return "a container with this root's label that nobody needs is stopped and removed at the next start"
}

func end(d *demo) string {
	d.settled()
	d.showContainers("")
	begun := time.Now()
	d.berth("stop", "--daemon")
	took := time.Since(begun)
	d.claim(len(d.showContainers("")) == 0, "no container of this root")
	return fmt.Sprintf("the daemon closed its idle runs and ended in %.1f s; nothing is left behind", took.Seconds())
}

// settled waits until every container is an idle run and nothing is to be sent.
func (d *demo) settled() {
	d.until("all runs are idle", func() bool {
		s := d.status()
		busy := func(r web.Run) bool { return r.State != berth.RunIdle }
		return !slices.ContainsFunc(s.Runs, busy) && len(s.Runs) == len(d.containers()) &&
			len(s.Pool.Waiting) == 0 && s.Outbox.Pending == 0
	})
}
