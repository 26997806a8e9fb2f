package pause

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		why := errors.New("why")
		ended, end := context.WithCancelCause(t.Context())
		end(why)
		soon, cancel := context.WithTimeoutCause(t.Context(), time.Second, why)
		defer cancel()
		for _, c := range []struct {
			what string
			ctx  context.Context
			d    time.Duration
			want error
			took time.Duration
		}{
			{"the whole time", t.Context(), 3 * time.Second, nil, 3 * time.Second},
			{"no time", t.Context(), 0, nil, 0},
			{"less than none", t.Context(), -time.Second, nil, 0},
			{"ended", ended, time.Second, why, 0},
			{"no time, ended", ended, 0, why, 0},
		} {
			began := time.Now()
			if err := For(c.ctx, c.d); !errors.Is(err, c.want) || time.Since(began) != c.took {
				t.Errorf("%s: %v after %v, want %v after %v", c.what, err, time.Since(began), c.want, c.took)
			}
		}
		if err := For(soon, time.Hour); !errors.Is(err, why) {
			t.Errorf("cut short: %v", err)
		}
	})
}
