package watest

import (
	"bufio"
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/coder/websocket"
	"go.mau.fi/libsignal/ecc"
	waBinary "go.mau.fi/whatsmeow/binary"
	"go.mau.fi/whatsmeow/proto/waCert"
	"go.mau.fi/whatsmeow/proto/waWa6"
	"go.mau.fi/whatsmeow/socket"
	"go.mau.fi/whatsmeow/util/keys"
	"google.golang.org/protobuf/proto"
)

// rootSeed is the same for every double, so that tests in one process may run
// side by side: the client knows its root by one global variable.
var rootSeed = sha256.Sum256([]byte("root of the WhatsApp double"))

func rootKey() *keys.KeyPair { return keys.NewKeyPairFromPrivateKey(rootSeed) }

// Certificates says how the server proves itself in the handshake.
type Certificates struct {
	WrongRoot           bool
	NotBefore, NotAfter time.Time
}

func (c Certificates) chain(static *keys.KeyPair) ([]byte, error) {
	root := rootKey()
	if c.WrongRoot {
		root = keys.NewKeyPair()
	}
	middle := keys.NewKeyPair()
	sign := func(by *keys.KeyPair, serial, issuer uint32, key []byte) (details, signature []byte, err error) {
		details, err = proto.Marshal(&waCert.CertChain_NoiseCertificate_Details{
			Serial:       new(serial),
			IssuerSerial: new(issuer),
			Key:          key,
			NotBefore:    new(uint64(c.NotBefore.Unix())),
			NotAfter:     new(uint64(c.NotAfter.Unix())),
		})
		return details, signature64(by, details), err
	}
	middleDetails, middleSignature, err := sign(root, 1, 0, middle.Pub[:])
	if err != nil {
		return nil, err
	}
	leafDetails, leafSignature, err := sign(middle, 2, 1, static.Pub[:])
	if err != nil {
		return nil, err
	}
	return proto.Marshal(&waCert.CertChain{
		Intermediate: &waCert.CertChain_NoiseCertificate{Details: middleDetails, Signature: middleSignature},
		Leaf:         &waCert.CertChain_NoiseCertificate{Details: leafDetails, Signature: leafSignature},
	})
}

func signature64(by *keys.KeyPair, message []byte) []byte {
	signature := ecc.CalculateSignature(ecc.NewDjbECPrivateKey(*by.Priv), message)
	return signature[:]
}

func verify64(by, message, signature []byte) bool {
	return len(by) == 32 && len(signature) == 64 &&
		ecc.VerifySignature(ecc.NewDjbECPublicKey([32]byte(by)), message, [64]byte(signature))
}

func dh(private *[32]byte, public []byte) ([]byte, error) {
	mine, err := ecdh.X25519().NewPrivateKey(private[:])
	if err != nil {
		return nil, err
	}
	theirs, err := ecdh.X25519().NewPublicKey(public)
	if err != nil {
		return nil, err
	}
	return mine.ECDH(theirs)
}

// sealer is one direction of an encrypted stream: a key and a counter.
type sealer struct {
	aead  cipher.AEAD
	count uint32
}

func newSealer(key []byte) *sealer {
	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err) // the key is always 32 bytes long
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic(err)
	}
	return &sealer{aead: aead}
}

func (s *sealer) nonce() []byte {
	nonce := make([]byte, 12)
	binary.BigEndian.PutUint32(nonce[8:], s.count)
	s.count++
	return nonce
}

func (s *sealer) seal(plain, additional []byte) []byte {
	return s.aead.Seal(nil, s.nonce(), plain, additional)
}

func (s *sealer) open(sealed, additional []byte) ([]byte, error) {
	return s.aead.Open(nil, s.nonce(), sealed, additional)
}

// noise is the symmetric state of Noise_XX_25519_AESGCM_SHA256.
type noise struct {
	hash, chain []byte
	sealer      *sealer
}

func newNoise(header []byte) *noise {
	n := &noise{hash: []byte(socket.NoiseStartPattern), chain: []byte(socket.NoiseStartPattern)}
	n.sealer = newSealer(n.chain)
	n.mixHash(header)
	return n
}

func (n *noise) mixHash(data []byte) {
	sum := sha256.Sum256(append(bytes.Clone(n.hash), data...))
	n.hash = sum[:]
}

func (n *noise) derive(secret []byte) (first, second []byte) {
	out, err := hkdf.Key(sha256.New, secret, n.chain, "", 64)
	if err != nil {
		panic(err) // 64 bytes are within the bounds of HKDF
	}
	return out[:32], out[32:]
}

func (n *noise) mixKey(private *[32]byte, public []byte) error {
	shared, err := dh(private, public)
	if err != nil {
		return err
	}
	var key []byte
	n.chain, key = n.derive(shared)
	n.sealer = newSealer(key)
	return nil
}

func (n *noise) seal(plain []byte) []byte {
	sealed := n.sealer.seal(plain, n.hash)
	n.mixHash(sealed)
	return sealed
}

func (n *noise) open(sealed []byte) ([]byte, error) {
	plain, err := n.sealer.open(sealed, n.hash)
	if err != nil {
		return nil, err
	}
	n.mixHash(sealed)
	return plain, nil
}

