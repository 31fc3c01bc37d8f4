package whatsapp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"time"

	"go.mau.fi/whatsmeow"
	"go.mau.fi/whatsmeow/types"

	"berth/orchestrator/internal/berth"
	"berth/orchestrator/internal/whatsapp/wastate"
)

// LoginEvent is a step of linking an account. One of its fields says which.
type LoginEvent struct {
	QR    string    `json:"qr,omitempty"`   // what to show as a QR code
	Code  string    `json:"code,omitempty"` // what to type on the phone
	Until time.Time `json:"until,omitzero"` // of QR and Code: another one comes then

	// Passkey says what to do when WhatsApp wants the account's passkey; Request is
	// what a browser on WhatsApp's own page needs to make the answer for Passkey.
	Passkey string          `json:"passkey,omitempty"`
	Request json.RawMessage `json:"request,omitempty"`
	Compare string          `json:"compare,omitempty"` // the phone must show the same, then ConfirmPasskey

	Done string `json:"done,omitempty"` // the number that is linked now
}

var errLinking = berth.Errorf(berth.Conflict, "another login or logout is under way: end that first")

const passkeyNeeded = "WhatsApp wants the passkey of this account. Berth has no browser and cannot use it. " +
	"Either remove the passkey on the phone (Settings, Account, Passkeys) and link again, " +
	"or make the answer in a browser on web.whatsapp.com and hand it over."

const (
	codeLasts   = 160 * time.Second
	connectMost = time.Minute // from linked to connected
)

// Login links an account and yields what a person has to do, until it is done, it
// fails, the loop is left or ctx ends. With a phone number it asks for a code to
// type, otherwise it shows QR codes, one after another.
func (c *Channel) Login(ctx context.Context, phone string) iter.Seq2[LoginEvent, error] {
	return func(yield func(LoginEvent, error) bool) {
		if !c.linking.TryLock() {
			yield(LoginEvent{}, errLinking)
			return
		}
		defer c.linking.Unlock()
		if c.linked.Load() {
			yield(LoginEvent{}, berth.Errorf(berth.Conflict, "%s is linked already: berth logout whatsapp unlinks it", c.Number()))
			return
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		cli := c.current()
		defer func() {
			if !c.linked.Load() {
				c.tell(wastate.Closed{})
				c.drop(cli) // what shows its codes may yet disconnect it
			}
		}()
		fresh := false
		for {
			again, err := c.pair(ctx, cli, phone, yield)
			switch {
			case err == nil && again:
			case errors.Is(err, errOutdated) && !fresh && c.refreshVersion(ctx):
				fresh = true
				cli.Disconnect()
			case err != nil:
				if ctx.Err() != nil {
					err = context.Cause(ctx)
				}
				yield(LoginEvent{}, err)
				return
			default:
				return
			}
		}
	}
}

var errOutdated = berth.Errorf(berth.Unavailable, "WhatsApp does not take this version any more: update Berth")

// pair goes through one round of codes. again is set if it ended for lack of
// somebody to use them.
func (c *Channel) pair(ctx context.Context, cli *whatsmeow.Client, phone string, yield func(LoginEvent, error) bool) (again bool, err error) {
	cli.Disconnect()
	items, err := cli.GetQRChannel(ctx)
	if err != nil {
		return false, fmt.Errorf("begin linking: %w", err)
	}
	c.tell(wastate.Dialing{})
	// The connection outlives the login.
	if err := cli.ConnectContext(c.life); err != nil {
		return false, berth.Errorf(berth.Unavailable, "no connection to WhatsApp: %w", err)
	}
	asked := false
	for {
		var item whatsmeow.QRChannelItem
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case item = <-items:
		}
		var e LoginEvent
		switch item.Event {
		case whatsmeow.QRChannelEventCode:
			if phone == "" {
				e = LoginEvent{QR: item.Code, Until: time.Now().Add(item.Timeout)}
				break
			}
			if asked {
				continue
			}
			asked = true
			// WhatsApp refuses names that are no browser's.
			code, err := cli.PairPhone(ctx, phone, true, whatsmeow.PairClientChrome, "Chrome (Linux)")
			switch {
			case errors.Is(err, whatsmeow.ErrPhoneNumberTooShort), errors.Is(err, whatsmeow.ErrPhoneNumberIsNotInternational):
				return false, berth.Errorf(berth.Invalid, "%q is no number with its country code, such as +4915112345678", phone)
			case errors.Is(err, whatsmeow.ErrIQRateOverLimit):
				return false, berth.Errorf(berth.Unavailable, "WhatsApp gives no more codes for now: wait some hours, or scan a QR code")
			case err != nil:
				return false, fmt.Errorf("ask for a code: %w", err)
			}
			e = LoginEvent{Code: code, Until: time.Now().Add(codeLasts)}
		case whatsmeow.QRChannelEventPasskeyRequest:
			request, err := json.Marshal(item.PasskeyRequest.PublicKey)
			if err != nil {
				return false, err
			}
			e = LoginEvent{Passkey: passkeyNeeded, Request: request}
		case whatsmeow.QRChannelEventPasskeyResponse:
			e = LoginEvent{Compare: item.PasskeyConfirmation.Code}
		case whatsmeow.QRChannelSuccess.Event:
			return false, c.awaitConnected(ctx, yield)
		case whatsmeow.QRChannelTimeout.Event:
			if phone != "" {
				return false, berth.Errorf(berth.Unavailable, "the code was not used in time")
			}
			return true, nil
		case whatsmeow.QRChannelClientOutdated.Event:
			return false, errOutdated
		case whatsmeow.QRChannelScannedWithoutMultidevice.Event:
			return false, berth.Errorf(berth.Invalid, "the phone that scanned the code does not take linked devices: update WhatsApp there")
		case whatsmeow.QRChannelEventError:
			return false, fmt.Errorf("link the account: %w", item.Error)
		default:
			if c.isEarly() {
				return false, c.awaitConnected(ctx, yield)
			}
			return false, berth.Errorf(berth.Unavailable, "WhatsApp ended the linking: it is %s now", c.State())
		}
		if !yield(e, nil) {
			return false, nil
		}
	}
}

// isEarly reports whether the connection that follows a linking is there. The client
// may tell of it before it tells that the account is linked, and then takes it for
// an error.
func (c *Channel) isEarly() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.early || c.linked.Load()
}

// awaitConnected waits for the connection that follows the linking.
func (c *Channel) awaitConnected(ctx context.Context, yield func(LoginEvent, error) bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, connectMost, berth.Errorf(berth.Unavailable, "the account is linked, but there is no connection yet: see berth status"))
	defer cancel()
	if err := c.await(ctx, online); err != nil {
		return err
	}
	yield(LoginEvent{Done: c.Number()}, nil)
	return nil
}

// Passkey hands over what a browser answered to LoginEvent.Request.
func (c *Channel) Passkey(ctx context.Context, response []byte) error {
	var answer types.WebAuthnResponse
	if err := json.Unmarshal(response, &answer); err != nil {
		return berth.Errorf(berth.Invalid, "the browser's answer cannot be read: %w", err)
	}
	return c.current().SendPasskeyResponse(ctx, &answer)
}

// ConfirmPasskey says that the phone shows LoginEvent.Compare.
func (c *Channel) ConfirmPasskey(ctx context.Context) error {
	return c.current().SendPasskeyConfirmation(ctx)
}
