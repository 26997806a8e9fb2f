#!/bin/bash
# full.sh [OUT]: the larger searches of the three models, one after the other, each within MEM= megabytes (12000) and Q= minutes (60).
# Prints a table; a search that its limits ended is "partial" and shows only what it has seen. Exit 1 on a violation, or if a search
# whose line says "complete" was not.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$(mktemp -d)}
mkdir -p "$out"
for tool in spin gcc; do command -v $tool >/dev/null || { echo "full.sh: needs $tool" >&2; exit 1; }; done
MEM=${MEM:-12000}; Q=${Q:-60}
exact="-DHC4 -DMEMLIM=$MEM"; deep="-m3000000 -w26 -Q$Q"
bits="-DBITSTATE -DMEMLIM=$MEM"; wide="-m1000000 -w36 -k3 -Q$Q"   # 2^36 bits: 8 GiB
lease="-DHELD -DMAXS=2 -DMAXE=0 -DQL1"

# wanted | what | model | spin flags | cc flags | pan flags
jobs() { cat <<JOBS_END
complete|2 regions + 1 witness, 4 ballots|register.pml|-DMAXR=2|$exact|$deep
complete|the same, a region's promise in two steps|register.pml|-DMAXR=2 -DTWOSTEP|$exact|$deep
any|the same, D = 3 ticks|register.pml|-DMAXR=2 -DDV=3|$exact|$deep
any|2 regions + 1 witness, 6 ballots|register.pml|-DMAXR=3|$bits|$wide
any|2 regions + 3 witnesses, 4 ballots|register.pml|-DNR=2 -DNW=3 -DMAXR=2|$bits|$wide
any|3 regions + 2 witnesses, 6 ballots|register.pml|-DNR=3 -DNW=2 -DMAXR=2|$bits|$wide
complete|a wiped voter is replaced, as the code does it|reconfig.pml|-DNB=3 -DFIX -DSHRINK -DCODE|$exact|$deep
any|a voter joins and another leaves, as the code does it|reconfig.pml|-DNB=3 -DFIX -DCODE|$exact|$deep
complete|a wiped voter is replaced, any ballot to any proposer|reconfig.pml|-DNB=3 -DSHRINK|$exact|$deep
any|a voter joins and another leaves, any ballot to any proposer|reconfig.pml|-DNB=3|$exact|$deep
complete|sessions|lease.pml|$lease -DNODRAIN -DNODROP -DNORPLY -DNORST -DNOREL -DNOREV|$exact|$deep
any|the order of messages|lease.pml|-DHELD -DMAXS=3 -DMAXE=0 -DMAXT=1 -DNODRAIN -DNODROP -DNORPLY -DNORST -DNOREL|$exact|$deep
any|revocations|lease.pml|$lease -DMAXT=2 -DNODRAIN -DNODROP -DNORPLY -DNOREL -DNORST|$exact|$deep
any|drains|lease.pml|-DHELD -DMAXS=2 -DMAXT=2 -DQL1 -DNORPLY -DNORST|$exact|$deep
any|drops|lease.pml|-DHELD -DMAXS=2 -DMAXT=2 -DQL1 -DNORPLY -DNORST -DNOREL -DNODRAIN -DNOREV|$exact|$deep
any|answers to Acquire|lease.pml|$lease -DMAXT=2 -DNODRAIN -DNODROP -DNORST|$exact|$deep
any|TTL above D|lease.pml|$lease -DTTL=3 -DMAXT=2 -DNODRAIN -DNODROP -DNORPLY -DNOREL -DNORST|$exact|$deep
any|D above TTL|lease.pml|$lease -DD=3 -DMAXT=2 -DNODRAIN -DNODROP -DNORPLY -DNOREL -DNORST|$exact|$deep
any|everything|lease.pml||$bits|$wide
JOBS_END
}

bad=0; start=$SECONDS
while IFS='|' read -r want what model flags cc pan; do
  dir=$(mktemp -d -p "$out"); began=$SECONDS
  # shellcheck disable=SC2086 # the flags are words
  ( cd "$dir" && cp "$here/$model" m.pml && spin $flags -a m.pml && gcc -O2 -w -DSAFETY -DNOREDUCE $cc -o pan pan.c && ./pan $pan ) >"$dir/pan.log" 2>&1
  got=failed
  if grep -q "assertion violated" "$dir/pan.log"; then got=VIOLATION
  elif grep -q "errors: 0" "$dir/pan.log"; then
    got=complete
    grep -qE "Search not completed|max search depth too small|^pan: (reached|out of)|memory limit" "$dir/pan.log" && got=partial
    [[ $cc == *BITSTATE* ]] && got=partial   # a state may be taken for another
  fi
  case $got in VIOLATION|failed) bad=1;; partial) [ "$want" = complete ] && bad=1;; esac
  printf '%-9s %-13s %12s states %5ds  %s [%s]\n' "$got" "$model" "$(grep -m1 'states, stored' "$dir/pan.log" | awk '{print $1}')" $((SECONDS - began)) "$what" "$flags"
  if [ $got = complete ] || [ $got = partial ]; then rm -rf "$dir"; else echo "          the run is in $dir"; tail -3 "$dir/pan.log"; fi
done < <(jobs)
echo "$((SECONDS - start)) s"
exit $bad
