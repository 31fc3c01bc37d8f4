package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"go.uber.org/zap"

	"berth/orchestrator/internal/berth"
)

// provider is a model provider that groups may call with the operator's key.
type provider struct {
	name  string // the first part of its path, and its name in usage
	base  *url.URL
	paths []string // "METHOD /path"; {id} at its end stands for names, {name} for a single one without a colon
	free  []string // those of paths that cost nothing, besides those of GET
	query []string // "name=value" that a call may have behind its path, or "name=" for any value; nil: everything

	// trim is what a path may begin with besides what the base has.
	trim string
	// inclusive says that the provider counts cached input as input.
	inclusive bool
	// credential returns the key, or what the operator has to do to set one.
	credential func() (credential, string)
	// reply is the provider's own shape of an error.
	reply func(f fault, message string) any
}

// credential is a key and the headers that carry it. Neither header means that
// the provider needs none.
type credential struct {
	key    secret
	header string
	prefix string
	beta   string // has to be among Anthropic's betas
}

// The paths of providers are a closed list: with the key, others would lead to
// what is not this group's, such as files and batches that other groups made, or
// to calls that cost money and report no usage.
var (
	anthropicPaths = []string{
		"POST /v1/messages",
		"POST /v1/messages/count_tokens",
		"GET /v1/models",
		"GET /v1/models/{id}",
	}
	openAIPaths = []string{
		"POST /chat/completions",
		"POST /completions",
		"POST /responses",
		"POST /embeddings",
		"POST /moderations",
		"GET /models",
		"GET /models/{id}",
	}
	geminiPaths = []string{
		"POST /v1beta/models/{name}:generateContent",
		"POST /v1beta/models/{name}:streamGenerateContent",
		"POST /v1beta/models/{name}:countTokens",
		"POST /v1beta/models/{name}:embedContent",
		"POST /v1beta/models/{name}:batchEmbedContents",
		"GET /v1beta/models",
		"GET /v1beta/models/{name}",
	}
)

// geminiQuery leaves out what Google lets anybody put behind a path: another key,
// other headers, and which fields of the answer come back, its usage among them.
var geminiQuery = []string{"alt=sse", "alt=json", "pageSize=", "pageToken="}

func newAnthropic(c Config) (*provider, error) {
	const usual = "https://api.anthropic.com"
	base, err := baseURL("Anthropic's API", c.Anthropic.BaseURL, usual)
	if err != nil {
		return nil, err
	}
	return &provider{
		name: "anthropic", base: base, paths: anthropicPaths, free: []string{"POST /v1/messages/count_tokens"},
		credential: func() (credential, string) {
			if key := reveal(c.Anthropic.APIKey); key != "" {
				return credential{key: key, header: "X-Api-Key"}, ""
			}
			if token := reveal(c.Anthropic.OAuthToken); token != "" {
				return credential{key: token, header: "Authorization", prefix: "Bearer ", beta: "oauth-2025-04-20"}, ""
			}
			if base.String() != usual {
				return credential{}, ""
			}
			return credential{}, "there is no key for Anthropic on the host: the operator has to set ANTHROPIC_API_KEY or CLAUDE_CODE_OAUTH_TOKEN there and restart berth"
		},
		reply: func(f fault, message string) any {
			var v struct {
				Type  string  `json:"type"`
				Error refused `json:"error"`
			}
			v.Type, v.Error = "error", refused{Type: f.anthropic, Message: message}
			return v
		},
	}, nil
}

func newOpenAI(c Config) (*provider, error) {
	const usual = "https://api.openai.com/v1"
	base, err := baseURL("the OpenAI-compatible API", c.OpenAI.BaseURL, usual)
	if err != nil {
		return nil, err
	}
	return &provider{
		name: "openai", base: base, paths: openAIPaths, free: []string{"POST /moderations"}, trim: "/v1", inclusive: true,
		credential: func() (credential, string) {
			if key := reveal(c.OpenAI.APIKey); key != "" {
				return credential{key: key, header: "Authorization", prefix: "Bearer "}, ""
			}
			if base.String() != usual {
				return credential{}, "" // a server of the operator's own often needs none
			}
			return credential{}, "there is no key for OpenAI on the host: the operator has to set OPENAI_API_KEY there, or OPENAI_BASE_URL for another provider, and restart berth"
		},
		reply: func(f fault, message string) any {
			var v struct {
				Error struct {
					Message string  `json:"message"`
					Type    string  `json:"type"`
					Param   *string `json:"param"`
					Code    string  `json:"code"`
				} `json:"error"`
			}
			v.Error.Message, v.Error.Type, v.Error.Code = message, f.openAI, f.reason
			return v
		},
	}, nil
}

