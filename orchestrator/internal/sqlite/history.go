package sqlite

import (
	"context"
	"database/sql"
	"encoding/hex"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"

	"berth/orchestrator/internal/berth"
)

const (
	maxQuery   = 1000 // bytes
	maxTerms   = 16
	maxFound   = 50
	indexStep  = 64       // messages indexed in one transaction, at most
	indexBytes = 16 << 10 // characters of them, but for one that is longer
	indexMerge = 16       // pages of the index that it tidies up besides
	maxScanned = 20_000   // messages looked at where the index does not help
	maxRead    = 4 << 20  // bytes of messages that one search reads

	lastOfAll = 1 << 62 // a number behind all messages
)

// SearchHistory returns up to limit messages of a chat, newest first, that hold
// all words of query, in any order, in their text or their sender's name; those
// between double quotes stand together, and word* is the beginning of a word. What
// an agent said is among them, with the number 0 where the channel keeps no message
// of it. Only messages before the sequence number are searched, unless that is 0.
// Nothing else in query has a meaning. The error is of kind berth.Invalid if query
// names no word, or more than 16, or has more than 1 000 bytes.
//
// Of other chats it takes no notice, also not in its time. To find the beginning of
// a word in the index would take as long as there are such words in all chats; so
// that, and scripts without blanks, are looked for in the newest 20 000 messages, of
// long ones in fewer.
func (db *DB) SearchHistory(ctx context.Context, chatJID, query string, before int64, limit int) ([]berth.Message, error) {
	terms, err := parseQuery(query)
	if err != nil {
		return nil, err
	}
	limit = min(max(limit, 1), maxFound)
	if before <= 0 {
		before = lastOfAll
	}
	messages, answers := foundMessages, foundAnswers
	args := []any{chatJID, before, limit, `chat : "` + hex.EncodeToString([]byte(chatJID)) + `" AND {sender content} : (` + ftsQuery(terms) + `)`}
	holds := func(berth.Message) bool { return true }
	if strings.ContainsFunc(query, unspaced) || slices.ContainsFunc(terms, func(t term) bool { return t.begin }) {
		messages, answers, args, holds = lastMessages, lastAnswers, []any{chatJID, before, maxScanned}, holdsAll(terms)
	} else if err := db.indexHistory(ctx, chatJID); err != nil {
		return nil, err
	}
	return db.newest(ctx, []string{messages, answers}, args, limit, holds)
}

// The queries of a search, each newest first, of ?1 the chat before message ?2, at
// most ?3. An answer is before a message if it is older.
const (
	lastMessages  = `SELECT ` + messageColumns + ` FROM messages WHERE chat_jid = ?1 AND seq < ?2 ORDER BY seq DESC LIMIT ?3`
	foundMessages = `SELECT ` + messageColumns + ` FROM messages WHERE chat_jid = ?1
		AND seq IN (SELECT rowid FROM history WHERE history MATCH ?4 AND rowid > 0 AND rowid < ?2 ORDER BY rowid DESC LIMIT ?3) ORDER BY seq DESC`

	answerColumns = `SELECT 0, message_id, chat_jid, '', '', text, created_at, 1, 1, 0 FROM outbox`
	agents        = `state = 'sent' AND kind <> 'notice'` // what an agent said
	unkept        = ` AND ` + agents + ` AND NOT EXISTS (SELECT 1 FROM messages m WHERE m.chat_jid = outbox.chat_jid AND m.id = outbox.message_id)`
	older         = ` AND created_at < coalesce((SELECT timestamp FROM messages WHERE seq = ?2 AND chat_jid = ?1), '~')`
	lastAnswers   = answerColumns + ` WHERE chat_jid = ?1` + unkept + older + ` ORDER BY id DESC LIMIT ?3`
	foundAnswers  = answerColumns + ` WHERE chat_jid = ?1
		AND id IN (SELECT -rowid FROM history WHERE history MATCH ?4 AND rowid < 0)` + older + ` ORDER BY id DESC LIMIT ?3`
)

