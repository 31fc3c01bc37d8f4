package gateway

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"
)

// maxHost is the longest host name of the DNS, in bytes.
const maxHost = 253

// maxRules bounds a group's egress list.
const maxRules = 1024

// Egress is a parsed egress list: where a group may connect to. It does not
// change and is safe for concurrent use. The zero Egress lets nothing out.
type Egress struct{ rules []rule }

// rule is one entry of an egress list.
type rule struct {
	host string // normal form; for a wildcard what follows the *, with its dot
	wild bool
	port uint16 // 0: the usual ones
}

// ParseEgress reads an egress list. An entry is a host name (api.example.org),
// all names below one (*.example.org, which does not hold example.org itself),
// or a public IP address, each with or without a port (example.org:8443,
// [2606:4700::1111]:53). Without a port, 443 and 80 are open. The error joins
// one error for each entry that cannot be used, and says what would be right.
func ParseEgress(list []string) (Egress, error) {
	if len(list) > maxRules {
		return Egress{}, fmt.Errorf("the egress list has %d entries and may have %d", len(list), maxRules)
	}
	var e Egress
	var faults []error
	for _, entry := range list {
		r, err := parseRule(strings.TrimSpace(entry))
		if err != nil {
			faults = append(faults, fmt.Errorf("egress %q: %w", entry, err))
			continue
		}
		e.rules = append(e.rules, r)
	}
	return e, errors.Join(faults...)
}

func parseRule(entry string) (rule, error) {
	var r rule
	entry, r.wild = strings.CutPrefix(entry, "*.")
	t, err := parseTarget(entry, 0)
	if err != nil {
		return rule{}, err
	}
	if t.addr.IsValid() {
		if r.wild {
			return rule{}, errors.New("an address has no names below it: leave out the *")
		}
		if why := blocked(t.addr); why != "" {
			return rule{}, fmt.Errorf("%s cannot be reached through the gateway: only public addresses can", why)
		}
	} else if !strings.Contains(t.host, ".") {
		return rule{}, errors.New("give a whole name such as api.example.org, or *.example.org for all names below it")
	}
	r.host, r.port = t.host, t.port
	if r.wild {
		r.host = "." + r.host
	}
	return r, nil
}

// refuse returns why t is not on the list, or an empty string.
func (e Egress) refuse(t target) string {
	var ports []string
	for _, r := range e.rules {
		// A wildcard holds names only: "*.1.2" is no way to list addresses.
		if t.host != r.host && (!r.wild || t.addr.IsValid() || !strings.HasSuffix(t.host, r.host)) {
			continue
		}
		if t.port == r.port || r.port == 0 && (t.port == 443 || t.port == 80) {
			return ""
		}
		if r.port == 0 {
			ports = append(ports, "443", "80")
		} else {
			ports = append(ports, strconv.Itoa(int(r.port)))
		}
	}
	switch {
	case len(ports) > 0:
		return fmt.Sprintf("%s may be reached on port %s, not on %d", t.host, strings.Join(ports, ", "), t.port)
	case len(e.rules) == 0:
		return fmt.Sprintf("%s is not open: this group's egress list is empty", t)
	}
	return fmt.Sprintf("%s is not on this group's egress list", t)
}

// strings returns the list in its normal form.
func (e Egress) strings() []string {
	out := make([]string, 0, len(e.rules))
	for _, r := range e.rules {
		addr, _ := netip.ParseAddr(r.host)
		s := target{r.host, addr, r.port}.String()
		if r.wild {
			s = "*" + s
		}
		out = append(out, s)
	}
	return out
}

// target is a place that somebody wants to reach, in normal form.
type target struct {
	host string     // lower-case ASCII name without a trailing dot, or an address
	addr netip.Addr // valid if host is an address
	port uint16     // 0: not given
}

// String returns host:port, or the host alone if there is no port; it can be
// parsed again.
func (t target) String() string {
	switch {
	case t.port == 0 && t.addr.Is6():
		return "[" + t.host + "]"
	case t.port == 0:
		return t.host
	}
	return net.JoinHostPort(t.host, strconv.Itoa(int(t.port)))
}

// dialed is what the dialer gets. The dot after a name keeps the resolver from
// trying the host's own search domains.
func (t target) dialed() string {
	host := t.host
	if !t.addr.IsValid() {
		host += "."
	}
	return net.JoinHostPort(host, strconv.Itoa(int(t.port)))
}

// parseTarget reads host or host:port; without one the port is def.
func parseTarget(authority string, def uint16) (target, error) {
	t := target{port: def}
	host, port, hasPort := authority, "", false
	if rest, ok := strings.CutPrefix(authority, "["); ok {
		if host, rest, ok = strings.Cut(rest, "]"); !ok || !strings.Contains(host, ":") {
			return target{}, errors.New("not an address in brackets")
		}
		port, hasPort = strings.CutPrefix(rest, ":")
		if !hasPort && rest != "" {
			return target{}, errors.New("something follows the address")
		}
	} else if i := strings.LastIndexByte(authority, ':'); i >= 0 {
		host, port, hasPort = authority[:i], authority[i+1:], true
		if strings.Contains(host, ":") {
			return target{}, errors.New("an IPv6 address needs brackets")
		}
	}
	if hasPort {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return target{}, errors.New("the port is no number from 1 to 65535")
		}
		t.port = uint16(n)
	}
	var err error
	t.host, t.addr, err = normalHost(host)
	return t, err
}