func newGemini(c Config) (*provider, error) {
	const usual = "https://generativelanguage.googleapis.com"
	base, err := baseURL("Google's API", c.Gemini.BaseURL, usual)
	if err != nil {
		return nil, err
	}
	return &provider{
		name: "gemini", base: base, paths: geminiPaths, query: geminiQuery, inclusive: true,
		free: []string{"POST /v1beta/models/{name}:countTokens"},
		credential: func() (credential, string) {
			if key := reveal(c.Gemini.APIKey); key != "" {
				return credential{key: key, header: "X-Goog-Api-Key"}, ""
			}
			if base.String() != usual {
				return credential{}, ""
			}
			return credential{}, "there is no key for Gemini on the host: the operator has to set GEMINI_API_KEY there and restart berth"
		},
		reply: func(f fault, message string) any {
			var v struct {
				Error struct {
					Code    int    `json:"code"`
					Message string `json:"message"`
					Status  string `json:"status"`
				} `json:"error"`
			}
			v.Error.Code, v.Error.Message, v.Error.Status = f.status, message, f.google
			return v
		},
	}, nil
}

func reveal(key func() string) secret {
	if key == nil {
		return ""
	}
	return secret(key())
}

// match returns the path at the provider, and which of its paths that is, if a
// group may call it.
func (p *provider) match(method, path string) (at, known string, ok bool) {
	if rest, ok := strings.CutPrefix(path, p.trim); ok && p.trim != "" && strings.HasPrefix(rest, "/") {
		path = rest
	}
	call := method + " " + path
	for _, known := range p.paths {
		if begin, ok := strings.CutSuffix(known, "{id}"); ok {
			id, ok := strings.CutPrefix(call, begin)
			if ok && len(id) <= 256 && !slices.ContainsFunc(strings.Split(id, "/"), func(part string) bool { return !plain(part) }) {
				return path, known, true
			}
		} else if begin, end, ok := strings.Cut(known, "{name}"); ok {
			rest, begins := strings.CutPrefix(call, begin)
			name, ends := strings.CutSuffix(rest, end)
			if begins && ends && len(name) <= 256 && plain(name) && !strings.Contains(name, ":") {
				return path, known, true
			}
		} else if call == known {
			return path, known, true
		}
	}
	return "", "", false
}

// asks returns what of a request's query the provider gets.
func (p *provider) asks(query string) string {
	if p.query == nil || query == "" {
		return query
	}
	var kept []string
	for pair := range strings.SplitSeq(query, "&") {
		name, value, _ := strings.Cut(pair, "=")
		if slices.Contains(p.query, pair) || slices.Contains(p.query, name+"=") && token(value) {
			kept = append(kept, pair)
		}
	}
	return strings.Join(kept, "&")
}