// Recent returns the newest messages of a chat, oldest first, at most limit, those
// of its agents included.
func (db *DB) Recent(ctx context.Context, chatJID string, limit int) ([]berth.Message, error) {
	out, err := db.newest(ctx, []string{lastMessages, lastAnswers}, []any{chatJID, lastOfAll, limit}, limit, func(berth.Message) bool { return true })
	slices.Reverse(out)
	return out, err
}

// newest returns what the queries find and for which holds is true, at most limit,
// newest first.
func (db *DB) newest(ctx context.Context, queries []string, args []any, limit int, holds func(berth.Message) bool) ([]berth.Message, error) {
	var out []berth.Message
	for _, query := range queries {
		rows, err := db.read.QueryContext(ctx, query, args...)
		if err != nil {
			return nil, explain(err)
		}
		list, err := pick(rows, limit, holds)
		if err != nil {
			return nil, err
		}
		out = append(out, list...)
	}
	slices.SortStableFunc(out, func(a, b berth.Message) int { return b.Time.Compare(a.Time) })
	return out[:min(limit, len(out))], nil
}

// indexHistory brings the index of a chat up to date.
func (db *DB) indexHistory(ctx context.Context, chatJID string) error {
	// Mostly there is nothing to do, and then nobody has to wait for the writer.
	var done bool
	err := db.read.QueryRowContext(ctx, `SELECT NOT EXISTS (SELECT 1 FROM messages WHERE chat_jid = ?1
			AND seq > coalesce((SELECT seq FROM history_upto WHERE chat_jid = ?1), 0))
		AND NOT EXISTS (SELECT 1 FROM outbox WHERE chat_jid = ?1
			AND id > coalesce((SELECT outbox FROM history_upto WHERE chat_jid = ?1), 0) AND `+agents+`)`, chatJID).Scan(&done)
	for err == nil && !done {
		err = db.writer.do(ctx, func(x *tx) error {
			done, err = x.indexSome(chatJID)
			return err
		})
	}
	return explain(err)
}

// indexSome indexes as much as one transaction should, so that nobody who has a
// message to store waits long for it; done is true if nothing is left.
func (x *tx) indexSome(chatJID string) (done bool, err error) {
	if err := x.exec(`INSERT INTO history_upto (chat_jid) VALUES (?) ON CONFLICT DO NOTHING`, chatJID); err != nil {
		return false, err
	}
	var seq, outbox, lastSeq, lastOut int64
	if _, err := x.get([]any{&seq, &outbox, &lastSeq, &lastOut}, `SELECT seq, outbox,
		coalesce((SELECT max(seq) FROM (
			SELECT seq, sum(size) OVER (ORDER BY seq) - size AS before FROM (
				SELECT seq, length(content) AS size FROM messages WHERE chat_jid = ?1 AND seq > u.seq ORDER BY seq LIMIT ?2)
			) WHERE before < ?3), seq),
		coalesce((SELECT max(id) FROM (
			SELECT id, sum(size) OVER (ORDER BY id) - size AS before FROM (
				SELECT id, length(text) AS size FROM outbox WHERE chat_jid = ?1 AND id > u.outbox AND `+agents+` ORDER BY id LIMIT ?2)
			) WHERE before < ?3), outbox)
		FROM history_upto u WHERE chat_jid = ?1`, chatJID, indexStep, indexBytes); err != nil {
		return false, err
	}
	if err := x.exec(`INSERT INTO history (rowid, chat, sender, content)
		SELECT seq, hex(chat_jid), sender_name, content FROM messages WHERE chat_jid = ? AND seq > ? AND seq <= ?`, chatJID, seq, lastSeq); err != nil {
		return false, err
	}
	if err := x.exec(`INSERT INTO history (rowid, chat, sender, content)
		SELECT -id, hex(chat_jid), '', text FROM outbox WHERE chat_jid = ? AND id > ? AND id <= ?`+unkept, chatJID, outbox, lastOut); err != nil {
		return false, err
	}
	if err := x.exec(`INSERT INTO history (history, rank) VALUES ('merge', ?)`, indexMerge); err != nil {
		return false, err
	}
	return seq == lastSeq && outbox == lastOut, x.exec(`UPDATE history_upto SET seq = ?, outbox = ? WHERE chat_jid = ?`, lastSeq, lastOut, chatJID)
}

