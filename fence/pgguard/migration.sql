-- The fence of Headlease: the highest token seen of each resource, and the check that a write makes in its own
-- transaction. Run it once, in the schema of the data; again it changes nothing. To use it from plain SQL:
--
--     BEGIN;
--     SELECT headlease_fence('orders/7', 4294967297);  -- refuses a lower token than one seen before
--     UPDATE orders SET state = 'paid' WHERE id = 7;
--     COMMIT;

CREATE TABLE IF NOT EXISTS headlease_mark (
    resource text PRIMARY KEY CHECK (resource <> '' AND octet_length(resource) <= 1024),
    -- Below 2^53, as every token is. Never lowered and never deleted: a mark that is gone lets late writes in.
    mark bigint NOT NULL CHECK (mark > 0 AND mark < 9007199254740992)
) WITH (fillfactor = 50);

-- Writers of a resource hold its lock shared until their transactions end, a rising mark takes it alone. It is an advisory lock
-- and not the row's because its queue is fair, so that the writes of an old holder cannot keep a new one waiting for ever,
-- and because a write then changes nothing but its own rows. The key is a hash: two resources with one key wait for each
-- other, no more.
CREATE OR REPLACE FUNCTION headlease_lock_key(resource text) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT hashtextextended(resource, 4919713) $$;

-- headlease_check refuses what is no resource or no token: NULL compares with nothing, and would pass.
CREATE OR REPLACE FUNCTION headlease_check(resource text, token bigint) RETURNS void
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    IF resource IS NULL OR resource = '' THEN
        RAISE EXCEPTION 'no resource is named' USING ERRCODE = 'invalid_parameter_value', HINT = 'Name the leased resource.';
    ELSIF token IS NULL OR token <= 0 OR token >= 9007199254740992 THEN
        RAISE EXCEPTION '% is no fencing token', coalesce(token::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Take the token from the lease.';
    END IF;
END
$$;

-- headlease_claim raises the mark to a new holder's token, before the holder reads. It waits for transactions under way
-- that were checked with lower tokens, and later ones wait for it.
CREATE OR REPLACE FUNCTION headlease_claim(claimed text, given bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    seen bigint;
BEGIN
    PERFORM headlease_check(claimed, given);
    PERFORM pg_advisory_xact_lock(headlease_lock_key(claimed));
    INSERT INTO headlease_mark AS m (resource, mark) VALUES (claimed, given)
    ON CONFLICT (resource) DO UPDATE SET mark = excluded.mark WHERE m.mark < excluded.mark;
    IF NOT FOUND THEN
        SELECT mark INTO seen FROM headlease_mark WHERE resource = claimed;
        IF seen > given THEN
            RAISE EXCEPTION 'stale token % for %: % was seen', given, claimed, seen
                USING ERRCODE = 'HL001', DETAIL = json_build_object('resource', claimed, 'seen', seen, 'given', given)::text,
                HINT = 'Another holder has the resource: stop working on it.';
        END IF;
    END IF;
END
$$;

-- headlease_fence refuses a token that is lower than the mark, raises the mark to a higher one, and keeps it from rising
-- until the transaction ends: check and write are one. Writers with the same token do not wait for each other.
CREATE OR REPLACE FUNCTION headlease_fence(fenced text, given bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    seen bigint;
    lock bigint := headlease_lock_key(fenced);
BEGIN
    -- This is every write's: what is an expression and not a query costs next to nothing.
    IF fenced IS NULL OR fenced = '' OR given IS NULL OR given <= 0 OR given >= 9007199254740992 THEN
        PERFORM headlease_check(fenced, given);
    END IF;
    -- A mark never falls, so that what is seen without a lock says which lock is needed.
    SELECT mark INTO seen FROM headlease_mark WHERE resource = fenced;
    IF seen < given THEN
        PERFORM pg_advisory_xact_lock(lock);
    ELSIF NOT pg_try_advisory_xact_lock_shared(lock) THEN -- it passes nobody who waits
        PERFORM pg_advisory_xact_lock_shared(lock);
    END IF;
    IF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
        SELECT mark INTO seen FROM headlease_mark WHERE resource = fenced; -- of now: each statement has its own snapshot
    ELSE
        -- The transaction's snapshot may be older than the mark; a row lock then fails with a serialization error.
        SELECT mark INTO seen FROM headlease_mark WHERE resource = fenced FOR SHARE;
    END IF;
    IF seen IS NULL THEN
        RAISE EXCEPTION 'no holder has claimed %', fenced
            USING ERRCODE = 'HL002', DETAIL = json_build_object('resource', fenced)::text,
            HINT = 'Claim the resource with a valid lease first.';
    ELSIF seen > given THEN
        RAISE EXCEPTION 'stale token % for %: % was seen', given, fenced, seen
            USING ERRCODE = 'HL001', DETAIL = json_build_object('resource', fenced, 'seen', seen, 'given', given)::text,
            HINT = 'Another holder has the resource: stop working on it.';
    ELSIF seen < given THEN
        UPDATE headlease_mark SET mark = given WHERE resource = fenced;
    END IF;
END
$$;

-- An example, for tables whose rows name their resource and carry the writer's token: no statement that forgets the
-- check passes.
--
--     CREATE TRIGGER fenced BEFORE INSERT OR UPDATE ON orders
--         FOR EACH ROW EXECUTE FUNCTION headlease_fence_row('resource', 'token');
CREATE OR REPLACE FUNCTION headlease_fence_row() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM headlease_fence(to_jsonb(NEW) ->> TG_ARGV[0], (to_jsonb(NEW) ->> TG_ARGV[1])::bigint);
    RETURN NEW;
END
$$;