// token reports whether value means itself in any query.
func token(value string) bool {
	return strings.Trim(value, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == ""
}

// plain reports whether part is a name that means itself in any path.
func plain(part string) bool {
	for i := range len(part) {
		c := part[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (c < '0' || c > '9') && !strings.ContainsRune("._:-", rune(c)) {
			return false
		}
	}
	return strings.Trim(part, ".") != ""
}

// fault is one way in which the gateway itself fails a call to a provider.
type fault struct {
	status    int
	reason    string // in the header Berth-Reason, for engines that tell faults apart
	anthropic string // the error's type
	openAI    string
	google    string
	again     bool // trying again soon may help
}

var (
	faultPath        = fault{404, "path", "not_found_error", "invalid_request_error", "NOT_FOUND", false}
	faultKey         = fault{401, "no_key", "authentication_error", "authentication_error", "UNAUTHENTICATED", false}
	faultSize        = fault{413, "too_large", "request_too_large", "invalid_request_error", "INVALID_ARGUMENT", false}
	faultBudget      = fault{402, "budget", "billing_error", "insufficient_quota", "FAILED_PRECONDITION", false}
	faultBusy        = fault{429, "busy", "rate_limit_error", "rate_limit_error", "RESOURCE_EXHAUSTED", true}
	faultStore       = fault{503, "store", "api_error", "server_error", "UNAVAILABLE", true}
	faultUnreachable = fault{502, "unreachable", "api_error", "server_error", "UNAVAILABLE", true}
	faultSlow        = fault{504, "timeout", "timeout_error", "server_error", "DEADLINE_EXCEEDED", true}
)

// passed are the headers of a request that a provider gets. It is a closed list:
// a header in between could choose another account, another host or another
// method than the gateway looked at.
func passed(name string) bool {
	switch name {
	case "Accept", "Accept-Language", "Content-Type", "Idempotency-Key", "Http-Referer", "X-Title", "X-App", "Openai-Beta", "User-Agent":
		return true
	case "Anthropic-Version", "Anthropic-Beta", "Anthropic-Dangerous-Direct-Browser-Access", "X-Goog-Api-Client":
		return true
	}
	return strings.HasPrefix(name, "X-Stainless-") || strings.HasPrefix(name, "X-Claude-Code-")
}

// notReturned are the headers of an answer that a container does not get.
func notReturned(name string) bool { return name == "Set-Cookie" || name == "Alt-Svc" }

// call carries one request to a provider.
func (d *Door) call(w http.ResponseWriter, r *http.Request, p *provider, rest string) {
	target := printable(r.Method+" /"+p.name+rest, 256)
	fail := func(f fault, message string) {
		w.Header().Set("Berth-Reason", f.reason)
		if !f.again {
			w.Header().Set("X-Should-Retry", "false") // Anthropic's and OpenAI's clients know it
		}
		writeJSON(w, f.status, p.reply(f, message))
	}
	if rest == "/" && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
		writeJSON(w, http.StatusOK, struct{}{}) // Claude Code asks whether anybody is there
		return
	}
	path, known, ok := p.match(r.Method, rest)
	if !ok {
		d.deny(KindProvider, target, "not among the calls that groups may make")
		fail(faultPath, fmt.Sprintf("the gateway does not pass on %s: it passes on %s", target, strings.Join(p.paths, ", ")))
		return
	}
	limit := d.g.cfg.Limits.RequestBytes
	tooLarge := func() {
		d.deny(KindLimit, target, "the request is too large")
		fail(faultSize, fmt.Sprintf("the request has more than the %d bytes that the gateway passes on", limit))
	}
	if r.ContentLength > limit {
		tooLarge()
		return
	}
	cred, missing := p.credential()
	if missing != "" {
		d.deny(KindProvider, target, "no key")
		fail(faultKey, missing)
		return
	}
	if !enter(d.calls) {
		d.deny(KindLimit, target, "too many calls at the same time")
		fail(faultBusy, fmt.Sprintf("this run has %d calls to providers under way already: wait for one of them", cap(d.calls)))
		return
	}
	defer func() { <-d.calls }()

	costs := r.Method == http.MethodPost && !slices.Contains(p.free, known)
	if costs {
		spent, err := d.g.take(r.Context(), d.run)
		if err != nil {
			d.log.Error("budget", zap.Error(err))
			fail(faultStore, "the gateway cannot read this group's budget at the moment: try again")
			return
		}
		if spent != "" {
			d.deny(KindBudget, target, spent)
			fail(faultBudget, spent)
			return
		}
	}

	ctx, body, stop := newUpload(r.Context(), w, r, d.g.cfg.Limits)
	defer stop()
	body.limit = limit
	began := d.g.now()
	resp, err := d.g.upstream.RoundTrip(p.request(ctx, r, path, cred, body))
	if err != nil {
		if costs && body.sent.Load() > 0 && !body.over.Load() {
			// Who hangs up before the answer has bought it all the same.
			unseen := &meter{}
			unseen.tokens.output = int64(perSecond * d.g.now().Sub(began).Seconds())
			d.record(p, unseen, body.sent.Load(), true)
		}
		switch {
		case body.over.Load():
			tooLarge()
		case errors.Is(context.Cause(ctx), errIdle):
			d.log.Warn("the provider does not answer", zap.String("provider", p.name))
			w.Header().Set("Connection", "close") // nothing can be read from it any more
			fail(faultSlow, "the model's provider did not answer in time")
		case r.Context().Err() != nil: // the container went away, or the door closes
			panic(http.ErrAbortHandler)
		default:
			d.log.Warn("reach the provider", zap.String("provider", p.name), zap.String("error", cred.key.maskString(err.Error())))
			fail(faultUnreachable, "the gateway cannot reach the model's provider; the operator finds the reason in berth's log")
		}
		return
	}
	defer resp.Body.Close()
	body.watch.alive()
	if e := resp.Header.Get("Content-Encoding"); e != "" && e != "identity" {
		d.log.Warn("the provider answers in an encoding that was not asked for", zap.String("provider", p.name))
		fail(faultUnreachable, "the model's provider answered in an encoding that the gateway did not ask for")
		return
	}
	if !usable(resp) {
		fail(faultUnreachable, fmt.Sprintf("the model's provider answered with status %d, which cannot be passed on", resp.StatusCode))
		return
	}

	m := newMeter(resp.Header.Get("Content-Type"), p.inclusive)
	cut := true
	if costs {
		defer func() {
			if resp.StatusCode >= 200 && resp.StatusCode < 300 {
				d.record(p, m, body.sent.Load(), cut)
			} else {
				d.record(p, m, 0, false) // errors cost nothing
			}
		}()
	}
	passBack(w.Header(), resp.Header, cred.key, notReturned)
	w.WriteHeader(resp.StatusCode)
	down := download{secret: cred.key, seen: m.write, watch: body.watch, idle: d.g.cfg.Limits.IdleTimeout}
	// What a provider sends before its first event is passed on at once too.
	if err := http.NewResponseController(w).Flush(); err == nil {
		err = down.copy(w, resp.Body)
		cut = err != nil
	}
	if cut {
		if errors.Is(context.Cause(ctx), errIdle) {
			d.log.Warn("the provider's answer stalled", zap.String("provider", p.name))
		}
		panic(http.ErrAbortHandler) // the only way to say that the answer is incomplete
	}
}

// request is what the provider gets.
func (p *provider) request(ctx context.Context, r *http.Request, path string, cred credential, body *upload) *http.Request {
	u := *p.base
	u.Path += path // of plain characters, see match
	u.RawPath = ""
	u.RawQuery = p.asks(r.URL.RawQuery)
	out := &http.Request{
		Method: r.Method, URL: &u, Host: u.Host, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: make(http.Header), Body: body, ContentLength: r.ContentLength,
	}
	if r.ContentLength == 0 {
		out.Body = http.NoBody
	}
	for name, values := range r.Header {
		if passed(name) && !isHop(r.Header, name) {
			out.Header[name] = slices.Clone(values)
		}
	}
	if _, ok := out.Header["User-Agent"]; !ok {
		out.Header["User-Agent"] = []string{""} // none, instead of Go's
	}
	// Usage has to be read and the key looked for.
	out.Header.Set("Accept-Encoding", "identity")
	if cred.header != "" {
		out.Header.Set(cred.header, cred.prefix+string(cred.key))
	}
	if cred.beta != "" && !slices.ContainsFunc(out.Header["Anthropic-Beta"], func(v string) bool { return strings.Contains(v, cred.beta) }) {
		out.Header.Add("Anthropic-Beta", cred.beta)
	}
	return out.WithContext(ctx)
}

// perSecond is how many tokens a model is taken to write a second while nobody
// sees them.
const perSecond = 100

// record takes down what one answer cost.
func (d *Door) record(p *provider, m *meter, sent int64, cut bool) {
	estimated := (sent > 0 || cut) && m.estimate(sent, cut)
	u := berth.Usage{
		At: d.g.now(), Folder: d.run.Folder, RunID: d.run.ID, Provider: p.name, Model: m.model, Requests: 1,
		Input: m.tokens.input, Output: m.tokens.output, CacheRead: m.tokens.cacheRead, CacheWrite: m.tokens.cacheWrite,
		Estimated: estimated,
	}
	d.g.charge(d.run, u.Tokens())
	d.diary.used(u)
}