// pick returns the first messages for which holds is true, at most limit. It reads
// no more than maxRead, and keeps no other in memory.
func pick(rows *sql.Rows, limit int, holds func(berth.Message) bool) (out []berth.Message, err error) {
	defer rows.Close()
	for read := 0; len(out) < limit && read < maxRead && rows.Next(); {
		m, err := scanMessage(rows)
		if err != nil {
			return nil, err
		}
		read += len(m.Text)
		if holds(m) {
			out = append(out, m)
		}
	}
	return out, explain(rows.Err())
}

// holdsAll returns what finds the terms without an index.
func holdsAll(terms []term) func(berth.Message) bool {
	parts := make([]string, len(terms))
	for i, t := range terms {
		switch parts[i] = words(t.text); {
		case strings.ContainsFunc(t.text, unspaced):
			parts[i] = strings.TrimSpace(parts[i])
		case t.begin:
			parts[i] = strings.TrimSuffix(parts[i], " ")
		}
	}
	return func(m berth.Message) bool {
		text := words(m.SenderName + "\n" + m.Text)
		return !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(text, part) })
	}
}

// words returns the words of a text with a blank around each, without what the
// index does not tell apart: case, accents, and what stands between words.
func words(text string) string {
	plain := strings.Map(func(r rune) rune {
		if '\u0300' <= r && r <= '\u036f' {
			return -1
		}
		return r
	}, norm.NFD.String(strings.ToLower(text)))
	between := func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsNumber(r) && !unicode.IsMark(r) && !unicode.Is(unicode.Co, r)
	}
	return " " + strings.Join(strings.FieldsFunc(norm.NFC.String(plain), between), " ") + " "
}

// unspaced reports whether a script has no blanks between words.
func unspaced(r rune) bool {
	return unicode.In(r, unicode.Han, unicode.Hiragana, unicode.Katakana, unicode.Thai, unicode.Lao, unicode.Khmer, unicode.Myanmar)
}

// term is a word, or several that stand together.
type term struct {
	text  string
	begin bool // of a word
}

// parseQuery takes a query apart; no text is a fault of syntax.
func parseQuery(query string) (terms []term, err error) {
	if len(query) > maxQuery || !utf8.ValidString(query) {
		return nil, berth.Errorf(berth.Invalid, "the query has %d bytes and may have %d of plain text", len(query), maxQuery)
	}
	for i, part := range strings.Split(strings.ReplaceAll(query, "\x00", " "), `"`) {
		words := []string{part}
		if i%2 == 0 { // not between quotes; one that is never closed reaches to the end
			words = strings.Fields(part)
		}
		for _, word := range words {
			text := strings.TrimSpace(strings.TrimRight(word, "*"))
			if !strings.ContainsFunc(text, func(r rune) bool { return unicode.IsLetter(r) || unicode.IsNumber(r) || unicode.Is(unicode.Co, r) }) {
				continue // the index has no word for it
			}
			terms = append(terms, term{text, strings.HasSuffix(word, "*")})
		}
	}
	switch {
	case len(terms) == 0:
		return nil, berth.Errorf(berth.Invalid, "the query names no word: give one or more words that the messages hold")
	case len(terms) > maxTerms:
		return nil, berth.Errorf(berth.Invalid, "the query names %d words and may name %d: give fewer", len(terms), maxTerms)
	}
	return terms, nil
}

// ftsQuery quotes each term, so that nothing in it is an operator.
func ftsQuery(terms []term) string {
	var out []string
	for _, t := range terms {
		quoted := `"` + t.text + `"` // it has no quotes: they separate terms
		if t.begin {
			quoted += "*"
		}
		out = append(out, quoted)
	}
	return strings.Join(out, " AND ")
}
