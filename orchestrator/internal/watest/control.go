package watest

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/types"
)

// Command is one step for a double in another process. People are named by their
// numbers, groups by subject or JID; to is either.
type Command struct {
	Number  string   `json:"number,omitempty"` // who acts or is asked
	Name    string   `json:"name,omitempty"`
	To      string   `json:"to,omitempty"`
	Mode    string   `json:"mode,omitempty"` // lid (default) or pn
	Members []string `json:"members,omitempty"`
	Text    string   `json:"text,omitempty"`
	ID      string   `json:"id,omitempty"`
	Sender  string   `json:"sender,omitempty"` // number of who sent what is quoted or reacted to
	Quoted  string   `json:"quoted,omitempty"`
	Mention []string `json:"mention,omitempty"`
	Age     int      `json:"age,omitempty"`     // seconds
	Timeout int      `json:"timeout,omitempty"` // seconds, at most 30
	Count   int      `json:"count,omitempty"`
	Code    int      `json:"code,omitempty"`
	Kind    string   `json:"kind,omitempty"`
	Data    []byte   `json:"data,omitempty"` // base64
	Corrupt bool     `json:"corrupt,omitempty"`
}

// Reply answers a command.
type Reply struct {
	Error    string    `json:"error,omitempty"`
	ID       string    `json:"id,omitempty"`
	JID      string    `json:"jid,omitempty"`
	LID      string    `json:"lid,omitempty"`
	Count    int       `json:"count,omitempty"`
	Messages []Read    `json:"messages,omitempty"`
	Receipts []Receipt `json:"receipts,omitempty"`
	Typing   *Typing   `json:"typing,omitempty"`
	Verbs    []string  `json:"verbs,omitempty"`
}

// Read is a message as a control tells it.
type Read struct {
	ID       string   `json:"id"`
	Chat     string   `json:"chat"`
	From     string   `json:"from"`
	Text     string   `json:"text"`
	Edit     string   `json:"edit,omitempty"`
	Retry    int      `json:"retry,omitempty"`
	Quotes   string   `json:"quotes,omitempty"`
	Mentions []string `json:"mentions,omitempty"`
	Media    string   `json:"media,omitempty"` // base64 of the decrypted file
}

type verb func(ctx context.Context, s *Server, c Command) (Reply, error)

