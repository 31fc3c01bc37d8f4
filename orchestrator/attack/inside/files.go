package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const ipc = "/workspace/ipc/"

// files does what the host says something about, and then keeps it busy. It is one
// process: a bomb that goes off in between leaves no room for another.
func files(length time.Duration, until time.Time) {
	ask()
	odd()
	replace()
	time.Sleep(length / 10) // what comes after the flood waits for its turn with it
	if least := time.Now().Add(length / 10); until.Before(least) {
		until = least
	}
	flood(until)
}

type object map[string]any

// drop puts a request into place as the agents' tools do.
func drop(folder, name string, data []byte) error {
	tmp := ipc + folder + "/." + name + ".tmp"
	if err := os.WriteFile(tmp, data, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, ipc+folder+"/"+name+".json")
}

// ask asks for what is not the group's, and reads the host's answers.
func ask() {
	other, main := os.Getenv("OTHER"), "console:main"
	asked := 0
	request := func(name, folder string, o object) {
		asked++
		id := fmt.Sprintf("ask-%d", asked)
		o["requestId"] = id
		data, err := json.Marshal(o)
		if err == nil {
			err = drop(folder, id, data)
		}
		if err != nil {
			tell(name, err)
			return
		}
		for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
			text, err := os.ReadFile(ipc + "responses/" + id + ".json")
			if err != nil {
				continue
			}
			var answer struct {
				OK    bool
				Error string
			}
			if err := json.Unmarshal(text, &answer); err != nil {
				tell(name, err)
			} else if answer.OK {
				tell(name, nil)
			} else {
				tell(name, errors.New("refused: "+answer.Error))
			}
			return
		}
		tell(name, errors.New("no answer"))
	}
	forged := string(joined("FORGED", "by", "request"))
	message := func(chat string, more object) object {
		o := object{"type": "message", "chatJid": chat, "text": forged}
		for k, v := range more {
			o[k] = v
		}
		return o
	}
	request("write to another group's chat", "messages", message(other, nil))
	request("write to main's chat", "messages", message(main, nil))
	request("write to a chat of nobody", "messages", message("console:nobody", nil))
	request("claim to be main", "messages", message(other, object{"groupFolder": "main", "isMain": true}))
	request("claim to be the other group", "messages", message(other, object{"groupFolder": strings.TrimPrefix(other, "console:"), "createdBy": "main"}))
	request("write from the folder of tasks", "tasks", message(other, nil))
	request("a chat with a newline", "messages", message(other+"\n", nil))
	request("a text that is a number", "messages", message(os.Getenv("CHAT"), object{"text": 1}))
	request("a text of 300 000 bytes", "messages", message(os.Getenv("CHAT"), object{"text": strings.Repeat("x", 300_000)}))
	request("a text with a zero byte", "messages", message(os.Getenv("CHAT"), object{"text": "a\x00b"}))
	request("a field that nobody knows", "messages", message(os.Getenv("CHAT"), object{"../../x": 1}))
	request("a request of no type", "tasks", object{})
	request("a request of an unknown type", "tasks", object{"type": "shutdown"})
	group := object{"type": "register_group", "jid": "console:mine", "name": "mine", "folder": "mine", "trigger": "@x"}
	request("register a group", "tasks", group)
	group["containerConfig"] = object{"additionalMounts": []object{{"hostPath": "/", "readonly": false}}, "timeout": 1e12}
	request("register a group with / mounted", "tasks", group)
	group["folder"], group["jid"] = strings.TrimPrefix(other, "console:"), os.Getenv("CHAT")
	request("take another group's folder", "tasks", group)
	group["folder"], group["groupFolder"], group["isMain"] = "main", "main", true
	request("become main", "tasks", group)
	request("refresh the groups", "tasks", object{"type": "refresh_groups", "isMain": true})
	request("a task for another group", "tasks", object{"type": "schedule_task", "prompt": forged, "schedule_type": "interval", "schedule_value": "60000", "targetJid": other})
	for _, verb := range []string{"update_task", "pause_task", "resume_task", "cancel_task"} {
		request(verb+" of another group", "tasks", object{"type": verb, "taskId": os.Getenv("TASK"), "prompt": forged})
	}
	request("see the groups", "tasks", object{"type": "list_groups"})
}

