// Package backup is the file of a region's backup, and how a region is restored
// from one.
//
// A file is the magic bytes and then frames: the payload's length (4 bytes, big
// endian), the CRC32C of length and payload (4 bytes), the payload, one
// pb.BackupFrame. The first frame is the header, then come the data, which put
// together are a snapshot of the state as region/state writes it, and the footer,
// which has their length and SHA-256. Nothing follows the footer.
//
// What it guarantees:
//   - a file that is empty, cut off, or changed by a single bit is used for
//     nothing; the error names the offset of the frame;
//   - Save leaves a whole file, synced, or none under the name;
//   - a restored region is a new incarnation, without sessions, leases and cluster
//     configuration, and its next tokens are above all before [F4].
package backup

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"

	"google.golang.org/protobuf/proto"

	pb "github.com/headlease/headlease/proto/headlease/v1"
)

const (
	magic  = "hlbackup"
	format = 1
	// frameMax bounds a frame that a reader takes, in bytes.
	frameMax = 4 << 20
	// prefix is a frame's length and checksum.
	prefix = 8
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checksum covers the length too: a flipped length must not pass for a shorter
// frame.
func checksum(length, payload []byte) uint32 {
	return crc32.Update(crc32.Checksum(length, castagnoli), castagnoli, payload)
}

// DamageError is a backup that cannot be used, and where it is damaged.
type DamageError struct {
	// Offset of the first frame that is wrong, in bytes.
	Offset  int64
	Problem string
}

func (e *DamageError) Error() string {
	return fmt.Sprintf("damaged at offset %d: %s; use another backup", e.Offset, e.Problem)
}

// Header makes a header of this format.
func Header(h *pb.BackupHeader) *pb.BackupFrame {
	h.Format = format
	return &pb.BackupFrame{Kind: &pb.BackupFrame_Header{Header: h}}
}

// Data cuts what is written to it into frames, which put takes in order, and
// ends with the footer.
type Data struct {
	put func(*pb.BackupFrame) error
	buf []byte
	sum hash.Hash
	n   uint64
}

// frameTarget is how large a data frame is, in bytes.
const frameTarget = 256 << 10

// NewData returns the writer of a backup's data; the header must have gone out.
func NewData(put func(*pb.BackupFrame) error) *Data {
	return &Data{put: put, buf: make([]byte, 0, frameTarget), sum: sha256.New()}
}

func (d *Data) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		n := min(len(rest), frameTarget-len(d.buf))
		d.buf = append(d.buf, rest[:n]...)
		rest = rest[n:]
		if len(d.buf) == frameTarget {
			if err := d.flush(); err != nil {
				return 0, err
			}
		}
	}
	return len(p), nil
}

func (d *Data) flush() error {
	if len(d.buf) == 0 {
		return nil
	}
	data := bytes.Clone(d.buf) // put may keep it
	d.buf = d.buf[:0]
	_, _ = d.sum.Write(data)
	d.n += uint64(len(data))
	return d.put(&pb.BackupFrame{Kind: &pb.BackupFrame_Data{Data: data}})
}

// Close sends what is left and the footer.
func (d *Data) Close() error {
	if err := d.flush(); err != nil {
		return err
	}
	return d.put(&pb.BackupFrame{Kind: &pb.BackupFrame_Footer{Footer: &pb.BackupFooter{DataBytes: d.n, Sha256: d.sum.Sum(nil)}}})
}

// Writer writes frames to a file.
type Writer struct {
	w      io.Writer
	n      int64
	footer bool
}

// NewWriter writes the magic bytes.
func NewWriter(w io.Writer) (*Writer, error) {
	n, err := io.WriteString(w, magic)
	return &Writer{w: w, n: int64(n)}, err
}

// Put writes a frame.
func (w *Writer) Put(f *pb.BackupFrame) error {
	raw, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(make([]byte, prefix, prefix+proto.Size(f)), f)
	if err != nil {
		return fmt.Errorf("backup: %w", err)
	}
	if len(raw)-prefix > frameMax {
		return fmt.Errorf("backup: a frame of %d bytes is above %d", len(raw)-prefix, frameMax)
	}
	binary.BigEndian.PutUint32(raw, uint32(len(raw)-prefix))
	binary.BigEndian.PutUint32(raw[4:], checksum(raw[:4], raw[prefix:]))
	n, err := w.w.Write(raw)
	w.n += int64(n)
	w.footer = f.GetFooter() != nil
	return err
}