var verbs = map[string]verb{
	"phone": func(_ context.Context, s *Server, c Command) (Reply, error) {
		p := s.Phone(c.Number)
		return Reply{JID: p.JID().String(), LID: p.LID().String()}, nil
	},
	"peer": func(_ context.Context, s *Server, c Command) (Reply, error) {
		d := s.Peer(c.Number, c.Name)
		return Reply{JID: d.JID().String(), LID: d.LID().String()}, nil
	},
	"group": func(_ context.Context, s *Server, c Command) (Reply, error) {
		var members []Member
		for _, number := range c.Members {
			d, err := s.person(number)
			if err != nil {
				return Reply{}, err
			}
			members = append(members, d)
		}
		mode := LID
		if c.Mode == string(PN) {
			mode = PN
		}
		return Reply{JID: s.Group(mode, c.Name, members...).JID.String()}, nil
	},
	"scan":  withPhone(func(ctx context.Context, p *Phone, c Command) (Reply, error) { return Reply{}, p.TryScan(ctx, c.Text) }),
	"enter": withPhone(func(ctx context.Context, p *Phone, c Command) (Reply, error) { return Reply{}, p.TryCode(ctx, c.Text) }),
	"passkey": withPhone(func(_ context.Context, p *Phone, _ Command) (Reply, error) {
		p.RequirePasskey()
		return Reply{}, nil
	}),
	"online":  withPhone(func(ctx context.Context, p *Phone, _ Command) (Reply, error) { p.Online(ctx); return Reply{}, nil }),
	"offline": withPhone(func(ctx context.Context, p *Phone, _ Command) (Reply, error) { p.Offline(ctx); return Reply{}, nil }),
	"drained": withPhone(func(ctx context.Context, p *Phone, _ Command) (Reply, error) { p.Drained(ctx); return Reply{}, nil }),
	"waiting": withPhone(func(_ context.Context, p *Phone, _ Command) (Reply, error) { return Reply{Count: p.Waiting()}, nil }),
	"logins":  withPhone(func(_ context.Context, p *Phone, _ Command) (Reply, error) { return Reply{Count: p.Logins()}, nil }),
	"unlink":  withPhone(func(_ context.Context, p *Phone, _ Command) (Reply, error) { p.Unlink(); return Reply{}, nil }),

	"send": withChat(func(s *Server, d *Device, to Chat, c Command, opts []Option) Reply {
		return Reply{ID: d.SendText(to, c.Text, opts...)}
	}),
	"edit": withChat(func(s *Server, d *Device, to Chat, c Command, _ []Option) Reply {
		if c.Kind == "secret" {
			return Reply{ID: d.EditSecret(to, c.ID, c.Text)}
		}
		return Reply{ID: d.Edit(to, c.ID, c.Text)}
	}),
	"revoke": withChat(func(s *Server, d *Device, to Chat, c Command, _ []Option) Reply {
		return Reply{ID: d.Revoke(to, c.ID)}
	}),
	"image": withChat(func(s *Server, d *Device, to Chat, c Command, opts []Option) Reply {
		return Reply{ID: d.SendImage(to, c.Data, c.Kind, c.Text, opts...)}
	}),
	"document": withChat(func(s *Server, d *Device, to Chat, c Command, opts []Option) Reply {
		return Reply{ID: d.SendDocument(to, c.Data, c.Kind, c.Name, c.Text, opts...)}
	}),
	"voice": withChat(func(s *Server, d *Device, to Chat, c Command, opts []Option) Reply {
		return Reply{ID: d.SendVoice(to, c.Data, uint32(c.Count), opts...)}
	}),
	"type": withChat(func(s *Server, d *Device, to Chat, c Command, _ []Option) Reply {
		d.Type(to, types.ChatPresence(c.Kind))
		return Reply{}
	}),
	"resend": func(_ context.Context, s *Server, c Command) (Reply, error) {
		d, err := s.person(c.Number)
		if err == nil {
			d.Resend(c.ID)
		}
		return Reply{}, err
	},
	"received": func(ctx context.Context, s *Server, c Command) (Reply, error) {
		d, err := s.person(c.Number)
		if err != nil {
			return Reply{}, err
		}
		m, err := d.next(ctx)
		if err != nil {
			return Reply{}, err
		}
		read, err := s.told(ctx, m)
		return Reply{Messages: []Read{read}}, err
	},
	"messages": func(ctx context.Context, s *Server, c Command) (Reply, error) {
		d, err := s.person(c.Number)
		if err != nil {
			return Reply{}, err
		}
		reply := Reply{Count: d.Duplicates()}
		for _, m := range d.Messages() {
			read, err := s.told(ctx, m)
			if err != nil {
				return Reply{}, err
			}
			reply.Messages = append(reply.Messages, read)
		}
		return reply, nil
	},
	"receipts": func(_ context.Context, s *Server, c Command) (Reply, error) {
		d, err := s.person(c.Number)
		if err != nil {
			return Reply{}, err
		}
		return Reply{Receipts: d.Receipts()}, nil
	},
	"receipt": func(ctx context.Context, s *Server, c Command) (Reply, error) {
		d, err := s.person(c.Number)
		if err == nil {
			d.Receipt(ctx, c.ID, c.Kind)
		}
		return Reply{}, err
	},
	"typing": func(ctx context.Context, s *Server, c Command) (Reply, error) {
		d, err := s.person(c.Number)
		if err != nil {
			return Reply{}, err
		}
		typing := d.SawTyping(ctx)
		return Reply{Typing: &typing}, nil
	},
	"rename": withGroup(func(g *Group, by *Device, c Command) { g.Rename(by, c.Text) }),
	"add": func(ctx context.Context, s *Server, c Command) (Reply, error) {
		return change(s, c, func(g *Group, by, who *Device) { g.Add(by, who) })
	},
	"remove": func(ctx context.Context, s *Server, c Command) (Reply, error) {
		return change(s, c, func(g *Group, by, who *Device) { g.Remove(by, who) })
	},

	"disconnect":     fault(func(s *Server, _ Command) { s.Disconnect() }),
	"down":           fault(func(s *Server, _ Command) { s.Down() }),
	"up":             fault(func(s *Server, _ Command) { s.Up() }),
	"stream-error":   fault(func(s *Server, c Command) { s.StreamError(c.Code, c.Kind) }),
	"refuse-logins":  fault(func(s *Server, c Command) { s.RefuseLogins(&Failure{Reason: c.Code, Code: c.Count, Expire: c.Age}) }),
	"accept-logins":  fault(func(s *Server, _ Command) { s.RefuseLogins(nil) }),
	"refuse-login":   fault(func(s *Server, c Command) { s.RefuseNextLogin(Failure{Reason: c.Code, Code: c.Count, Expire: c.Age}) }),
	"refuse-message": fault(func(s *Server, c Command) { s.RefuseNextMessage(c.Code) }),
	"drop-acks":      fault(func(s *Server, c Command) { s.DropAcks(c.Count) }),
	"drop-messages":  fault(func(s *Server, c Command) { s.DropMessages(c.Count) }),
	"hold":           fault(func(s *Server, _ Command) { s.Hold() }),
	"release":        fault(func(s *Server, _ Command) { s.Release() }),
	"fail-queries":   fault(func(s *Server, c Command) { s.FailQueries(c.Kind, c.Code) }),
	"revision":       fault(func(s *Server, c Command) { s.Revision(uint32(c.Code), c.Kind == "required") }),
	"expire-media":   fault(func(s *Server, _ Command) { s.ExpireMedia() }),
	"silence":        fault(func(s *Server, c Command) { s.Silence(c.Count > 0) }),
	"held": func(ctx context.Context, s *Server, c Command) (Reply, error) {
		s.Held(ctx, max(c.Count, 1))
		return Reply{}, nil
	},
	"dials": func(_ context.Context, s *Server, _ Command) (Reply, error) { return Reply{Count: s.Dials()}, nil },
}

