(() => {
  const r = JSON.parse(document.getElementById("data").textContent);
  const colours = ["#3b82d0", "#d9822b", "#3a9d6a", "#b565c0", "#8a8f3c", "#c2586d", "#4aa3a8", "#7d6cd6", "#a0764b", "#6b7f94"];
  const colourOf = new Map(r.regions.map((name, i) => [name, colours[i % colours.length]]));
  const seconds = (ms) => ms / 1000;
  const end = seconds(r.duration_ms);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const faults = r.faults.filter((f) => f.disrupts).map((f) => ({ ...f, x1: seconds(f.from_ms), x2: seconds(f.until_ms) }));
  const spans = faults.filter((f) => f.x2 > f.x1);
  const instants = faults.filter((f) => f.x2 <= f.x1);
  const violations = (r.details || []).filter((v) => v.at_ms >= 0).map((v) => ({ ...v, x: seconds(v.at_ms) }));

  const key = document.getElementById("key");
  const entry = (colour, text) => {
    const span = document.createElement("span");
    const box = document.createElement("i");
    box.style.background = colour;
    span.append(box, text);
    key.append(span);
  };
  for (const [name, colour] of colourOf) entry(colour, name);
  entry("color-mix(in srgb, var(--fault) 35%, transparent)", "fault");
  if (violations.length) entry("var(--bad)", "violation");

  const shade = () => [
    Plot.rect(spans, { x1: "x1", x2: "x2", fill: css("--fault"), fillOpacity: 0.16, title: "title" }),
    Plot.ruleX(instants, { x: "x1", stroke: css("--fault"), strokeDasharray: "3,3", title: "title" }),
    Plot.ruleX(violations, { x: "x", stroke: css("--bad"), strokeWidth: 2, title: (v) => v.rule + ": " + v.text }),
  ];

  function draw(width) {
    const narrow = width < 560;
    const left = narrow ? 62 : 96;
    const base = {
      width, marginLeft: left, marginRight: 14,
      x: { domain: [0, end], label: null, tickFormat: (d) => d + " s", ticks: narrow ? 4 : 10 },
      style: { fontSize: narrow ? "11px" : "12px", background: "transparent", color: css("--fg"), overflow: "visible" },
    };
    const put = (id, options) => document.getElementById(id).replaceChildren(Plot.plot({ ...base, ...options }));

    const reigns = r.reigns.map((x) => ({ ...x, x1: seconds(x.from_ms), x2: seconds(x.until_ms) }));
    put("owners", {
      height: 40 + 34 * r.partitions.length,
      y: { domain: r.partitions, label: null, padding: 0.25 },
      marks: [
        ...shade(),
        Plot.barX(reigns, { y: "partition", x1: "x1", x2: "x2", fill: (d) => colourOf.get(d.region) || css("--soft"), title: (d) => `${d.region}, epoch ${d.epoch}` }),
        Plot.text(reigns.filter((d) => (d.x2 - d.x1) / end > (narrow ? 0.2 : 0.12)), {
          y: "partition", x: (d) => (d.x1 + d.x2) / 2, text: (d) => narrow ? `${d.epoch}` : `${d.region} ${d.epoch}`, fill: "white", fontWeight: 600,
        }),
      ],
    });

    const phi = r.phi.map((p) => ({ ...p, x: seconds(p.at_ms), y: Math.min(p.phi, 16) }));
    put("phi", {
      height: 40 + 70 * r.regions.length,
      fy: { domain: r.regions, label: null, axis: null, padding: 0.15 },
      y: { domain: [0, 16], ticks: [0, 8, 16], label: null },
      marks: [
        ...shade(),
        Plot.ruleY([8], { stroke: css("--bad"), strokeDasharray: "2,4" }),
        Plot.lineY(phi, { x: "x", y: "y", z: "observer", fy: "region", stroke: (d) => colourOf.get(d.observer) || css("--soft"), strokeWidth: 1.4, title: (d) => `${d.observer} on ${d.region}` }),
        Plot.text(r.regions, { fy: (d) => d, text: (d) => d, frameAnchor: "top-left", dx: 6, dy: 5, fill: css("--fg"), stroke: css("--bg"), strokeWidth: 3 }),
        Plot.frame({ stroke: css("--line") }),
      ],
    });

    const step = r.rates.length > 1 ? seconds(r.rates[1].at_ms - r.rates[0].at_ms) : 1;
    const rates = r.rates.map((b) => ({ ...b, x: seconds(b.at_ms) }));
    put("rates", {
      height: 180,
      y: { label: null, nice: true, grid: true },
      marks: [
        ...shade(),
        Plot.areaY(rates, { x: "x", y: (d) => d.writes / step, fill: css("--soft"), fillOpacity: 0.25, curve: "step" }),
        Plot.lineY(rates, { x: "x", y: (d) => d.writes / step, stroke: css("--soft"), curve: "step" }),
        Plot.lineY(rates, { x: "x", y: (d) => d.grants / step, stroke: colours[0], strokeWidth: 2, curve: "step" }),
        Plot.dot(rates.filter((d) => d.refused > 0), { x: "x", y: (d) => d.refused / step, fill: css("--bad"), r: 4, title: (d) => `${d.refused} writes refused` }),
        Plot.dot(rates.filter((d) => d.lost > 0), { x: "x", y: (d) => d.lost / step, stroke: css("--bad"), symbol: "times", r: 5, title: (d) => `${d.lost} leases lost` }),
        Plot.ruleY([0], { stroke: css("--line") }),
      ],
    });

    const latencies = rates.filter((d) => d.p99_ms !== null);
    const writes = rates.filter((d) => d.write_p99_ms !== null);
    put("latency", {
      height: 180,
      y: { type: "log", label: null, grid: true, ticks: 4, tickFormat: (d) => d + "" },
      marks: [
        ...shade(),
        Plot.lineY(writes, { x: "x", y: (d) => Math.max(d.write_p99_ms, 0.1), stroke: css("--soft"), strokeDasharray: "4,3" }),
        Plot.lineY(latencies, { x: "x", y: (d) => Math.max(d.p50_ms, 0.1), stroke: colours[2], strokeWidth: 1.5 }),
        Plot.lineY(latencies, { x: "x", y: (d) => Math.max(d.p99_ms, 0.1), stroke: colours[1], strokeWidth: 2 }),
        Plot.dot(latencies, { x: "x", y: (d) => Math.max(d.p99_ms, 0.1), fill: colours[1], r: 2.5, title: (d) => `p50 ${d.p50_ms} ms, p99 ${d.p99_ms} ms` }),
      ],
    });
  }

  let last = 0;
  const fit = () => {
    const width = Math.min(document.body.clientWidth - 32, 1080);
    if (width > 0 && width !== last) draw(last = width);
  };
  fit();
  addEventListener("resize", fit);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(last));
  // Paper is white, and narrower than a screen.
  addEventListener("beforeprint", () => { draw(680); });
  addEventListener("afterprint", () => { last = 0; fit(); });
})();
