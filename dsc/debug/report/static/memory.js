// Bytes alive at every step of the program, stacked by what they are.

const KINDS = [["input", "inputs and parameters"], ["saved", "saved for the backward"], ["gradient", "gradients"], ["tangent", "incoming gradients"], ["result", "results"], ["temporary", "temporaries"], ["pool", "pool of temporaries"]];

function memorySection() {
  const profiles = report.memory.filter((p) => p.names.length);
  const element = h("div", { class: "column" });
  if (!profiles.length) element.append(empty("No program was made, so there is no memory to show."));
  const views = profiles.map(memoryView);
  element.append(...views.map((v) => v.element));
  const first = views[0];
  return { element, keys: first ? { ArrowLeft: () => first.move(-1), ArrowRight: () => first.move(1), ArrowUp: () => first.move(-10), ArrowDown: () => first.move(10) } : {} };
}

function memoryView(p) {
  const steps = p.names.length;
  const stacks = stacked(p, steps);
  const chart = h("div", { class: "chart" });
  const title = h("h3");
  const list = h("div");
  let step = p.at;
  let cursor = null;
  let scaleX = () => 0;

  function draw(width) {
    const [left, right, top, bottom, height] = [64, 12, 26, 30, Math.min(380, Math.max(220, innerHeight * 0.42))];
    const most = p.peak * 1.06 || 1;
    const x = (i) => left + ((width - left - right) * i) / steps;
    const y = (v) => top + (height - top - bottom) * (1 - v / most);
    scaleX = x;
    const svg = s("svg", { class: "plot", width, height, role: "img", "aria-label": `Bytes alive over ${steps} steps; the peak is ${bytes(p.peak)}` });
    for (const t of ticks(most)) svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: y(t), y2: y(t) }), s("text", { class: "tick", x: left - 8, y: y(t) + 4, "text-anchor": "end" }, bytes(t)));
    for (const { kind, low, high } of stacks) svg.append(s("path", { class: `area ${kind}`, d: area(low, high, x, y) }));
    if (p.split) svg.append(s("line", { class: "divide", x1: x(p.split), x2: x(p.split), y1: top, y2: height - bottom }), s("text", { class: "tick", x: x(p.split) - 6, y: height - 8, "text-anchor": "end" }, "forward"), s("text", { class: "tick", x: x(p.split) + 6, y: height - 8 }, "backward"));
    svg.append(s("line", { class: "peak", x1: left, x2: width - right, y1: y(p.peak), y2: y(p.peak) }));
    const near = x(p.at) > width * 0.6;
    svg.append(s("text", { class: "peak-name", x: x(p.at) + (near ? -8 : 8), y: y(p.peak) - 7, "text-anchor": near ? "end" : "start" }, `peak ${bytes(p.peak)} in ${p.names[p.at]}`));
    cursor = s("line", { class: "cursor", y1: top, y2: height - bottom });
    svg.append(cursor);
    const stepAt = (event) => Math.max(0, Math.min(steps - 1, Math.floor(((event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right)) * steps)));
    svg.addEventListener("pointermove", (event) => tip.show(event, `step ${stepAt(event)}: ${p.names[stepAt(event)]}`, `${bytes(p.bytes[stepAt(event)])} alive`));
    svg.addEventListener("pointerleave", tip.hide);
    svg.addEventListener("click", (event) => choose(stepAt(event)));
    chart.replaceChildren(svg);
    choose(step);
  }

  function choose(i) {
    step = Math.max(0, Math.min(steps - 1, i));
    cursor?.setAttribute("x1", scaleX(step + 0.5));
    cursor?.setAttribute("x2", scaleX(step + 0.5));
    title.textContent = `Alive in step ${step}, ${p.names[step]}: ${bytes(p.bytes[step])}${step === p.at ? ", the peak" : ""}`;
    const alive = p.values.filter(([, , first, last]) => first <= step && step <= last).sort((a, b) => b[1] - a[1]);
    const rows = alive.slice(0, 25);
    const graphOf = (first) => (p.split ? (first < p.split ? "forward" : "backward") : p.title);
    const columns = [
      { name: "value", left: true, value: (v) => v[0], show: (v) => (v[4] === "pool" ? v[0] : [link(v[0], () => go.graph(p.region, graphOf(v[2]), v[0])), v[5] ? h("span", { class: "dim" }, ` ${v[5]}`) : ""]) },
      { name: "bytes", value: (v) => v[1], show: (v) => bytes(v[1]), bar: (v) => v[1] / (rows[0][1] || 1) },
      { name: "what", left: true, value: (v) => v[4], show: (v) => [h("span", { class: `swatch ${v[4]}` }), v[4]] },
      { name: "steps", value: (v) => v[2], show: (v) => `${Math.max(v[2], 0)} – ${v[3]}` },
    ];
    list.replaceChildren(table(columns, rows, () => {}).element, alive.length > rows.length ? h("p", { class: "note" }, `and ${alive.length - rows.length} smaller ones`) : "");
  }

  const present = new Set(stacks.map((k) => k.kind));
  const legend = h("div", { class: "legend-row" }, KINDS.filter(([k]) => present.has(k)).map(([k, words]) => h("span", {}, h("span", { class: `swatch ${k}` }), words)));
  const heading = h("h2", {}, `Memory of ${report.regions > 1 ? `graph ${p.region}, ` : ""}${p.title}`);
  const share = report.target.memory ? `, ${percent(p.peak, report.target.memory)} of ${report.target.name}'s ${bytes(report.target.memory)}` : "";
  const element = h("section", { class: "card" }, heading, h("p", { class: "note" }, `Peak ${bytes(p.peak)}${share}. Click or use the arrow keys to choose a step.`), chart, legend, title, list);
  whenSized(chart, draw);
  choose(step);
  return { element, move: (n) => choose(step + n) };
}

/** Bytes by kind, each on top of those before. */
function stacked(p, steps) {
  const by = new Map(KINDS.map(([k]) => [k, new Float64Array(steps + 1)]));
  for (const [, n, first, last, kind] of p.values) {
    by.get(kind)[Math.max(first, 0)] += n;
    if (last + 1 <= steps) by.get(kind)[last + 1] -= n;
  }
  const out = [];
  let low = new Float64Array(steps);
  for (const [kind, change] of by) {
    const high = new Float64Array(steps);
    let alive = 0;
    for (let i = 0; i < steps; i++) {
      alive += change[i];
      high[i] = low[i] + alive;
    }
    if (high.some((v, i) => v > low[i])) {
      out.push({ kind, low, high });
      low = high;
    }
  }
  return out;
}

function area(low, high, x, y) {
  const n = high.length;
  let d = `M${x(0)},${y(high[0])}`;
  for (let i = 0; i < n; i++) d += `V${y(high[i]).toFixed(1)}H${x(i + 1).toFixed(1)}`;
  for (let i = n - 1; i >= 0; i--) d += `V${y(low[i]).toFixed(1)}H${x(i).toFixed(1)}`;
  return `${d}Z`;
}
