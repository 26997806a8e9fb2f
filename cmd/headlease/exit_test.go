package main

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
)

func TestExitCodes(t *testing.T) {
	failed := errors.New("no quorum")
	for name, c := range map[string]struct {
		err  error
		code int
		text string
	}{
		"done":            {nil, 0, ""},
		"failed":          {failed, 1, "headlease: no quorum\n"},
		"usage":           {fmt.Errorf("%w", &usageError{"headlease get", failed}), 2, "headlease: no quorum; see 'headlease get --help'\n"},
		"of a child":      {&exitError{code: 42}, 42, ""},
		"with a code":     {&exitError{code: 7, err: failed}, 7, "headlease: no quorum\n"},
		"code, annotated": {fmt.Errorf("run: %w", &exitError{code: 7, err: failed}), 7, "headlease: run: no quorum\n"},
	} {
		var stderr bytes.Buffer
		if code := exitCode(c.err, &stderr); code != c.code || stderr.String() != c.text {
			t.Errorf("%s: code %d, %q", name, code, stderr.String())
		}
	}
}

func TestExecute(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if code := execute([]string{"version"}, &stdout, &stderr); code != exitOK || stdout.Len() == 0 || stderr.Len() != 0 {
		t.Errorf("version: code %d, %q, %q", code, &stdout, &stderr)
	}
	if code := execute([]string{"no-such"}, &stdout, &stderr); code != exitUsage {
		t.Errorf("unknown command: code %d", code)
	}
}
