package wamsg

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"path"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/gabriel-vasile/mimetype"
	"golang.org/x/text/unicode/norm"

	"go.mau.fi/whatsmeow/types"
)

// MediaDir is the folder for media in a group's folder.
const MediaDir = "media"

// SniffLen is how many bytes of a file FileName looks at, at most.
const SniffLen = 3072

// maxStem is the longest part of a file name that a stranger chose, in bytes:
// with all of what is added it fits into any file system.
const maxStem = 80

// FileName returns the name under which a medium is kept, such as
// "2026-09-18-9f86d081884c7d65-holiday.jpg": the day in at's time zone, a tag,
// the cleaned name that the file came with, and the ending of what it is.
//
// The tag stands for the message. It is not the id itself, which everybody in a
// group could use again to write over somebody else's file; but the same message
// always gives the same name. head is the beginning of the file, and decides
// what it is: an agent that opens a picture that is none may lose its session.
//
// The name has at most 200 bytes: letters and digits of any script, and between
// them single "-", "_" and ".", so that no shell, terminal or file system takes
// it for anything else. Names that some systems reserve are not among them,
// since all begin with the day.
func FileName(at time.Time, sender types.JID, id string, f File, head []byte) string {
	stem, ending := split(f, head)
	return FilePrefix(at, sender, id) + stem + ending
}

// FilePrefix returns what FileName will begin with, whatever the file is: the
// day and the tag, such as "2026-09-18-9f86d081884c7d65-".
func FilePrefix(at time.Time, sender types.JID, id string) string {
	day := "undated"
	if y := at.Year(); y >= 1970 && y <= 9999 {
		day = at.Format(time.DateOnly)
	}
	tag := sha256.Sum256([]byte(sender.ToNonAD().String() + "\x00" + id))
	return day + "-" + hex.EncodeToString(tag[:8]) + "-"
}

// Sending says as what a file of an agent is best sent: as what it is by its
// first bytes, whatever it is called. Photo and Video are what phones show, Audio
// what they play; a VoiceNote is Opus, which they play only so; all else is a
// Document. name is safe, as a part of FileName's, and has at most 100 bytes.
func Sending(path string, head []byte) (kind FileKind, mime, name string) {
	stem, ending := split(File{Kind: Document, Name: path}, head)
	name = stem + ending
	found := mimetype.Detect(head[:min(len(head), SniffLen)])
	mime = found.String()
	switch {
	case found.Is("image/jpeg"), found.Is("image/png"):
		return Photo, mime, name
	case found.Is("video/mp4"), found.Is("video/3gpp"):
		return Video, mime, name
	case found.Is("audio/ogg"), found.Is("application/ogg"):
		if bytes.Contains(head[:min(len(head), 64)], []byte("OpusHead")) {
			return VoiceNote, "audio/ogg; codecs=opus", name
		}
	case found.Is("audio/mpeg"), found.Is("audio/aac"), found.Is("audio/mp4"), found.Is("audio/x-m4a"), found.Is("audio/amr"):
		return Audio, mime, name
	}
	return Document, mime, name
}

// split returns the two parts of a file's name that depend on the file.
func split(f File, head []byte) (stem, ending string) {
	name := f.Name
	if f.Kind == Sticker { // it is a description
		name = ""
	}
	name = strings.TrimSpace(name[strings.LastIndexAny(name, `/\`)+1:])
	claimed := strings.ToLower(strings.TrimPrefix(path.Ext(name), "."))
	if len(claimed) > 10 || strings.Trim(claimed, "abcdefghijklmnopqrstuvwxyz0123456789") != "" {
		claimed = ""
	}
	found := mimetype.Detect(head[:min(len(head), SniffLen)])
	ending = found.Extension()
	switch {
	case claimed == "":
	case (isText(found) || found.Is("application/octet-stream")) && !slices.Contains(binary, claimed):
		ending = "." + claimed // text is what it is called, and of the rest nobody knows better
	case alias[claimed] != "" && "."+alias[claimed] == ending:
		ending = "." + claimed
	}
	if ending == "" {
		ending = ".bin"
	}
	// The claimed ending stays in the name if it is another one.
	if claimed != "" && "."+claimed == ending {
		name = name[:len(name)-len(path.Ext(name))]
	}
	if stem = cleanName(name, maxStem); stem == "" {
		stem = cleanName(string(f.Kind), maxStem)
	}
	if stem == "" {
		stem = "file"
	}
	return stem, ending
}

func isText(m *mimetype.MIME) bool {
	for ; m != nil; m = m.Parent() {
		if m.Is("text/plain") {
			return true
		}
	}
	return false
}

// binary are the endings of what always shows by its first bytes.
var binary = strings.Fields("jpg jpeg png gif webp heic bmp tiff mp3 ogg opus m4a wav flac mp4 mov webm mkv avi pdf doc docx xls xlsx ppt pptx odt ods odp zip gz 7z rar tar exe sqlite")

// alias are the endings that mean the same as the usual one.
var alias = map[string]string{"jpeg": "jpg", "opus": "oga", "ogg": "oga", "m4a": "mp4", "tif": "tiff"}

// cleanName returns s as a part of a file name, at most so many bytes long.
func cleanName(s string, most int) string {
	s = strings.ToValidUTF8(firstBytes(s, 16*most), "")
	var out strings.Builder
	last := '-'
	for _, r := range norm.NFC.String(s) {
		switch {
		case unicode.In(r, unicode.L, unicode.Nd) && isVisible(r):
		case unicode.IsMark(r):
			if strings.ContainsRune("-_.", last) { // it needs a letter
				continue
			}
		case r == '.' || r == '_':
			if strings.ContainsRune("-_.", last) {
				continue
			}
		case unicode.Is(unicode.Cf, r):
			continue
		default:
			if strings.ContainsRune("-_.", last) {
				continue
			}
			r = '-'
		}
		out.WriteRune(r)
		last = r
	}
	return strings.Trim(firstBytes(out.String(), most), "-_.")
}
