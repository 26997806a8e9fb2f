package filemark

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"slices"
	"strconv"

	"github.com/headlease/headlease/fence"
)

// The journal is text, one record a line, so that an operator can read it:
//
//	headlease marks 1
//	5d8f1c02 4294967297 "lock/ledger"
//
// A record is the CRC-32C (Castagnoli) of what follows it, the token and the
// quoted resource. At most one record is being written at any time, so a crash
// leaves at most one torn line, at the end: a proper prefix of a record,
// perhaps followed by the zeros of a block that was allocated but not written.
// Everything else that does not check is damage and is refused.
const header = "headlease marks 1\n"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// CorruptError tells that the journal is damaged in a way no crash explains.
// Marks may be lost, so the guard does not open: with a mark lost it would
// accept a write that it has to refuse.
type CorruptError struct {
	Path string
	// Line and Offset (bytes from the start) of the first damaged record.
	Line   int
	Offset int
	Reason string
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("mark journal %s: line %d (byte %d) is damaged: %s; restore it from a copy at least as new as the data that it guards",
		e.Path, e.Line, e.Offset, e.Reason)
}

func appendRecord(b []byte, resource string, token fence.Token) []byte {
	body := strconv.AppendQuoteToASCII(append(strconv.AppendUint(nil, uint64(token), 10), ' '), resource)
	return append(append(fmt.Appendf(b, "%08x ", crc32.Checksum(body, castagnoli)), body...), '\n')
}

// parseRecord reads one line without its newline.
func parseRecord(line []byte) (resource string, token fence.Token, err error) {
	if len(line) < 10 || line[8] != ' ' {
		return "", 0, errors.New("not a record")
	}
	body := line[9:]
	if want := fmt.Sprintf("%08x", crc32.Checksum(body, castagnoli)); want != string(line[:8]) {
		return "", 0, fmt.Errorf("checksum is %q, want %q", line[:8], want)
	}
	number, quoted, ok := bytes.Cut(body, []byte{' '})
	if !ok {
		return "", 0, errors.New("no resource")
	}
	if token, err = fence.ParseToken(string(number)); err != nil {
		return "", 0, err
	}
	if resource, err = strconv.Unquote(string(quoted)); err != nil {
		return "", 0, fmt.Errorf("resource %q: %w", quoted, err)
	}
	return resource, token, nil
}

// decode reads a whole journal. torn is the number of bytes at its end that
// belong to a record whose write a crash cut off.
func decode(path string, data []byte) (marks map[string]fence.Token, torn int, err error) {
	if !bytes.HasPrefix(data, []byte(header)) {
		return nil, 0, fmt.Errorf("mark journal %s: does not begin with %q: not a mark journal of this version; name another path", path, header[:len(header)-1])
	}
	marks = map[string]fence.Token{}
	line, offset := 1, len(header)
	for offset < len(data) {
		line++
		end := bytes.IndexByte(data[offset:], '\n')
		if end < 0 {
			break
		}
		if err := raise(marks, data[offset:offset+end]); err != nil {
			return nil, 0, &CorruptError{Path: path, Line: line, Offset: offset, Reason: err.Error()}
		}
		offset += end + 1
	}
	tail := data[offset:]
	if len(tail) == 0 {
		return marks, 0, nil
	}
	written := bytes.TrimRight(tail, "\x00")
	if _, _, err := parseRecord(written); err == nil {
		// Whole but for its newline. Nobody was told of it, and a mark that
		// is too high refuses nothing that it should let pass.
		return marks, len(tail), raise(marks, written)
	}
	if len(written) == 0 {
		return marks, len(tail), nil
	}
	// A torn line is a proper prefix of a record. One that checks up to its
	// last byte is a record whose newline was damaged.
	if _, _, err := parseRecord(written[:len(written)-1]); err == nil || bytes.IndexByte(written, 0) >= 0 {
		return nil, 0, &CorruptError{Path: path, Line: line, Offset: offset, Reason: "the last record is damaged, not cut off"}
	}
	return marks, len(tail), nil
}

func raise(marks map[string]fence.Token, line []byte) error {
	resource, token, err := parseRecord(line)
	if err != nil {
		return err
	}
	if token <= marks[resource] {
		return fmt.Errorf("token %s of %q does not rise from %s", token, resource, marks[resource])
	}
	marks[resource] = token
	return nil
}

// encode writes a journal that holds these marks and nothing else.
func encode(marks map[string]fence.Token) []byte {
	b := []byte(header)
	for _, resource := range slices.Sorted(maps.Keys(marks)) {
		b = appendRecord(b, resource, marks[resource])
	}
	return b
}