// odd puts into place what is no request. The host tells nobody but the operator,
// so what is printed here is only whether it was made; the name leads the rest of
// the way.
func odd() {
	canary := os.Getenv("CANARY")
	in := func(folder, name string) string { return ipc + folder + "/" + name + ".json" }
	link := func(target string) func(string) error {
		return func(path string) error { return os.Symlink(target, path) }
	}
	text := func(data string) func(string) error {
		return func(path string) error { return os.WriteFile(path, []byte(data), 0o644) }
	}
	for _, o := range []struct {
		name string
		make func(path string) error
	}{
		{"odd-plain-link", link(canary + "/canary-0")},
		{"odd-relative-link", link("../../../../canary/canary-1")},
		{"odd-link-to-folder", link(canary)},
		{"odd-link-to-request", link(canary + "/request.json")},
		{"odd-link-to-allowlist", link(os.Getenv("ALLOWLIST"))},
		{"odd-link-to-store", link(os.Getenv("STORE") + "/messages.db")},
		{"odd-link-to-other", link(os.Getenv("STORE") + "/../data/ipc/family/messages")},
		{"odd-link-to-proc", link("/proc/self/fd/0")},
		{"odd-loop", func(p string) error { return os.Symlink(filepath.Base(p), p) }},
		{"odd-hard-link", func(p string) error {
			if err := os.WriteFile(p+".first", []byte("{}"), 0o644); err != nil {
				return err
			}
			return os.Link(p+".first", p)
		}},
		{"odd-pipe", func(p string) error { return unix.Mkfifo(p, 0o666) }},
		{"odd-socket", func(p string) error {
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: p})
			if err == nil {
				l.SetUnlinkOnClose(false)
				err = l.Close()
			}
			return err
		}},
		{"odd-device", func(p string) error { return unix.Mknod(p, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))) }},
		{"odd-whiteout", func(p string) error { return unix.Mknod(p, unix.S_IFCHR|0o666, 0) }},
		{"odd-folder", func(p string) error {
			full := ipc + "messages/.folder"
			if err := os.MkdirAll(full+"/within.json", 0o755); err != nil {
				return err
			}
			return os.Rename(full, p)
		}},
		{"odd-locked-folder", func(p string) error { return os.Mkdir(p, 0) }},
		{"odd-newline\n{\"type\":\"message\"}", text("{")},
		{"odd-dots..", text("{")},
		{"odd-percent-..%2f..%2fx", text("{")},
		{"odd-rtl-\u202egnp", text("{")},
		{"odd-bytes-\xff\xfe", text("{")},
		{"odd-escape-\x1b[2J", text("{")},
		{"odd-option -rf --", text("{")},
		{"odd-long-" + strings.Repeat("x", 241), text("{")},
		{"odd-unreadable", func(p string) error {
			err := os.WriteFile(p, []byte("{"), 0o000)
			return err
		}},
		{"odd-empty", text("")},
		{"odd-null", text("null")},
		{"odd-array", text("[]")},
		{"odd-broken", text(`{"type":"message","chatJid":`)},
		{"odd-nested", text(strings.Repeat(`{"a":`, 200_000))},
		{"odd-many-keys", text(`{"type":"odd-many-keys",` + strings.Repeat(`"k":1,`, 100_000) + `"k":1}`)},
		{"odd-2-MiB", text(`{"type":"message","text":"` + strings.Repeat("x", 2<<20) + `"}`)},
		{"odd-sparse-1-TiB", func(p string) error {
			if err := os.WriteFile(p+".part", nil, 0o644); err != nil {
				return err
			}
			if err := os.Truncate(p+".part", 1<<40); err != nil {
				return err
			}
			return os.Rename(p+".part", p)
		}},
		{"odd-id", text(`{"type":"message","chatJid":"odd-id","text":"x","requestId":"../../../canary/canary-0"}`)},
	} {
		name, _, _ := strings.Cut(o.name, "\n")
		tell(clean(name), o.make(in("messages", o.name)))
	}
	for _, o := range []struct {
		folder, name, target string
	}{
		{"frames", "00000000000000000001", canary + "/frame"},
		{"frames", "99999999999999999999", canary + "/frame"},
	} {
		tell("link in "+o.folder+" "+o.name, os.Symlink(o.target, in(o.folder, o.name)))
	}
	for i := range 200 { // the next messages of the host
		_ = os.Symlink(canary+"/canary-0", fmt.Sprintf("%sinput/%020d.json", ipc, i+1))
	}
	tell("links in the place of the next messages", nil)
	tell("a forged frame", os.WriteFile(in("frames", "00000000000000000002"), fmt.Appendf(nil,
		`{"type":"output","status":"success","seq":2,"result":%q}`, joined("FORGED", "by", "file")), 0o644))
	tell("a deep tree of requests", deep(ipc+"messages/odd-deep.json", 500))
	tell("a deep tree of frames", deep(ipc+"frames/deep", 2000))
	tell("a deep tree of input", deep(ipc+"input/deep", 500))
	tell("an answer", os.WriteFile(ipc+"responses/mine.json", nil, 0o644))
}

// clean leaves what fits into a report.
func clean(name string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, name[:min(len(name), 24)])
}

