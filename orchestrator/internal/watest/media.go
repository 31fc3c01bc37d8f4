package watest

import (
	"bytes"
	"context"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"go.mau.fi/whatsmeow"
	"go.mau.fi/whatsmeow/proto/waE2E"
	"go.mau.fi/whatsmeow/util/cbcutil"
)

// mediaLimit bounds what a client may upload.
const mediaLimit = 256 << 20

func (s *Server) serveUpload(w http.ResponseWriter, r *http.Request) {
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, mediaLimit))
	if err != nil {
		http.Error(w, err.Error(), http.StatusRequestEntityTooLarge)
		return
	}
	path := s.keep(data)
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]string{
		"url": "https://mmg.whatsapp.net" + path, "direct_path": path, "handle": r.PathValue("token"), "object_id": r.PathValue("token"),
	})
}

func (s *Server) serveDelete(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }

func (s *Server) serveDownload(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	s.mu.Lock()
	held := s.faults.heldMedia[name]
	if held != nil {
		s.faults.mediaAsked++
		s.announceLocked()
	}
	s.mu.Unlock()
	if held != nil {
		select {
		case <-held:
		case <-r.Context().Done():
			return
		case <-s.life.Done():
			return
		}
	}
	s.mu.Lock()
	data, ok := s.media[name]
	code := s.faults.mediaCode
	if code != 0 {
		s.faults.mediaAsked++
		s.announceLocked()
	}
	s.mu.Unlock()
	if code != 0 {
		http.Error(w, "refused", code)
		return
	}
	if !ok {
		http.Error(w, "gone", http.StatusGone)
		return
	}
	_, _ = w.Write(data)
}

// keep stores a blob. The path has a query, since the client appends to one.
func (s *Server) keep(data []byte) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.announceLocked()
	name := fmt.Sprintf("%d.enc", len(s.media)+1)
	s.media[name] = data
	if s.faults.holdMedia {
		if s.faults.heldMedia == nil {
			s.faults.heldMedia = map[string]chan struct{}{}
		}
		s.faults.heldMedia[name] = make(chan struct{})
	}
	return "/media/" + name + "?ccb=1"
}

// ExpireMedia takes all media from the server, as happens after some weeks.
func (s *Server) ExpireMedia() { s.do(func() error { clear(s.media); return nil }) }

// HoldMedia says whether the media that are sent from now on can be downloaded
// only after ReleaseMedia.
func (s *Server) HoldMedia(hold bool) {
	s.do(func() error { s.faults.holdMedia = hold; return nil })
}

// ReleaseMedia lets all media be downloaded.
func (s *Server) ReleaseMedia() {
	s.do(func() error {
		for _, held := range s.faults.heldMedia {
			close(held)
		}
		s.faults.holdMedia, s.faults.heldMedia = false, nil
		return nil
	})
}

// FailMedia answers downloads with this status; 0 ends that.
func (s *Server) FailMedia(status int) {
	s.do(func() error { s.faults.mediaCode = status; return nil })
}

// MediaAsked waits until clients have met HoldMedia and FailMedia n times.
func (s *Server) MediaAsked(ctx context.Context, n int) {
	s.t.Helper()
	s.must(s.wait(ctx, "downloads", func() bool { return s.faults.mediaAsked >= n }))
}

// Media says where an encrypted file lies and how to open it.
type Media struct {
	URL, DirectPath            string
	Key, SHA256, EncryptedHash []byte
	Length                     uint64
}

// Upload encrypts a file and stores it on the server, for a message to refer to.
func (d *Device) Upload(data []byte, kind whatsmeow.MediaType) Media {
	d.server.t.Helper()
	m := Media{Key: randomBytes(32), Length: uint64(len(data))}
	plainSum := sha256.Sum256(data)
	iv, cipherKey, macKey, err := mediaKeys(m.Key, kind)
	d.server.must(err)
	sealed, err := cbcutil.Encrypt(cipherKey, iv, data)
	d.server.must(err)
	mac := hmac.New(sha256.New, macKey)
	mac.Write(iv)
	mac.Write(sealed)
	blob := append(sealed, mac.Sum(nil)[:10]...)
	sum := sha256.Sum256(blob)
	m.SHA256, m.EncryptedHash = plainSum[:], sum[:]
	m.DirectPath = d.server.keep(blob)
	m.URL = "https://mmg.whatsapp.net" + m.DirectPath
	return m
}