// Control serves POST /{verb} with a Command, and GET / with all verbs. It is for
// a server that was made by Serve.
func (s *Server) Control() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, Reply{Verbs: slices.Sorted(maps.Keys(verbs))})
	})
	mux.HandleFunc("POST /{verb}", func(w http.ResponseWriter, r *http.Request) {
		do, ok := verbs[r.PathValue("verb")]
		if !ok {
			http.Error(w, `{"error":"no such verb"}`, http.StatusNotFound)
			return
		}
		decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, mediaLimit))
		decoder.DisallowUnknownFields()
		var c Command
		if err := decoder.Decode(&c); err != nil {
			answer(w, Reply{Error: err.Error()})
			return
		}
		ctx, cancel := r.Context(), context.CancelFunc(func() {})
		if c.Timeout > 0 {
			ctx, cancel = context.WithTimeout(ctx, time.Duration(c.Timeout)*time.Second)
		}
		defer cancel()
		reply, err := carryOut(ctx, do, s, c)
		if err != nil {
			reply = Reply{Error: err.Error()}
		}
		answer(w, reply)
	})
	return mux
}

func answer(w http.ResponseWriter, reply Reply) {
	w.Header().Set("Content-Type", "application/json")
	if reply.Error != "" {
		w.WriteHeader(http.StatusConflict)
	}
	_ = json.NewEncoder(w).Encode(reply)
}

// carryOut turns what would fail a test into an error.
func carryOut(ctx context.Context, do verb, s *Server, c Command) (reply Reply, err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case error:
			err = r
		default:
			panic(r)
		}
	}()
	return do(ctx, s, c)
}

// Hook is what a daemon in another process has to be given.
type Hook struct {
	URL  string `json:"url"`  // stands for all of WhatsApp's hosts
	Root string `json:"root"` // hexadecimal, in place of WhatsApp's root key
}

// Hook tells how to reach this server.
func (s *Server) Hook() Hook {
	root := Root()
	return Hook{URL: s.URL(), Root: hex.EncodeToString(root[:])}
}