// profile maps names as browsers do before they ask the DNS. Hyphens at the
// third and fourth place are common outside of IDN.
var profile = idna.New(idna.MapForLookup(), idna.Transitional(false), idna.BidiRule(), idna.StrictDomainName(true), idna.CheckHyphens(false))

var errHost = errors.New("not a host name or address")

// normalHost returns the one form in which a host is compared.
func normalHost(host string) (string, netip.Addr, error) {
	if strings.Contains(host, ":") {
		a, err := netip.ParseAddr(host)
		if err != nil || a.Zone() != "" || a.Is4In6() {
			return "", netip.Addr{}, errHost
		}
		return a.String(), a, nil
	}
	if len(host) > 4*maxHost { // before the costly part; a mapping shrinks less than this
		return "", netip.Addr{}, errHost
	}
	name, err := profile.ToASCII(host)
	if err != nil || !utf8.ValidString(host) {
		return "", netip.Addr{}, errHost
	}
	name = strings.TrimSuffix(strings.ToLower(name), ".")
	if name == "" || len(name) > maxHost {
		return "", netip.Addr{}, errHost
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
			return "", netip.Addr{}, errHost
		}
	}
	if a, err := netip.ParseAddr(name); err == nil {
		return a.String(), a, nil
	}
	// Some resolvers read 127.1, 0x7f000001 and 2130706433 as addresses. No
	// real name ends in such a label.
	last := name[strings.LastIndexByte(name, '.')+1:]
	if _, err := strconv.ParseUint(last, 0, 64); err == nil || last[0] >= '0' && last[0] <= '9' {
		return "", netip.Addr{}, errHost
	}
	return name, netip.Addr{}, nil
}

// special are the address blocks that are no way to the public internet, besides
// those that netip knows, by what a person calls them.
var special = []struct {
	prefix netip.Prefix
	name   string
}{
	{netip.MustParsePrefix("0.0.0.0/8"), "an address of this network"},
	{netip.MustParsePrefix("100.64.0.0/10"), "a carrier's private address"}, // Alibaba's metadata is in here
	{netip.MustParsePrefix("192.0.0.0/24"), "a special-purpose address"},    // Oracle's metadata too
	{netip.MustParsePrefix("192.0.2.0/24"), "a documentation address"},
	{netip.MustParsePrefix("192.88.99.0/24"), "a 6to4 relay"},
	{netip.MustParsePrefix("198.18.0.0/15"), "a benchmarking address"},
	{netip.MustParsePrefix("198.51.100.0/24"), "a documentation address"},
	{netip.MustParsePrefix("203.0.113.0/24"), "a documentation address"},
	{netip.MustParsePrefix("240.0.0.0/4"), "a reserved address"},
	{netip.MustParsePrefix("168.63.129.16/32"), "a metadata address"}, // Azure's, though public by number
	{netip.MustParsePrefix("64:ff9b::/96"), "a NAT64 address"},
	{netip.MustParsePrefix("64:ff9b:1::/48"), "a NAT64 address"},
	{netip.MustParsePrefix("2001::/23"), "a special-purpose address"}, // Teredo and others that wrap IPv4
	{netip.MustParsePrefix("2001:db8::/32"), "a documentation address"},
	{netip.MustParsePrefix("2002::/16"), "a 6to4 address"},
	{netip.MustParsePrefix("3fff::/20"), "a documentation address"},
}

// globalUnicast is all of IPv6 that is handed out.
var globalUnicast = netip.MustParsePrefix("2000::/3")

// blocked returns what kind of address a is if it is none of the public
// internet's, and else an empty string.
func blocked(a netip.Addr) string {
	switch {
	case !a.IsValid() || a.Zone() != "" || a.Is4In6():
		return "an unusual form of address"
	case a.IsUnspecified():
		return "the unspecified address"
	case a.IsLoopback():
		return "a loopback address"
	case a.IsPrivate():
		return "a private address"
	case a.IsLinkLocalUnicast():
		return "a link-local address"
	case a.IsMulticast():
		return "a multicast address"
	}
	for _, s := range special {
		if s.prefix.Contains(a) {
			return s.name
		}
	}
	if a.Is6() && !globalUnicast.Contains(a) {
		return "a reserved address"
	}
	return ""
}

// isOwn reports whether a belongs to this host. A public address of the host is
// a way to its ports as good as a private one.
func isOwn(a netip.Addr) bool {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return true // who does not know does not let through
	}
	for _, own := range addrs {
		if prefix, err := netip.ParsePrefix(own.String()); err == nil && prefix.Addr().Unmap() == a {
			return true
		}
	}
	return false
}
