// The pipeline: a row a pass with its time, and of the chosen one what it did.

function passesSection() {
  const rows = report.passes;
  const total = sum(rows.map((r) => r.seconds));
  const detail = h("section", { class: "detail" });
  const lines = [];
  let chosen = -1;

  function choose(i) {
    i = Math.max(0, Math.min(rows.length - 1, i));
    lines[chosen]?.classList.remove("picked");
    chosen = i;
    lines[i].classList.add("picked");
    lines[i].scrollIntoView({ block: "nearest" });
    detail.replaceChildren(...passDetail(rows[i]));
    detail.scrollTop = 0;
  }

  const body = h("tbody");
  let start = 0;
  let last = "";
  rows.forEach((row, i) => {
    if (graphName(row) !== last) {
      last = graphName(row);
      body.append(h("tr", { class: "group" }, h("th", { colspan: 10, scope: "rowgroup" }, last)));
    }
    const bar = h("span", {
      class: `span ${row.name === "link" ? "emit" : ""}`,
      style: `left:${(100 * start) / (total || 1)}%;width:max(2px,${(100 * row.seconds) / (total || 1)}%)`,
    });
    start += row.seconds;
    const nodes = row.before === row.nodes ? row.nodes : `${row.before} → ${row.nodes}`;
    const line = h(
      "tr",
      { onclick: () => choose(i) },
      h("td", { class: "left" }, link(row.name === "link" ? "link (emit)" : row.name, () => choose(i))),
      h("td", { class: "timeline" }, row.name === "trace" ? null : bar),
      [seconds(row.seconds), nodes, row.kernels, row.aten, bytes(row.bytes), bytes(row.peak), seconds(row.modelled), row.remarks.length || ""].map(
        (text, k) => h("td", { class: k > 1 && k < 7 ? "extra" : "" }, row.name === "trace" && k === 0 ? "" : text),
      ),
    );
    lines.push(line);
    body.append(line);
  });
  const names = ["", `timeline of ${seconds(total)}`, "time", "nodes", "kernels", "ATen", "moved", "peak", "modelled", "remarks"];
  const head = h("tr", {}, names.map((n, k) => h("th", { scope: "col", class: k < 2 ? "left" : k > 3 && k < 9 ? "extra" : "" }, n)));
  const list = h("div", { class: "scroll passes" }, h("table", {}, h("thead", {}, head), body));
  const element = h("div", { class: "split" }, h("div", { class: "list" }, traced(total), list, leftAlone()), detail);
  if (rows.length) choose(firstTelling(rows));
  else detail.append(empty("No graph was compiled."));
  return {
    element,
    keys: { ArrowDown: () => choose(chosen + 1), ArrowUp: () => choose(chosen - 1) },
    search: () => detail.querySelector("input")?.focus(),
  };
}

/** The pass with most to tell. */
function firstTelling(rows) {
  return rows.reduce((best, row, i) => (row.remarks.length > rows[best].remarks.length ? i : best), 0);
}

function traced(passes) {
  const rest = Math.max(report.seconds - passes, 0);
  const share = (100 * rest) / (report.seconds || 1);
  return h(
    "div",
    { class: "traced" },
    h("div", {}, `Captured in ${seconds(report.seconds)}: `, h("b", {}, seconds(rest)), " to run and trace the model, ", h("b", {}, seconds(passes)), " for passes and emission"),
    h("div", { class: "whole", role: "img", "aria-label": `${share.toFixed(0)} per cent is tracing` }, h("span", { class: "rest", style: `width:${share}%` }), h("span", { class: "span", style: `left:${share}%;width:${100 - share}%` })),
  );
}

function leftAlone() {
  return report.left.map((x) => h("p", { class: "warning" }, `${x.graph} stays with ${x.graph === "dynamo" ? "eager PyTorch" : "ATen"}: ${x.why}`));
}

function passDetail(row) {
  const title = row.name === "link" ? `${graphName(row)}: the program` : row.name === "trace" ? `${graphName(row)}, as traced` : `${row.options || row.name} on ${graphName(row)}`;
  const parts = [h("h2", {}, title)];
  if (row.picture >= 0 && report.graphs.length) parts.push(h("button", { type: "button", class: "action", onclick: () => go.picture(row.picture) }, "Show the graph"));
  if (row.numbers.length) {
    const shown = (name, value) => (name.includes("byte") ? bytes(value) : count(value));
    parts.push(h("dl", { class: "chips" }, row.numbers.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, shown(name, value))))));
  }
  if (row.about) parts.push(h("details", {}, h("summary", {}, "What this pass does"), h("pre", { class: "about" }, row.about)));
  if (row.remarks.length) parts.push(...remarks(row));
  if (row.program) parts.push(h("h3", {}, "Program"), code(row.program));
  else parts.push(...difference(row));
  return parts;
}

function remarks(row) {
  const list = h("ul", { class: "remarks" });
  const filter = h("input", { type: "search", placeholder: "Filter remarks (/)", "aria-label": "Filter remarks", oninput: fill });
  function fill() {
    const words = filter.value.toLowerCase();
    const kept = row.remarks.filter((r) => r.join(" ").toLowerCase().includes(words));
    list.replaceChildren(
      ...kept.slice(0, 150).map(([node, verdict, why]) => h("li", { class: verdict }, h("b", {}, verdict), link(node || "graph", () => go.graph(row.region, row.graph, node)), h("span", {}, why))),
      kept.length > 150 ? h("li", {}, `and ${kept.length - 150} more: filter them`) : "",
    );
    if (!kept.length) list.append(h("li", {}, "No remark has these words."));
  }
  fill();
  const did = row.remarks.filter((r) => r[1] === "did").length;
  return [h("h3", {}, `Remarks: ${did} done, ${row.remarks.length - did} left, and why`), filter, list];
}

function difference(row) {
  if (row.name === "trace") return [empty("The graph as AOTAutograd traced it, before any pass of dsc.")];
  if (!row.diff.length) return [empty("This pass changed nothing in this graph.")];
  const most = 400;
  const box = h("pre", { class: "diff" });
  const mark = { same: " ", gone: "−", new: "+", noted: "~", hunk: "" };
  const line = ([kind, text]) => h("div", { class: kind }, mark[kind] + text);
  box.append(...row.diff.slice(0, most).map(line));
  if (row.diff.length > most) {
    const more = h("button", { type: "button", class: "action", onclick: () => { more.remove(); box.append(...row.diff.slice(most).map(line)); } }, `Show ${row.diff.length - most} more lines`);
    box.append(more);
  }
  const changed = row.diff.filter((d) => d[0] !== "same" && d[0] !== "hunk").length;
  return [h("h3", {}, `Difference: ${plural(changed, "line")}`), h("p", { class: "note" }, "− gone   + new   ~ same node, other notes"), box];
}
