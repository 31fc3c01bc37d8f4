package sqlite

import (
	"errors"
	"sync"
	"testing"
	"time"

	"berth/orchestrator/internal/berth"
)

func TestUpdateGroup(t *testing.T) {
	db := open(t)
	ctx := t.Context()
	g := berth.Group{JID: chat, Name: "Family", Folder: "family", Trigger: "@Bot", RequiresTrigger: true, AddedAt: time.Unix(1, 0).UTC(),
		Container: berth.ContainerConfig{MemoryMiB: 512}}
	check(t, db.AddGroup(ctx, g))
	want := g
	want.Name, want.Trigger, want.RequiresTrigger, want.Container.Pids = "Kin", "", false, 99
	got, err := db.UpdateGroup(ctx, "family", func(old berth.Group) (berth.Group, error) {
		diff(t, "before", old, g)
		return want, nil
	})
	check(t, err)
	diff(t, "after", got, want)
	diff(t, "stored", must2(db.Groups(ctx))(t), []berth.Group{want})

	no := berth.Errorf(berth.Invalid, "no")
	_, err = db.UpdateGroup(ctx, "family", func(old berth.Group) (berth.Group, error) { old.Name = "x"; return old, no })
	if !errors.Is(err, no) {
		t.Errorf("got %v, want the change's own error", err)
	}
	diff(t, "stored after a refusal", must2(db.Groups(ctx))(t), []berth.Group{want})
	for _, folder := range []string{"none", "FAMILY", ""} {
		_, err := db.UpdateGroup(ctx, folder, func(old berth.Group) (berth.Group, error) { return old, nil })
		diff(t, "kind", kindOf(err), berth.NotFound)
	}
}

// W57: folders that differ in case alone would be one on some disks; all others
// are different groups.
func TestW57FoldersDiffer(t *testing.T) {
	db := open(t)
	for jid, folder := range map[string]string{"a": "team_a", "b": "team-a"} {
		check(t, db.AddGroup(t.Context(), berth.Group{JID: jid, Folder: folder, AddedAt: time.Unix(1, 0)}))
	}
	err := db.AddGroup(t.Context(), berth.Group{JID: "c", Folder: "Team_A", AddedAt: time.Unix(1, 0)})
	diff(t, "kind", kindOf(err), berth.Conflict)
	diff(t, "groups", len(must2(db.Groups(t.Context()))(t)), 2)
}

// Of changes at the same time each is carried out on what the others left.
func TestUpdateGroupAtTheSameTime(t *testing.T) {
	db := open(t)
	check(t, db.AddGroup(t.Context(), berth.Group{JID: chat, Folder: "family", AddedAt: time.Unix(1, 0)}))
	const writers = 20
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			_, err := db.UpdateGroup(t.Context(), "family", func(g berth.Group) (berth.Group, error) {
				g.Container.Pids++
				return g, nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	diff(t, "changes", must2(db.Groups(t.Context()))(t)[0].Container.Pids, int64(writers))
}
