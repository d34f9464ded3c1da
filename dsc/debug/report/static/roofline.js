// Each launch by its operations a byte and the rate that the model of costs gives it, below the target's roofs.

function rooflineSection() {
  const rows = report.launches;
  const element = h("div", { class: "column" });
  if (!rows.length) {
    element.append(empty("Nothing is launched, so there is nothing to plot."));
    return { element };
  }
  const total = sum(rows.map((x) => x.seconds));
  const groups = alike(rows);
  const plot = h("div", { class: "chart" });
  const columns = [
    { name: "launch", left: true, value: (g) => g.name, show: (g) => h("span", { class: "ellipsis", title: g.ops }, h("span", { class: `dot ${g.group ? "fused" : "aten"}` }), g.name) },
    { name: "graph", left: true, value: (g) => g.graph, show: (g) => graphName(g) },
    { name: "times", value: (g) => g.all.length, show: (g) => g.all.length },
    { name: "time", value: (g) => g.total, show: (g) => seconds(g.total), bar: (g) => g.total / groups[0].total },
    { name: "share", value: (g) => g.total, show: (g) => percent(g.total, total) },
    { name: "moved", value: (g) => g.bytes, show: (g) => bytes(g.bytes) },
    { name: "FLOP", value: (g) => g.flops, show: (g) => count(g.flops) },
    { name: "FLOP/B", value: (g) => g.flops / (g.bytes || 1), show: (g) => (g.flops / (g.bytes || 1)).toFixed(1) },
    { name: "bound", left: true, value: (g) => g.bound, show: (g) => g.bound },
  ];
  const open = (g) => (g.group ? go.kernel(g.region, g.graph, g.name) : go.graph(g.region, g.graph, g.nodes[0]));
  const list = table(columns, groups, (g) => mark(g));
  const mark = (g) => {
    for (const point of plot.querySelectorAll(".point")) point.classList.toggle("hot", point.dataset.i === String(groups.indexOf(g)));
    where.replaceChildren(`${g.name}: ${g.ops || g.nodes[0]} `, h("button", { type: "button", class: "action", onclick: () => open(g) }, g.group ? "Show the kernel" : "Show in the graph"));
  };
  const where = h("p", { class: "note" }, "Choose a launch to find it in the plot.");
  const waits = ["compute", "memory", "launch"].map((b) => [b, sum(rows.filter((x) => x.bound === b).map((x) => x.seconds))]);
  const words = `${seconds(total)} a step on ${report.target.name}, modelled: ${waits.filter(([, t]) => t).map(([b, t]) => `${percent(t, total)} ${b} bound`).join(", ")}.`;
  element.append(
    h("section", { class: "card" }, h("h2", {}, "Roofline"), h("p", { class: "note" }, words), plot, h("div", { class: "legend-row" }, h("span", {}, h("span", { class: "dot fused" }), "kernel"), h("span", {}, h("span", { class: "dot aten" }), "call of ATen"), h("span", {}, "size: share of the step"))),
    h("section", { class: "card" }, h("h2", {}, `${launches(rows.length)}, ${groups.length} that differ`), where, list.element),
  );
  whenSized(plot, (width) => plot.replaceChildren(roofs(width, groups, total, (g) => list.pick(g))));
  return { element, keys: { ArrowDown: () => list.move(1), ArrowUp: () => list.move(-1), Enter: () => element.querySelector(".note .action")?.click() } };
}

/** Launches that do the same, together, the longest first. */
function alike(rows) {
  const found = new Map();
  for (const x of rows) {
    const key = [x.region, x.graph, x.group ? x.name : x.ops, x.flops, x.bytes].join("|");
    if (!found.has(key)) found.set(key, { ...x, total: 0, all: [] });
    found.get(key).total += x.seconds;
    found.get(key).all.push(x);
  }
  return [...found.values()].sort((a, b) => b.total - a.total);
}

