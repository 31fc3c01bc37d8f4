package gateway

import (
	"net/netip"
	"strings"
	"testing"
)

func TestParseEgress(t *testing.T) {
	for _, tt := range []struct{ entry, want, fault string }{
		{"api.example.org", "api.example.org", ""},
		{" API.Example.ORG. ", "api.example.org", ""},
		{"*.example.org", "*.example.org", ""},
		{"*.example.org:8443", "*.example.org:8443", ""},
		{"bücher.example", "xn--bcher-kva.example", ""},
		{"BÜCHER.example", "xn--bcher-kva.example", ""},
		{"xn--bcher-kva.example", "xn--bcher-kva.example", ""},
		{"ｅｘａｍｐｌｅ。org", "example.org", ""},
		{"r3---sn-x.example.org", "r3---sn-x.example.org", ""},
		{"1.1.1.1", "1.1.1.1", ""},
		{"１.1.1.1:53", "1.1.1.1:53", ""},
		{"[2606:4700:0:0::1111]:53", "[2606:4700::1111]:53", ""},
		{"", "", "not a host name"},
		{"*", "", "not a host name"},
		{"*.org", "", "give a whole name"},
		{"org", "", "give a whole name"},
		{"localhost", "", "give a whole name"},
		{"a.*.org", "", "not a host name"},
		{"*.1.1.1.1", "", "leave out the *"},
		{"https://example.org", "", "port"},
		{"example.org/path", "", "not a host name"},
		{"example.org:http", "", "port"},
		{"example.org:0", "", "port"},
		{"example.org:65536", "", "port"},
		{"example.org:+80", "", "port"},
		{"exa mple.org", "", "not a host name"},
		{"example.org\n", "example.org", ""},
		{"0.\x8f", "", "not a host name"},
		{"exam\nple.org", "", "not a host name"},
		{"-a.example.org", "", "not a host name"},
		{"a..org", "", "not a host name"},
		{"xn--a.example.org", "", "not a host name"},
		{strings.Repeat("a", 64) + ".org", "", "not a host name"},
		{strings.Repeat("a.", 200) + "org", "", "not a host name"},
		{"10.0.0.1", "", "a private address"},
		{"127.0.0.1:8080", "", "a loopback address"},
		{"169.254.169.254", "", "a link-local address"},
		{"[::1]", "", "a loopback address"},
		{"[::ffff:1.1.1.1]", "", "not a host name"},
		{"[fe80::1%eth0]", "", "not a host name"},
		{"[64:ff9b::101:101]", "", "a NAT64 address"},
		{"1.1", "", "not a host name"},
		{"0x01010101", "", "not a host name"},
		{"2001:db8::1", "", "needs brackets"},
		{"user@example.org", "", "not a host name"},
		{"example.org\u202e.com", "", "not a host name"},
	} {
		e, err := ParseEgress([]string{tt.entry})
		switch {
		case tt.fault != "":
			if err == nil || !strings.Contains(err.Error(), tt.fault) {
				t.Errorf("%q: %v %v, want an error with %q", tt.entry, e.strings(), err, tt.fault)
			}
		case err != nil || e.strings()[0] != tt.want:
			t.Errorf("%q: %v %v, want %q", tt.entry, e.strings(), err, tt.want)
		}
	}
	if _, err := ParseEgress([]string{"a.example", "*", "10.0.0.1"}); err == nil || strings.Count(err.Error(), "egress ") != 2 {
		t.Errorf("two faults: %v", err)
	}
	if _, err := ParseEgress(make([]string, maxRules+1)); err == nil {
		t.Error("a list without end is taken")
	}
}

func TestBlocked(t *testing.T) {
	for _, addr := range []string{
		"0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254", "169.254.169.254", "169.254.170.2", "172.16.0.1",
		"172.31.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1",
		"240.0.0.1", "255.255.255.255", "168.63.129.16", "::", "::1", "::ffff:8.8.8.8", "::8.8.8.8", "64:ff9b::808:808", "64:ff9b:1::1", "100::1", "2001::1",
		"2001:20::1", "2001:db8::1", "2002:808:808::1", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1",
	} {
		if blocked(netip.MustParseAddr(addr)) == "" {
			t.Errorf("%s is taken for public", addr)
		}
	}
	if blocked(netip.Addr{}) == "" {
		t.Error("no address is taken for public")
	}
	for _, addr := range []string{"1.1.1.1", "8.8.8.8", "93.184.216.34", "172.32.0.1", "100.128.0.1", "198.20.0.1", "2606:4700::1111", "2a00:1450:4001::1"} {
		if why := blocked(netip.MustParseAddr(addr)); why != "" {
			t.Errorf("%s is taken for %s", addr, why)
		}
	}
}
