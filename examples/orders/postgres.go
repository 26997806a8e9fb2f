package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/pgguard"
)

// schema of the outcome. journal is for the checker alone: who wrote what, in
// which order.
const schema = `
CREATE TABLE IF NOT EXISTS orders (
    account text NOT NULL,
    seq     bigint NOT NULL,
    body    text NOT NULL,
    UNIQUE (account, seq)
);
CREATE TABLE IF NOT EXISTS journal (
    n        bigserial PRIMARY KEY,
    resource text NOT NULL,
    token    bigint NOT NULL,
    account  text NOT NULL,
    seq      bigint NOT NULL
);`

// postgres is a table and a book.
type postgres struct {
	pool  *pgxpool.Pool
	fence *pgguard.Guard
	log   string // the server's, for Refused
}

func openPostgres(ctx context.Context, dsn, log string) (*postgres, error) {
	pool, err := pgxpool.New(ctx, dsn+" pool_max_conns=30")
	return &postgres{pool, pgguard.New(), log}, err
}

func (p *postgres) Close() { p.pool.Close() }

func (p *postgres) migrate(ctx context.Context) error {
	_, err := p.pool.Exec(ctx, pgguard.Migration+schema)
	return err
}

// Claim is table.
func (p *postgres) Claim(ctx context.Context, resource string, token fence.Token) error {
	return p.fence.Claim(ctx, p.pool, resource, token)
}

// Write is table.
func (p *postgres) Write(ctx context.Context, w write) error {
	accounts, seqs, bodies := make([]string, len(w.Orders)), make([]int64, len(w.Orders)), make([]string, len(w.Orders))
	for i, o := range w.Orders {
		accounts[i], seqs[i], bodies[i] = o.Account, int64(o.Seq), o.Body
	}
	return p.fence.Do(ctx, p.pool, w.Resource, w.Compared, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO orders SELECT * FROM unnest($1::text[], $2::bigint[], $3::text[]) ON CONFLICT DO NOTHING`, accounts, seqs, bodies); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `INSERT INTO journal (resource, token, account, seq) SELECT $1, $2, * FROM unnest($3::text[], $4::bigint[])`,
			w.Resource, int64(w.Token), accounts, seqs)
		return err
	})
}

// Orders is book.
func (p *postgres) Orders(ctx context.Context) (n int, err error) {
	err = p.pool.QueryRow(ctx, `SELECT count(*) FROM orders`).Scan(&n)
	return n, err
}

// Writes is book.
func (p *postgres) Writes(ctx context.Context) (n int, err error) {
	err = p.pool.QueryRow(ctx, `SELECT count(*) FROM journal`).Scan(&n)
	return n, err
}

// Accounts is book.
func (p *postgres) Accounts(ctx context.Context, each func(account string, count, last uint64)) error {
	rows, err := p.pool.Query(ctx, `SELECT account, count(*), max(seq) FROM orders GROUP BY account`)
	if err != nil {
		return err
	}
	var account string
	var count, last uint64
	_, err = pgx.ForEachRow(rows, []any{&account, &count, &last}, func() error {
		each(account, count, last)
		return nil
	})
	return err
}

// Journal is book.
func (p *postgres) Journal(ctx context.Context, each func(resource string, token fence.Token, account string, seq uint64)) error {
	rows, err := p.pool.Query(ctx, `SELECT resource, token, account, seq FROM journal ORDER BY n`)
	if err != nil {
		return err
	}
	var resource, account string
	var token, seq uint64
	_, err = pgx.ForEachRow(rows, []any{&resource, &token, &account, &seq}, func() error {
		each(resource, fence.Token(token), account, seq)
		return nil
	})
	return err
}

// sqlState makes the server's log name each error's code.
const sqlState = "log_line_prefix=%e "

// Refused is book: of the server's own log.
func (p *postgres) Refused() (n int, err error) {
	file, err := os.Open(p.log)
	if err != nil {
		return 0, err
	}
	defer file.Close() //nolint:errcheck // nothing was written
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 16<<20) // a statement is on one line
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "HL001 ERROR:") {
			n++
		}
	}
	if err := lines.Err(); err != nil {
		return n, fmt.Errorf("%s: %w", p.log, err)
	}
	return n, nil
}
