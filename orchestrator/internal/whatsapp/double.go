package whatsapp

import (
	"cmp"
	"net"
	"net/http"
	"net/url"

	"go.mau.fi/whatsmeow"

	"berth/orchestrator/internal/berth"
)

// Double is a server on this host that stands in for WhatsApp in tests.
type Double struct {
	URL  string   // http, and a loopback address
	Root [32]byte // signs the server's certificates in place of WhatsApp's root
}

// client returns what reaches the double under all of WhatsApp's addresses, and
// nil for no double. Anything but a loopback address is refused: this is no way
// to talk to somebody who says that he is WhatsApp.
func (d *Double) client() (*http.Client, error) {
	if d == nil {
		return nil, nil
	}
	u, err := url.Parse(d.URL)
	if err != nil {
		return nil, berth.Errorf(berth.Invalid, "WhatsApp's double: %w", err)
	}
	if ip := net.ParseIP(u.Hostname()); u.Scheme != "http" || ip == nil || !ip.IsLoopback() {
		return nil, berth.Errorf(berth.Invalid, "WhatsApp's double must be at a loopback address such as http://127.0.0.1:8080, not at %.80q", d.URL)
	}
	// It is one variable for the whole process and read without a lock.
	if whatsmeow.WACertPubKey != d.Root {
		whatsmeow.WACertPubKey = d.Root
	}
	return &http.Client{Transport: rewrite{to: u, next: &http.Transport{DisableKeepAlives: true}}}, nil
}

type rewrite struct {
	to   *url.URL
	next *http.Transport
}

func (r rewrite) RoundTrip(request *http.Request) (*http.Response, error) {
	request = request.Clone(request.Context())
	request.Host = cmp.Or(request.Host, request.URL.Host)
	request.URL.Scheme, request.URL.Host = r.to.Scheme, r.to.Host
	return r.next.RoundTrip(request)
}