// conn is one websocket. Nodes leave in the order of send, written by a
// goroutine of their own: a client that does not read never blocks the server.
type conn struct {
	ws     *websocket.Conn
	ctx    context.Context
	cancel context.CancelFunc
	reader *bufio.Reader
	in     *sealer
	out    *sealer
	static []byte

	mu    sync.Mutex
	queue [][]byte
	ready chan struct{}

	// Guarded by the server's lock.
	device   *device
	link     *linking
	closed   bool
	farewell string
}

func newConn(ctx context.Context, ws *websocket.Conn) *conn {
	c := &conn{ws: ws, ready: make(chan struct{}, 1)}
	c.ctx, c.cancel = context.WithCancel(ctx)
	ws.SetReadLimit(socket.FrameMaxSize)
	c.reader = bufio.NewReader(websocket.NetConn(c.ctx, ws, websocket.MessageBinary))
	return c
}

func (c *conn) readFrame() ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(c.reader, size[1:]); err != nil {
		return nil, err
	}
	frame := make([]byte, binary.BigEndian.Uint32(size[:]))
	_, err := io.ReadFull(c.reader, frame)
	return frame, err
}

// writeFrame sends one frame in one websocket message, since the client puts a
// frame that is split over two messages together wrongly.
func (c *conn) writeFrame(frame []byte) error {
	message := binary.BigEndian.AppendUint32(nil, uint32(len(frame)))[1:]
	return c.ws.Write(c.ctx, websocket.MessageBinary, append(message, frame...))
}

func (c *conn) readHandshake() (*waWa6.HandshakeMessage, error) {
	frame, err := c.readFrame()
	if err != nil {
		return nil, err
	}
	var message waWa6.HandshakeMessage
	return &message, proto.Unmarshal(frame, &message)
}

// handshake answers as the responder and returns what the client says of itself.
func (c *conn) handshake(static *keys.KeyPair, chain []byte) (*waWa6.ClientPayload, error) {
	header := make([]byte, len(socket.WAConnHeader))
	if _, err := io.ReadFull(c.reader, header); err != nil {
		return nil, err
	}
	if !bytes.Equal(header, socket.WAConnHeader) {
		return nil, fmt.Errorf("header %x, want %x", header, socket.WAConnHeader)
	}
	n := newNoise(header)
	hello, err := c.readHandshake()
	if err != nil {
		return nil, fmt.Errorf("client hello: %w", err)
	}
	theirs := hello.GetClientHello().GetEphemeral()
	n.mixHash(theirs)
	ephemeral := keys.NewKeyPair()
	n.mixHash(ephemeral.Pub[:])
	if err := n.mixKey(ephemeral.Priv, theirs); err != nil {
		return nil, fmt.Errorf("client hello: %w", err)
	}
	sealedStatic := n.seal(static.Pub[:])
	if err := n.mixKey(static.Priv, theirs); err != nil {
		return nil, fmt.Errorf("client hello: %w", err)
	}
	answer, err := proto.Marshal(&waWa6.HandshakeMessage{ServerHello: &waWa6.HandshakeMessage_ServerHello{
		Ephemeral: ephemeral.Pub[:],
		Static:    sealedStatic,
		Payload:   n.seal(chain),
	}})
	if err != nil {
		return nil, err
	}
	if err := c.writeFrame(answer); err != nil {
		return nil, err
	}
	finish, err := c.readHandshake()
	if err != nil {
		return nil, fmt.Errorf("client finish: %w", err)
	}
	if c.static, err = n.open(finish.GetClientFinish().GetStatic()); err != nil {
		return nil, fmt.Errorf("client static key: %w", err)
	}
	if err := n.mixKey(ephemeral.Priv, c.static); err != nil {
		return nil, fmt.Errorf("client static key: %w", err)
	}
	plain, err := n.open(finish.GetClientFinish().GetPayload())
	if err != nil {
		return nil, fmt.Errorf("client payload: %w", err)
	}
	var payload waWa6.ClientPayload
	if err := proto.Unmarshal(plain, &payload); err != nil {
		return nil, fmt.Errorf("client payload: %w", err)
	}
	toServer, toClient := n.derive(nil)
	c.in, c.out = newSealer(toServer), newSealer(toClient)
	return &payload, nil
}

func (c *conn) readNode() (*waBinary.Node, error) {
	frame, err := c.readFrame()
	if err != nil {
		return nil, err
	}
	plain, err := c.in.open(frame, nil)
	if err != nil {
		return nil, fmt.Errorf("frame: %w", err)
	}
	if plain, err = waBinary.Unpack(plain); err != nil {
		return nil, fmt.Errorf("frame: %w", err)
	}
	return waBinary.Unmarshal(plain)
}

func (c *conn) enqueue(frame []byte) {
	c.mu.Lock()
	c.queue = append(c.queue, frame)
	c.mu.Unlock()
	select {
	case c.ready <- struct{}{}:
	default:
	}
}

func (c *conn) send(node waBinary.Node) {
	plain, err := waBinary.Marshal(node)
	if err != nil {
		panic(fmt.Errorf("marshal %s: %w", node.String(), err)) // we made it
	}
	c.enqueue(plain)
}

// write empties the queue until the connection ends.
func (c *conn) write() {
	defer c.cancel()
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-c.ready:
		}
		c.mu.Lock()
		queue := c.queue
		c.queue = nil
		c.mu.Unlock()
		for _, plain := range queue {
			if c.writeFrame(c.out.seal(plain, nil)) != nil {
				return
			}
		}
	}
}