// Complete reports whether the last frame was a footer.
func (w *Writer) Complete() bool { return w.footer }

// Bytes written so far.
func (w *Writer) Bytes() int64 { return w.n }

// Reader reads a backup: the header at once, the data as an io.Reader that ends
// only after the footer was found right. Its errors are *DamageError, or the
// file's.
type Reader struct {
	in     io.Reader
	header *pb.BackupHeader
	// frame is where the present frame begins, next where the one after it does.
	frame, next int64
	data        []byte
	sum         hash.Hash
	n           uint64
	err         error
}

// NewReader reads magic and header.
func NewReader(in io.Reader) (*Reader, error) {
	r := &Reader{in: in, sum: sha256.New()}
	head := make([]byte, len(magic))
	switch n, err := io.ReadFull(in, head); {
	case n == 0 && errors.Is(err, io.EOF):
		return nil, r.damage("the file is empty")
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return nil, r.damage("the file ends before its first frame")
	case err != nil:
		return nil, err
	case string(head) != magic:
		return nil, r.damage("it is not a backup of a region")
	}
	r.next = int64(len(magic))
	f, err := r.read()
	if err != nil {
		return nil, err
	}
	if r.header = f.GetHeader(); r.header == nil {
		return nil, r.damage("it does not begin with a header")
	}
	if r.header.GetFormat() != format {
		return nil, fmt.Errorf("backup of format %d; this program reads format %d: use the version that wrote it (%s)", r.header.GetFormat(), format, r.header.GetVersion())
	}
	return r, nil
}

// Header of the backup.
func (r *Reader) Header() *pb.BackupHeader { return r.header }

// Offset is where the frame begins that was read last.
func (r *Reader) Offset() int64 { return r.frame }

func (r *Reader) damage(format string, args ...any) error {
	return &DamageError{Offset: r.frame, Problem: fmt.Sprintf(format, args...)}
}

func (r *Reader) read() (*pb.BackupFrame, error) {
	r.frame = r.next
	cut := func(n int, err error) error {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return r.damage("the file ends after %d bytes of a frame, without its footer", n)
		}
		return err
	}
	head := make([]byte, prefix)
	if n, err := io.ReadFull(r.in, head); err != nil {
		return nil, cut(n, err)
	}
	length := binary.BigEndian.Uint32(head)
	if length > frameMax {
		return nil, r.damage("a frame of %d bytes is above %d", length, frameMax)
	}
	var payload bytes.Buffer
	if n, err := io.CopyN(&payload, r.in, int64(length)); err != nil { // grows with what comes, not with what length says
		return nil, cut(prefix+int(n), err)
	}
	if checksum(head[:4], payload.Bytes()) != binary.BigEndian.Uint32(head[4:]) {
		return nil, r.damage("a frame's checksum does not match")
	}
	f := &pb.BackupFrame{}
	if err := proto.Unmarshal(payload.Bytes(), f); err != nil {
		return nil, r.damage("a frame cannot be decoded: %v", err)
	}
	r.next += prefix + int64(length)
	return f, nil
}

// Read reads the data.
func (r *Reader) Read(p []byte) (int, error) {
	for len(r.data) == 0 && r.err == nil {
		r.err = r.more()
	}
	if len(r.data) == 0 {
		return 0, r.err
	}
	n := copy(p, r.data)
	r.data = r.data[n:]
	return n, nil
}

func (r *Reader) more() error {
	f, err := r.read()
	if err != nil {
		return err
	}
	switch k := f.GetKind().(type) {
	case *pb.BackupFrame_Data:
		r.data = k.Data
		_, _ = r.sum.Write(k.Data)
		r.n += uint64(len(k.Data))
		return nil
	case *pb.BackupFrame_Footer:
		switch {
		case k.Footer.GetDataBytes() != r.n:
			return r.damage("the footer counts %d bytes of data, and %d came before it", k.Footer.GetDataBytes(), r.n)
		case !bytes.Equal(k.Footer.GetSha256(), r.sum.Sum(nil)):
			return r.damage("the footer's SHA-256 is not that of the data")
		}
		r.frame = r.next
		var one [1]byte
		if n, err := io.ReadFull(r.in, one[:]); n != 0 {
			return r.damage("bytes follow the footer")
		} else if !errors.Is(err, io.EOF) {
			return err
		}
		return io.EOF
	}
	return r.damage("a frame of an unknown kind, or a second header")
}