function roofs(width, groups, total, pick) {
  const [left, right, top, bottom] = [92, 16, 16, 40];
  const height = Math.min(430, Math.max(260, innerHeight * 0.48));
  const { bandwidth, peak, kind } = report.target;
  const points = groups.filter((g) => g.flops && g.bytes).map((g) => ({ g, x: g.flops / g.bytes, y: g.flops / g.seconds }));
  const names = kind === "cuda" ? ["fp32", "tf32", "bf16"] : ["fp32"];
  const tops = names.filter((n) => peak[n]).map((n) => [n, peak[n]]);
  const highest = Math.max(...tops.map(([, v]) => v));
  const logs = (values) => values.map(Math.log10);
  const x0 = Math.floor(Math.min(-1, ...logs(points.map((p) => p.x))));
  const x1 = Math.ceil(Math.max(Math.log10(highest / bandwidth) + 0.5, ...logs(points.map((p) => p.x))));
  const y1 = Math.log10(highest) + 0.35;
  const y0 = Math.max(Math.floor(Math.min(y1 - 3, ...logs(points.map((p) => p.y)))), y1 - 7);
  const X = (v) => left + ((width - left - right) * (Math.log10(v) - x0)) / (x1 - x0);
  const Y = (v) => top + (height - top - bottom) * (1 - (Math.max(Math.log10(v), y0) - y0) / (y1 - y0));
  const svg = s("svg", { class: "plot", width, height, role: "img", "aria-label": "Roofline plot" });
  for (let e = x0; e <= x1; e++) svg.append(s("line", { class: "grid", x1: X(10 ** e), x2: X(10 ** e), y1: top, y2: height - bottom }), s("text", { class: "tick", x: X(10 ** e), y: height - bottom + 16, "text-anchor": "middle" }, `${10 ** e >= 1 ? 10 ** e : (10 ** e).toFixed(-e)}`));
  for (let e = Math.ceil(y0); e <= y1; e++) svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: Y(10 ** e), y2: Y(10 ** e) }), s("text", { class: "tick", x: left - 8, y: Y(10 ** e) + 4, "text-anchor": "end" }, rate(10 ** e)));
  svg.append(s("text", { class: "tick", x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, "operations a byte"));
  const start = Math.max(10 ** x0, 10 ** y0 / bandwidth);
  for (const [name, value] of tops) {
    const ridge = value / bandwidth;
    svg.append(s("path", { class: "roof", d: `M${X(start)},${Y(start * bandwidth)}L${X(ridge)},${Y(value)}H${width - right}` }));
    svg.append(s("text", { class: "roof-name", x: width - right - 4, y: Y(value) - 5, "text-anchor": "end" }, `${name} ${rate(value)}`));
  }
  const middle = Math.sqrt(start * (tops[0][1] / bandwidth));
  const angle = (Math.atan2(Y(middle * 10 * bandwidth) - Y(middle * bandwidth), X(middle * 10) - X(middle)) * 180) / Math.PI;
  svg.append(s("text", { class: "roof-name", transform: `translate(${X(middle)},${Y(middle * bandwidth) - 7}) rotate(${angle})`, "text-anchor": "middle" }, `${bytes(bandwidth)}/s`));
  for (const { g, x, y } of points) {
    const point = s("circle", { class: `point ${g.group ? "fused" : "aten"}`, cx: X(x), cy: Y(y), r: 4 + 22 * Math.sqrt(g.total / total), "data-i": groups.indexOf(g), onclick: () => pick(g) });
    point.addEventListener("pointermove", (event) => tip.show(event, `${g.name}${g.all.length > 1 ? ` ×${g.all.length}` : ""}`, `${rate(y)} at ${x.toFixed(2)} FLOP/B, ${g.bound} bound`, `${seconds(g.total)}, ${percent(g.total, total)} of the step`));
    point.addEventListener("pointerleave", tip.hide);
    svg.append(point);
  }
  return svg;
}
