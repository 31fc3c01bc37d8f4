package tools

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strings"
	"time"

	"golang.org/x/net/html"
	"golang.org/x/net/html/atom"

	"berth/agent-runner/internal/engine/model/llm"
)

// Limits of fetch.
const (
	fetchWithin = time.Minute
	maxPage     = 4 << 20 // bytes that are read
)

// newWeb returns a client that goes out by the gateway if there is one.
func newWeb(gateway string) *http.Client {
	t := &http.Transport{
		TLSHandshakeTimeout:    15 * time.Second,
		ResponseHeaderTimeout:  fetchWithin,
		MaxResponseHeaderBytes: 256 << 10,
		MaxIdleConns:           4,
		IdleConnTimeout:        10 * time.Second,
		ForceAttemptHTTP2:      true,
	}
	if gateway != "" {
		t.Proxy = http.ProxyURL(&url.URL{Scheme: "http", Host: gateway})
	}
	return &http.Client{Transport: t}
}

func (b *Box) fetch() tool {
	return tool{llm.Tool{
		Name:        "fetch",
		Description: "Gets a web page or another text by its address and returns it as text. Only hosts that the operator allows can be reached.",
		Schema: json.RawMessage(`{"type":"object","properties":{` +
			`"url":{"type":"string","description":"begins with http:// or https://"},` +
			`"raw":{"type":"boolean","description":"return HTML as it is"}},` +
			`"required":["url"]}`),
	}, func(ctx context.Context, input json.RawMessage) (string, error) {
		in, err := decode[struct {
			URL string
			Raw yes
		}](input)
		if err != nil {
			return "", err
		}
		u, err := url.Parse(in.URL)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return "", refused("url %.200q is no address that begins with http:// or https://", in.URL)
		}
		ctx, cancel := context.WithTimeoutCause(ctx, fetchWithin, refused("%s did not answer within %v", u.Host, fetchWithin))
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
		if err != nil {
			return "", err
		}
		req.Header.Set("User-Agent", "berth")
		req.Header.Set("Accept", "text/html, text/*;q=0.9, application/json;q=0.9, */*;q=0.1")
		resp, err := b.web.Do(req)
		if err != nil {
			if ctx.Err() != nil {
				return "", context.Cause(ctx)
			}
			if e, ok := errors.AsType[*url.Error](err); ok {
				err = e.Err // without the address again
			}
			return "", refused("%s cannot be reached: %v", u.Host, err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(io.LimitReader(resp.Body, maxPage+1))
		if err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		text, kind := page(resp, body, bool(in.Raw))
		text = fmt.Sprintf("%s · %s · %s\n\n%s", resp.Request.URL.Redacted(), resp.Status, kind, text)
		switch {
		case err != nil:
			return text, refused("it broke off: %v", err)
		case resp.StatusCode >= 400:
			return text, refused("status %d", resp.StatusCode)
		case len(body) > maxPage:
			text = Bound(text, MaxResult/2) + fmt.Sprintf("\n(only the first %d bytes were read)", maxPage)
		}
		return text, nil
	}}
}

// page returns what came as a text, and the kind of it.
func page(resp *http.Response, body []byte, raw bool) (text, kind string) {
	declared := resp.Header.Get("Content-Type")
	kind, _, err := mime.ParseMediaType(cmp.Or(declared, http.DetectContentType(body)))
	if err != nil {
		kind = "application/octet-stream"
	}
	switch {
	case kind == "text/html" || kind == "application/xhtml+xml":
		if !raw {
			return pageText(string(body), resp.Request.URL), kind
		}
	case strings.HasPrefix(kind, "text/"), strings.HasSuffix(kind, "json"), strings.HasSuffix(kind, "xml"), strings.Contains(kind, "javascript"), strings.Contains(kind, "yaml"):
	default:
		return fmt.Sprintf("(%d bytes, not shown: with bash you can get it into a file)", len(body)), kind
	}
	return printable(string(body)), kind
}

// pageText returns a page's text: a line a block, links with their address.
func pageText(source string, base *url.URL) string {
	z := html.NewTokenizer(strings.NewReader(source))
	var out strings.Builder
	var hidden atom.Atom // the element whose content is left out
	depth := 0           // of hidden in itself
	pre := 0
	links := []string(nil) // addresses of open links
	blank := true          // nothing on this line yet
	newline := func() {
		if !blank {
			out.WriteByte('\n')
			blank = true
		}
	}
	for {
		kind := z.Next()
		if kind == html.ErrorToken {
			return strings.TrimSpace(out.String())
		}
		t := z.Token()
		if hidden != 0 {
			switch {
			case kind == html.StartTagToken && t.DataAtom == hidden:
				depth++
			case kind == html.EndTagToken && t.DataAtom == hidden:
				if depth--; depth == 0 {
					hidden = 0
				}
			}
			continue
		}
		switch kind {
		case html.TextToken:
			text := t.Data
			if pre == 0 {
				words := strings.Join(strings.Fields(text), " ")
				if words == "" {
					if !blank && text != "" {
						out.WriteByte(' ')
					}
					continue
				}
				if !blank && strings.TrimLeft(text, " \t\r\n") != text {
					words = " " + words
				}
				if strings.TrimRight(text, " \t\r\n") != text {
					words += " "
				}
				text = words
			}
			out.WriteString(text)
			blank = strings.HasSuffix(text, "\n")
		case html.StartTagToken, html.SelfClosingTagToken:
			switch t.DataAtom {
			case atom.Script, atom.Style, atom.Noscript, atom.Template, atom.Svg, atom.Head:
				if t.DataAtom == atom.Head {
					continue // its title is worth reading; the rest has no text
				}
				if kind == html.StartTagToken {
					hidden, depth = t.DataAtom, 1
				}
			case atom.Br:
				out.WriteByte('\n')
				blank = true
			case atom.Pre:
				newline()
				pre++
			case atom.Li:
				newline()
				out.WriteString("- ")
			case atom.Td, atom.Th:
				if !blank {
					out.WriteString(" | ")
				}
			case atom.H1, atom.H2, atom.H3, atom.H4, atom.H5, atom.H6:
				newline()
				out.WriteString("\n" + strings.Repeat("#", int(t.Data[1]-'0')) + " ")
			case atom.A:
				links = append(links, address(t, base))
			default:
				if block[t.DataAtom] {
					newline()
				}
			}
		case html.EndTagToken:
			switch t.DataAtom {
			case atom.Pre:
				pre = max(0, pre-1)
				newline()
			case atom.A:
				if n := len(links); n > 0 {
					if links[n-1] != "" {
						out.WriteString(" (" + links[n-1] + ")")
						blank = false
					}
					links = links[:n-1]
				}
			default:
				if block[t.DataAtom] {
					newline()
				}
			}
		}
	}
}

// block are the elements that begin and end a line.
var block = map[atom.Atom]bool{
	atom.P: true, atom.Div: true, atom.Section: true, atom.Article: true, atom.Header: true, atom.Footer: true, atom.Nav: true,
	atom.Main: true, atom.Aside: true, atom.Ul: true, atom.Ol: true, atom.Li: true, atom.Table: true, atom.Tr: true,
	atom.Blockquote: true, atom.Form: true, atom.Title: true, atom.Hr: true, atom.Figure: true, atom.Dl: true, atom.Dt: true, atom.Dd: true,
	atom.H1: true, atom.H2: true, atom.H3: true, atom.H4: true, atom.H5: true, atom.H6: true, atom.Option: true, atom.Address: true,
}

// address returns where a link leads, if it leads to another page.
func address(t html.Token, base *url.URL) string {
	for _, a := range t.Attr {
		if a.Key != "href" || strings.HasPrefix(a.Val, "#") || len(a.Val) > 500 {
			continue
		}
		u, err := base.Parse(strings.TrimSpace(a.Val))
		if err == nil && (u.Scheme == "http" || u.Scheme == "https") {
			return u.String()
		}
	}
	return ""
}
