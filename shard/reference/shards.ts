// Which shard a key belongs to: the reference in TypeScript, of package shard.
//
// xxhash64 is written from its specification, so that nothing needs to be installed; use a package of the registry where
// speed matters. Run as a program, it checks itself against a file of test vectors; a Node.js that does not strip types
// itself needs a compiler before it:
//
//     esbuild shards.ts > shards.mjs && node shards.mjs shard-vectors.json

import { readFileSync } from "node:fs";

const MASK = (1n << 64n) - 1n;
const P1 = 0x9e3779b185ebca87n;
const P2 = 0xc2b2ae3d27d4eb4fn;
const P3 = 0x165667b19e3779f9n;
const P4 = 0x85ebca77c2b2ae63n;
const P5 = 0x27d4eb2f165667c5n;

const rotl = (x: bigint, n: bigint): bigint => ((x << n) | (x >> (64n - n))) & MASK;
const round = (acc: bigint, lane: bigint): bigint => (rotl((acc + lane * P2) & MASK, 31n) * P1) & MASK;

/** xxhash64 of the bytes with seed 0. */
export function xxhash64(data: Uint8Array): bigint {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const n = data.byteLength;
  let at = 0;
  let h: bigint;
  if (n >= 32) {
    const accs: bigint[] = [(P1 + P2) & MASK, P2, 0n, -P1 & MASK];
    for (; at + 32 <= n; at += 32) {
      for (let i = 0; i < 4; i++) accs[i] = round(accs[i], view.getBigUint64(at + 8 * i, true));
    }
    h = (rotl(accs[0], 1n) + rotl(accs[1], 7n) + rotl(accs[2], 12n) + rotl(accs[3], 18n)) & MASK;
    for (const acc of accs) h = ((h ^ round(0n, acc)) * P1 + P4) & MASK;
  } else {
    h = P5;
  }
  h = (h + BigInt(n)) & MASK;
  for (; at + 8 <= n; at += 8) {
    h = (rotl(h ^ round(0n, view.getBigUint64(at, true)), 27n) * P1 + P4) & MASK;
  }
  if (at + 4 <= n) {
    h = (rotl(h ^ ((BigInt(view.getUint32(at, true)) * P1) & MASK), 23n) * P2 + P3) & MASK;
    at += 4;
  }
  for (; at < n; at++) {
    h = (rotl(h ^ ((BigInt(data[at]) * P5) & MASK), 11n) * P1) & MASK;
  }
  h = ((h ^ (h >> 33n)) * P2) & MASK;
  h = ((h ^ (h >> 29n)) * P3) & MASK;
  return h ^ (h >> 32n);
}

/** The shard of a key: the exceptions' if it is among them, else its hash shard. shards is a power of two. */
export function shardOf(key: string, shards: number, exceptions: Record<string, number> = {}): number {
  if (Object.hasOwn(exceptions, key)) return exceptions[key];
  return Number(xxhash64(new TextEncoder().encode(key)) & BigInt(shards - 1));
}

interface Vector {
  key: string;
  shards: number;
  hash: string;
  shard: number;
}

function main(path: string): number {
  const file: { exceptions: Record<string, number>; vectors: Vector[] } = JSON.parse(readFileSync(path, "utf8"));
  let wrong = 0;
  for (const v of file.vectors) {
    const hash = xxhash64(new TextEncoder().encode(v.key)).toString(16).padStart(16, "0");
    const got = shardOf(v.key, v.shards, file.exceptions);
    if (hash !== v.hash || got !== v.shard) {
      wrong++;
      console.error(`${JSON.stringify(v.key)} of ${v.shards}: hash ${hash}, shard ${got}; want ${v.hash}, ${v.shard}`);
    }
  }
  console.log(`${file.vectors.length} vectors, ${wrong} wrong`);
  return wrong > 0 || file.vectors.length === 0 ? 1 : 0;
}

if (process.argv.length > 2) process.exit(main(process.argv[2]));
