package link

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := &turns{free: 1}
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		first, err := tr.take(ctx)
		if err != nil {
			t.Fatal(err)
		}
		came := make(chan int, 4)
		wait := func(ctx context.Context, n int) {
			go func() {
				if done, err := tr.take(ctx); err == nil {
					came <- n
					_ = done // it ends by itself
				}
			}()
			synctest.Wait()
		}
		gone, leave := context.WithCancel(ctx)
		wait(ctx, 1)
		wait(ctx, 2)
		wait(gone, 3)
		leave()
		synctest.Wait()
		first()
		first() // counts once
		synctest.Wait()
		if len(came) != 1 || <-came != 2 {
			t.Fatal("the newest that still waits has the turn, and nobody else")
		}
		time.Sleep(turnFor / 2) // virtual
		if len(came) != 0 {
			t.Fatal("two turns at a time")
		}
		time.Sleep(turnFor)
		synctest.Wait()
		if len(came) != 1 || <-came != 1 {
			t.Fatal("a turn that nobody ends must end by itself")
		}
		time.Sleep(turnFor)
		synctest.Wait()
		if tr.free != 1 || tr.waiting.Len() != 0 {
			t.Errorf("%d turns are free and %d wait at the end", tr.free, tr.waiting.Len())
		}
	})
}
