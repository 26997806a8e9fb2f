"""Which shard a key belongs to: the reference in Python, of package shard.

xxhash64 is written from its specification, so that nothing needs to be installed; use the package xxhash where speed
matters. Run as a program, it checks itself against a file of test vectors:

    python3 shards.py shard-vectors.json
"""

import json
import sys

MASK = (1 << 64) - 1
P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)


def _rotl(x, n):
    return ((x << n) | (x >> (64 - n))) & MASK


def _round(acc, lane):
    return _rotl((acc + lane * P2) & MASK, 31) * P1 & MASK


def xxhash64(data: bytes) -> int:
    """xxhash64 of the bytes with seed 0."""
    n, at = len(data), 0

    def word(size):
        nonlocal at
        at += size
        return int.from_bytes(data[at - size:at], "little")

    if n >= 32:
        accs = [(P1 + P2) & MASK, P2, 0, -P1 & MASK]
        while at + 32 <= n:
            accs = [_round(acc, word(8)) for acc in accs]
        h = sum(_rotl(acc, r) for acc, r in zip(accs, (1, 7, 12, 18))) & MASK
        for acc in accs:
            h = ((h ^ _round(0, acc)) * P1 + P4) & MASK
    else:
        h = P5
    h = (h + n) & MASK
    while at + 8 <= n:
        h = (_rotl(h ^ _round(0, word(8)), 27) * P1 + P4) & MASK
    if at + 4 <= n:
        h = (_rotl(h ^ (word(4) * P1 & MASK), 23) * P2 + P3) & MASK
    while at < n:
        h = _rotl(h ^ (word(1) * P5 & MASK), 11) * P1 & MASK
    h = (h ^ (h >> 33)) * P2 & MASK
    h = (h ^ (h >> 29)) * P3 & MASK
    return h ^ (h >> 32)


def shard_of(key: str, shards: int, exceptions=None) -> int:
    """The shard of a key: the exceptions' if it is among them, else its hash shard. shards is a power of two."""
    if exceptions and key in exceptions:
        return exceptions[key]
    return xxhash64(key.encode("utf-8")) & (shards - 1)


def main(path):
    with open(path, encoding="utf-8") as f:
        vectors = json.load(f)
    wrong = 0
    for v in vectors["vectors"]:
        got_hash = f'{xxhash64(v["key"].encode("utf-8")):016x}'
        got = shard_of(v["key"], v["shards"], vectors["exceptions"])
        if got_hash != v["hash"] or got != v["shard"]:
            wrong += 1
            print(f'{v["key"]!r} of {v["shards"]}: hash {got_hash}, shard {got}; want {v["hash"]}, {v["shard"]}', file=sys.stderr)
    print(f'{len(vectors["vectors"])} vectors, {wrong} wrong')
    return 1 if wrong or not vectors["vectors"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