func deep(top string, levels int) error {
	if err := os.Mkdir(top, 0o700); err != nil {
		return err
	}
	at, err := unix.Open(top, unix.O_DIRECTORY|unix.O_RDONLY, 0)
	for range levels {
		if err == nil {
			err = unix.Mkdirat(at, "d", 0o700)
		}
		if err != nil {
			return err
		}
		var next int
		next, err = unix.Openat(at, "d", unix.O_DIRECTORY|unix.O_RDONLY, 0)
		_ = unix.Close(at)
		at = next
	}
	_ = unix.Close(at)
	return err
}

// replace tries to put links to the canary where the host's folders are.
func replace() {
	for _, folder := range []string{"messages", "tasks", "input", "frames", "responses", "."} {
		path := filepath.Join(ipc, folder)
		rename := os.Rename(path, "/workspace/group/was")
		remove := unix.Rmdir(path)
		link := os.Symlink(os.Getenv("CANARY"), path)
		var err error
		if rename != nil && remove != nil && link != nil {
			err = fmt.Errorf("%s, %s, %s", reason(rename), reason(remove), reason(link))
		}
		tell("replace ipc/"+folder, err)
	}
	for _, name := range []string{"lease", "current_tasks.json", "available_groups.json"} {
		tell("overwrite "+name, os.WriteFile(ipc+name, []byte("x"), 0o644))
		tell("remove "+name, os.Remove(ipc+name))
		tell("re-date "+name, os.Chtimes(ipc+name, time.Time{}, time.Now().Add(1e6*time.Hour)))
		tmp := ipc + "messages/.replacement"
		_ = os.Symlink(os.Getenv("CANARY")+"/canary-0", tmp)
		tell("rename a link over "+name, os.Rename(tmp, ipc+name))
	}
}

// flood keeps the host busy with files until then.
func flood(until time.Time) {
	chat, other := os.Getenv("CHAT"), os.Getenv("OTHER")
	running := func() bool { return time.Now().Before(until) }
	var wg sync.WaitGroup
	var made [3]int
	for i, folder := range []string{"messages", "tasks", "frames"} {
		most := []int{100_000, 10_000, 10_000}[i]
		wg.Go(func() {
			for n := range most {
				if !running() {
					break
				}
				to := chat
				if n%2 == 0 {
					to = other
				}
				data := fmt.Sprintf(`{"type":"message","chatJid":%q,"text":"flood %d","status":"success","result":"FORGED-%s","seq":%d}`, to, n, folder, n)
				if os.WriteFile(fmt.Sprintf("%s%s/%d.json", ipc, folder, n), []byte(data), 0o644) == nil {
					made[i]++
				}
			}
		})
	}
	// A file that goes on changing after the host took it.
	changed := 0
	wg.Go(func() {
		for ; running(); changed++ {
			f, err := os.Create(ipc + "messages/.changing")
			if err != nil {
				continue
			}
			fmt.Fprintf(f, `{"type":"message","chatJid":%q,"text":"changing"}`, other)
			_ = os.Rename(f.Name(), fmt.Sprintf("%smessages/0-changing-%d.json", ipc, changed))
			for i := range 200 {
				_ = f.Truncate(int64(i%3) << 30)
				_, _ = f.WriteAt([]byte(fmt.Sprintf(`{"type":"register_group","i":%d}`, i)), 0)
				time.Sleep(100 * time.Microsecond)
			}
			_ = f.Close()
		}
	})
	// A name that is a file at one instant and a link out at the next.
	exchanged := 0
	wg.Go(func() {
		a, b := ipc+"messages/0-race.json", ipc+"messages/.race"
		for ; running(); exchanged++ {
			if exchanged%16 == 0 {
				_ = os.WriteFile(a, []byte(`{"type":"nothing"}`), 0o644)
				_ = os.Remove(b)
				_ = os.Symlink(os.Getenv("CANARY")+"/canary-0", b)
			}
			_ = unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
		}
	})
	// Events for whoever watches, and nothing behind them.
	vanished := 0
	wg.Go(func() {
		for ; running(); vanished++ {
			name := fmt.Sprintf("%stasks/0-vanish-%d.json", ipc, rand.Uint32())
			_ = os.WriteFile(name, nil, 0o644)
			_ = os.Remove(name)
		}
	})
	wg.Wait()
	tell("a flood of requests", nil, fmt.Sprintf("%d files", made[0]))
	tell("a flood of tasks", nil, fmt.Sprintf("%d files", made[1]))
	tell("a flood of forged frames", nil, fmt.Sprintf("%d files", made[2]))
	tell("files that change while they are read", nil, fmt.Sprintf("%d files", changed))
	tell("a file that becomes a link while it is read", nil, fmt.Sprintf("%d times", exchanged))
	tell("files that vanish while they are read", nil, fmt.Sprintf("%d files", vanished))
}
