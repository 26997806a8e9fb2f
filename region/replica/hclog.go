package replica

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"

	"github.com/hashicorp/go-hclog"
)

// hlog is hashicorp's logger over slog. Only its methods that do something are
// written out; the rest comes from the null logger.
type hlog struct {
	hclog.Logger
	out     *slog.Logger
	name    string
	implied []any
}

func newHlog(out *slog.Logger, name string) hclog.Logger {
	return &hlog{Logger: hclog.NewNullLogger(), out: out, name: name}
}

func slogLevel(l hclog.Level) slog.Level {
	switch l {
	case hclog.Trace:
		return slog.LevelDebug - 4
	case hclog.Debug:
		return slog.LevelDebug
	case hclog.Warn:
		return slog.LevelWarn
	case hclog.Error:
		return slog.LevelError
	default:
		return slog.LevelInfo
	}
}

func (h *hlog) enabled(l hclog.Level) bool {
	return h.out.Enabled(context.Background(), slogLevel(l))
}

func (h *hlog) Log(level hclog.Level, msg string, args ...any) {
	if level == hclog.Off || !h.enabled(level) {
		return
	}
	attrs := make([]any, 0, len(h.implied)+len(args)+2)
	attrs = append(attrs, "part", h.name)
	attrs = append(attrs, h.implied...)
	for _, a := range args {
		if f, ok := a.(hclog.Format); ok && len(f) > 0 {
			if format, ok := f[0].(string); ok {
				a = fmt.Sprintf(format, f[1:]...)
			}
		}
		attrs = append(attrs, a)
	}
	h.out.Log(context.Background(), slogLevel(level), msg, attrs...)
}

func (h *hlog) Trace(msg string, args ...any) { h.Log(hclog.Trace, msg, args...) }
func (h *hlog) Debug(msg string, args ...any) { h.Log(hclog.Debug, msg, args...) }
func (h *hlog) Info(msg string, args ...any)  { h.Log(hclog.Info, msg, args...) }
func (h *hlog) Warn(msg string, args ...any)  { h.Log(hclog.Warn, msg, args...) }
func (h *hlog) Error(msg string, args ...any) { h.Log(hclog.Error, msg, args...) }

func (h *hlog) IsTrace() bool { return h.enabled(hclog.Trace) }
func (h *hlog) IsDebug() bool { return h.enabled(hclog.Debug) }
func (h *hlog) IsInfo() bool  { return h.enabled(hclog.Info) }
func (h *hlog) IsWarn() bool  { return h.enabled(hclog.Warn) }
func (h *hlog) IsError() bool { return h.enabled(hclog.Error) }

func (h *hlog) ImpliedArgs() []any { return h.implied }
func (h *hlog) Name() string       { return h.name }

func (h *hlog) With(args ...any) hclog.Logger {
	c := *h
	c.implied = append(append([]any(nil), h.implied...), args...)
	return &c
}

func (h *hlog) Named(name string) hclog.Logger {
	c := *h
	c.name = h.name + "." + name
	return &c
}

func (h *hlog) ResetNamed(name string) hclog.Logger {
	c := *h
	c.name = name
	return &c
}

func (h *hlog) StandardWriter(*hclog.StandardLoggerOptions) io.Writer { return lineWriter{h} }

func (h *hlog) StandardLogger(o *hclog.StandardLoggerOptions) *log.Logger {
	return log.New(h.StandardWriter(o), "", 0)
}

// lineWriter logs each write as one line.
type lineWriter struct{ h *hlog }

func (w lineWriter) Write(b []byte) (int, error) {
	w.h.Info(string(bytes.TrimRight(b, "\n")))
	return len(b), nil
}
