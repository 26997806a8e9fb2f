-- The idempotency keys of Headlease: which messages had their effect, and with what result. Run it once, in the schema of
-- the data; again it changes nothing.
CREATE TABLE IF NOT EXISTS headlease_idempotency (
    key text PRIMARY KEY CHECK (key <> '' AND octet_length(key) <= 256),
    -- Of the attempt that began last; NULL once one is done.
    attempt text,
    attempt_ends timestamptz,
    result bytea,
    -- When it was done, or began; keys are forgotten by it.
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX IF NOT EXISTS headlease_idempotency_at ON headlease_idempotency (at);