func mediaKeys(key []byte, kind whatsmeow.MediaType) (iv, cipherKey, macKey []byte, err error) {
	expanded, err := hkdf.Key(sha256.New, key, nil, string(kind), 112)
	if err != nil {
		return nil, nil, nil, err
	}
	return expanded[:16], expanded[16:48], expanded[48:80], nil
}

// SendImage sends an image with a caption.
func (d *Device) SendImage(to Chat, data []byte, mimetype, caption string, opts ...Option) string {
	d.server.t.Helper()
	m := d.Upload(data, whatsmeow.MediaImage)
	return d.Send(to, &waE2E.Message{ImageMessage: &waE2E.ImageMessage{
		URL: new(m.URL), DirectPath: new(m.DirectPath), MediaKey: m.Key, FileSHA256: m.SHA256, FileEncSHA256: m.EncryptedHash,
		FileLength: new(m.Length), Mimetype: new(mimetype), Caption: new(caption),
	}}, opts...)
}

// SendDocument sends a file under a name, which may be anything.
func (d *Device) SendDocument(to Chat, data []byte, mimetype, name, caption string, opts ...Option) string {
	d.server.t.Helper()
	m := d.Upload(data, whatsmeow.MediaDocument)
	return d.Send(to, &waE2E.Message{DocumentMessage: &waE2E.DocumentMessage{
		URL: new(m.URL), DirectPath: new(m.DirectPath), MediaKey: m.Key, FileSHA256: m.SHA256, FileEncSHA256: m.EncryptedHash,
		FileLength: new(m.Length), Mimetype: new(mimetype), FileName: new(name), Caption: new(caption),
	}}, opts...)
}

// SendVoice sends a voice note.
func (d *Device) SendVoice(to Chat, data []byte, seconds uint32, opts ...Option) string {
	d.server.t.Helper()
	m := d.Upload(data, whatsmeow.MediaAudio)
	return d.Send(to, &waE2E.Message{AudioMessage: &waE2E.AudioMessage{
		URL: new(m.URL), DirectPath: new(m.DirectPath), MediaKey: m.Key, FileSHA256: m.SHA256, FileEncSHA256: m.EncryptedHash,
		FileLength: new(m.Length), Mimetype: new("audio/ogg; codecs=opus"), PTT: new(true), Seconds: new(seconds),
	}}, opts...)
}

// Download opens the file that a client's message refers to, as its reader does.
func (d *Device) Download(ctx context.Context, m whatsmeow.DownloadableMessage) []byte {
	d.server.t.Helper()
	data, err := d.server.download(ctx, m)
	d.server.must(err)
	return data
}

func (s *Server) download(ctx context.Context, m whatsmeow.DownloadableMessage) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url.String()+m.GetDirectPath(), nil)
	if err != nil {
		return nil, err
	}
	response, err := s.HTTPClient().Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	blob, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK || len(blob) <= 10 {
		return nil, fmt.Errorf("media: %s", strings.TrimSpace(response.Status))
	}
	if sum := sha256.Sum256(blob); !bytes.Equal(sum[:], m.GetFileEncSHA256()) {
		return nil, errors.New("media: the encrypted file is another one")
	}
	iv, cipherKey, macKey, err := mediaKeys(m.GetMediaKey(), whatsmeow.GetMediaType(m))
	if err != nil {
		return nil, err
	}
	sealed, mac := blob[:len(blob)-10], hmac.New(sha256.New, macKey)
	mac.Write(iv)
	mac.Write(sealed)
	if !hmac.Equal(mac.Sum(nil)[:10], blob[len(blob)-10:]) {
		return nil, errors.New("media: wrong MAC")
	}
	data, err := cbcutil.Decrypt(cipherKey, iv, sealed)
	if err != nil {
		return nil, err
	}
	if sum := sha256.Sum256(data); !bytes.Equal(sum[:], m.GetFileSHA256()) {
		return nil, errors.New("media: the file is another one")
	}
	return data, nil
}
