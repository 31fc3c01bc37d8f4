package whatsapp

import (
	"context"
	"sync"

	"go.mau.fi/whatsmeow/types"
	"go.mau.fi/whatsmeow/types/events"
	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/whatsapp/waid"
)

// warm remembers who has written to the account. Accounts that write to others
// first get locked, so Berth does not.
type warm struct {
	mu    sync.Mutex
	wrote map[string]bool // by address, each that is known
}

func (c *Channel) readWarm(ctx context.Context) error {
	rows, err := c.db.QueryContext(ctx, `SELECT address FROM berth_wrote`)
	if err != nil {
		return err
	}
	defer rows.Close()
	c.warm.wrote = make(map[string]bool)
	for rows.Next() {
		var address string
		if err := rows.Scan(&address); err != nil {
			return err
		}
		c.warm.wrote[address] = true
	}
	return rows.Err()
}

// wrote notes that people wrote to the account.
func (c *Channel) wrote(people ...waid.Person) {
	c.warm.mu.Lock()
	defer c.warm.mu.Unlock()
	var fresh []string
	for _, p := range people {
		for _, j := range []types.JID{p.LID, p.PN} {
			if address := j.String(); !j.IsEmpty() && !c.warm.wrote[address] {
				fresh = append(fresh, address)
			}
		}
	}
	if len(fresh) == 0 {
		return
	}
	if err := c.noteWrote(fresh); err != nil { // the next message does it
		c.log.Warn("note who wrote", zap.Error(err))
		return
	}
	for _, address := range fresh {
		c.warm.wrote[address] = true
	}
}

func (c *Channel) noteWrote(addresses []string) error {
	tx, err := c.db.BeginTx(c.life, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	for _, address := range addresses {
		if _, err := tx.ExecContext(c.life, `INSERT INTO berth_wrote (address) VALUES (?) ON CONFLICT DO NOTHING`, address); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// readHistory learns from the phone's history who wrote before Berth was linked.
func (c *Channel) readHistory(e *events.HistorySync) {
	var people []waid.Person
	for _, chat := range e.Data.GetConversations() {
		jid, err := waid.Parse(chat.GetID())
		if err != nil || waid.IsGroup(jid) || !waid.Served(jid) {
			continue
		}
		wrote := len(chat.GetTcToken()) > 0 // what WhatsApp itself goes by
		for _, m := range chat.GetMessages() {
			wrote = wrote || !m.GetMessage().GetKey().GetFromMe()
		}
		if wrote {
			people = append(people, c.person(c.current(), jid, types.JID{}))
		}
	}
	c.wrote(people...)
}

// belongTo forgets who wrote to another account than the one that is linked now.
// Who wrote to this one may be answered, also when it is linked again.
func (c *Channel) belongTo(ctx context.Context, account string) {
	var before string
	if err := c.kept(ctx, keptAccount, &before); err == nil && before == account {
		return
	}
	c.coolDown(ctx)
	c.keep(ctx, keptAccount, account)
}

func (c *Channel) coolDown(ctx context.Context) {
	c.warm.mu.Lock()
	defer c.warm.mu.Unlock()
	clear(c.warm.wrote)
	if _, err := c.db.ExecContext(ctx, `DELETE FROM berth_wrote`); err != nil && ctx.Err() == nil {
		c.log.Warn("forget who wrote", zap.Error(err))
	}
}

// isCold reports whether a chat is with somebody who never wrote.
func (c *Channel) isCold(to types.JID) bool {
	if waid.IsGroup(to) {
		return false
	}
	p := c.person(c.current(), to, types.JID{})
	if p.Number() != "" && p.Number() == c.Number() { // a note to oneself
		return false
	}
	c.warm.mu.Lock()
	defer c.warm.mu.Unlock()
	return !c.warm.wrote[p.LID.String()] && !c.warm.wrote[p.PN.String()]
}

func cold(chat string) error {
	return berth.Errorf(berth.Denied, "%s has not written to this account yet, and WhatsApp locks accounts that write to people first: have them write once", chat)
}
