// The emitted kernels: a table, and of the chosen one its code beside the graph that it came from.

function kernelsSection() {
  const rows = report.kernels.map((k) => {
    const runs = report.launches.filter((x) => x.group && x.region === k.region && x.graph === k.graph && x.name === k.name);
    return { ...k, runs, seconds: sum(runs.map((x) => x.seconds)) };
  });
  const detail = h("section", { class: "detail" });
  if (!rows.length) {
    return { links: { kernel: () => {} }, element: h("div", { class: "column" }, empty("No kernel was made: everything runs on ATen.")) };
  }
  const most = Math.max(...rows.map((k) => k.seconds)) || 1;
  const columns = [
    { name: "kernel", left: true, value: (k) => k.name, show: (k) => h("span", { class: "ellipsis", title: k.name }, k.name) },
    { name: "graph", left: true, value: (k) => k.graph, show: graphName },
    { name: "runs", value: (k) => k.launches, show: (k) => k.launches },
    { name: "moved", value: (k) => k.bytes * k.launches, show: (k) => bytes(k.bytes * k.launches) },
    { name: "time", value: (k) => k.seconds, show: (k) => seconds(k.seconds), bar: (k) => k.seconds / most },
  ];
  const list = table(columns, rows, (k) => detail.replaceChildren(...kernelDetail(k)), columns[4]);
  const element = h("div", { class: "split" }, h("div", { class: "list" }, h("p", { class: "note" }, `${plural(rows.length, "kernel")}, ${launches(sum(rows.map((k) => k.launches)))} a step. Time: modelled on ${report.target.name}.`), list.element), detail);
  list.pick([...rows].sort((a, b) => b.seconds - a.seconds)[0]);
  const kernel = (region, graph, name) => {
    const found = rows.find((k) => k.region === region && k.graph === graph && k.name === name);
    if (found) list.pick(found);
  };
  return { links: { kernel }, element, keys: { ArrowDown: () => list.move(1), ArrowUp: () => list.move(-1) } };
}

function kernelDetail(k) {
  const traffic = Object.entries(k.traffic);
  return [
    h("h2", {}, k.name),
    h("p", { class: "note" }, `${k.launches === 1 ? "One launch" : `${k.launches} launches`} of ${bytes(k.bytes)} in ${graphName(k)}: `, k.runs.slice(0, 16).map((x) => [link(x.group, () => go.graph(k.region, k.graph, x.nodes[0])), " "]), k.runs.length > 16 ? `and ${k.runs.length - 16} more` : ""),
    h("h3", {}, "Computes"),
    h("div", { class: "scroll" }, h("table", { class: "origin" }, k.nodes.map(([text, line], i) => h("tr", {}, h("td", { class: "left" }, h("code", {}, text)), h("td", { class: "left dim" }, line === k.nodes[i - 1]?.[1] ? "" : line))))),
    h("h3", {}, k.language === "cpp" ? "C++" : "Triton"),
    code(k.source, k.language),
    h("h3", {}, "Reads and writes, one launch"),
    h("dl", { class: "chips" }, traffic.map(([name, n]) => h("div", {}, h("dt", {}, name), h("dd", {}, bytes(n))))),
  ];
}