func (s *Server) person(number string) (*Device, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := s.accounts[number]; a != nil {
		if d := a.device(0); d != nil && d.sim != nil {
			return d.sim, nil
		}
	}
	return nil, fmt.Errorf("nobody has the number %q", number)
}

func (s *Server) chat(name string) (Chat, error) {
	if d, err := s.person(name); err == nil {
		return d, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.group(name)
}

func withPhone(do func(context.Context, *Phone, Command) (Reply, error)) verb {
	return func(ctx context.Context, s *Server, c Command) (Reply, error) {
		d, err := s.person(c.Number)
		if err != nil {
			return Reply{}, err
		}
		return do(ctx, &Phone{Device: d}, c)
	}
}

func withChat(do func(*Server, *Device, Chat, Command, []Option) Reply) verb {
	return func(_ context.Context, s *Server, c Command) (Reply, error) {
		d, err := s.person(c.Number)
		if err != nil {
			return Reply{}, err
		}
		to, err := s.chat(c.To)
		if err != nil {
			return Reply{}, err
		}
		var opts []Option
		if c.ID != "" && c.Sender == "" {
			opts = append(opts, ID(c.ID))
		}
		if c.Age > 0 {
			opts = append(opts, At(time.Now().Add(-time.Duration(c.Age)*time.Second)))
		}
		if c.Corrupt {
			opts = append(opts, Corrupt())
		}
		for _, number := range c.Mention {
			who, err := s.person(number)
			if err != nil {
				return Reply{}, err
			}
			opts = append(opts, Mention(who))
		}
		if c.Sender != "" {
			sender, err := s.person(c.Sender)
			if err != nil {
				return Reply{}, err
			}
			opts = append(opts, Quote(sender.addressIn(to), c.ID, &waE2E.Message{Conversation: new(c.Quoted)}))
		}
		return do(s, d, to, c, opts), nil
	}
}

func withGroup(do func(*Group, *Device, Command)) verb {
	return func(_ context.Context, s *Server, c Command) (Reply, error) {
		by, err := s.person(c.Number)
		if err != nil {
			return Reply{}, err
		}
		s.mu.Lock()
		g, err := s.group(c.To)
		s.mu.Unlock()
		if err != nil {
			return Reply{}, err
		}
		do(g, by, c)
		return Reply{}, nil
	}
}

func change(s *Server, c Command, do func(g *Group, by, who *Device)) (Reply, error) {
	for _, number := range c.Members {
		who, err := s.person(number)
		if err != nil {
			return Reply{}, err
		}
		if _, err := withGroup(func(g *Group, by *Device, _ Command) { do(g, by, who) })(context.Background(), s, c); err != nil {
			return Reply{}, err
		}
	}
	return Reply{}, nil
}

func fault(do func(*Server, Command)) verb {
	return func(_ context.Context, s *Server, c Command) (Reply, error) {
		do(s, c)
		return Reply{}, nil
	}
}

func (s *Server) told(ctx context.Context, m Message) (Read, error) {
	read := Read{ID: m.ID, Chat: m.Chat.String(), From: m.From.String(), Text: m.Text, Edit: m.Edit, Retry: m.Retry}
	info := m.Proto.GetExtendedTextMessage().GetContextInfo()
	read.Quotes, read.Mentions = info.GetStanzaID(), info.GetMentionedJID()
	var data []byte
	var err error
	switch {
	case m.Proto.GetImageMessage() != nil:
		data, err = s.download(ctx, m.Proto.GetImageMessage())
	case m.Proto.GetDocumentMessage() != nil:
		data, err = s.download(ctx, m.Proto.GetDocumentMessage())
	case m.Proto.GetDocumentWithCaptionMessage() != nil:
		data, err = s.download(ctx, m.Proto.GetDocumentWithCaptionMessage().GetMessage().GetDocumentMessage())
	case m.Proto.GetAudioMessage() != nil:
		data, err = s.download(ctx, m.Proto.GetAudioMessage())
	case m.Proto.GetVideoMessage() != nil:
		data, err = s.download(ctx, m.Proto.GetVideoMessage())
	}
	read.Media = base64.StdEncoding.EncodeToString(data)
	return read, err
}
