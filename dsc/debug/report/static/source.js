// The user's program, each line with the modelled time that it takes, forward and backward.

function sourceSection() {
  const files = report.sources;
  if (!files.length) {
    return { links: { source: () => {} }, element: h("div", { class: "column" }, empty("The lines of the program are not known.")) };
  }
  const total = sum(report.launches.map((x) => x.seconds));
  const pane = h("div", { class: "list source" });
  const detail = h("section", { class: "detail" });
  const choice = h("select", { "aria-label": "Which file", onchange: () => show(Number(choice.value)) }, files.map((f, i) => h("option", { value: i }, `${f.place}, ${percent(sum(f.lines.map((l) => l[1])), total)} of the step`)));
  let now = -1;
  let picked = 0;

  function show(index, line = 0) {
    if (index !== now) {
      now = index;
      choice.value = index;
      pane.replaceChildren(listing(files[index], total, (n) => pick(n)));
    }
    const known = files[index].lines;
    pick(line || known.reduce((a, b) => (b[1] > a[1] ? b : a), known[0])[0]);
  }

  function pick(number) {
    pane.querySelector(".picked")?.classList.remove("picked");
    const row = pane.querySelector(`[data-line="${number}"]`);
    if (!row) return;
    picked = number;
    row.classList.add("picked");
    row.scrollIntoView({ block: "nearest" });
    detail.replaceChildren(...lineDetail(files[now], number, total));
  }

  const move = (step) => {
    const numbers = files[now].lines.map((l) => l[0]);
    const next = step > 0 ? numbers.find((n) => n > picked) : numbers.findLast((n) => n < picked);
    if (next) pick(next);
  };
  const source = (file, line) => {
    const index = files.findIndex((f) => f.file === file);
    if (index >= 0) show(index, line);
  };
  const element = h("div", { class: "split" }, h("div", { class: "list" }, h("div", { class: "toolbar" }, choice), pane), detail);
  show(0);
  return { links: { source }, element, shown: () => pane.querySelector(".picked")?.scrollIntoView({ block: "center" }), keys: { ArrowDown: () => move(1), ArrowUp: () => move(-1) } };
}

function listing(file, total, pick) {
  const known = new Map(file.lines.map(([n, t, runs]) => [n, { t, runs }]));
  const most = Math.max(...file.lines.map((l) => l[1])) || 1;
  const rows = file.text.split("\n").map((text, i) => {
    const found = known.get(i + 1);
    return h(
      "tr",
      { "data-line": i + 1, class: found ? "known" : "", onclick: found ? () => pick(i + 1) : null },
      h("td", { class: "number" }, i + 1),
      h("td", { class: "heat" }, found ? h("span", { class: "bar", style: `width:${((48 * found.t) / most).toFixed(1)}px` }) : null),
      h("td", { class: "share" }, found ? percent(found.t, total) : ""),
      h("td", { class: "left text" }, [...coloured(text)]),
    );
  });
  return h("table", { class: "listing" }, h("tbody", {}, rows));
}

function lineDetail(file, number, total) {
  const [, time, runs] = file.lines.find((l) => l[0] === number) ?? [number, 0, []];
  const found = runs.map((i) => report.launches[i]);
  const columns = [
    { name: "launch", left: true, value: (x) => x.name, show: (x) => link(x.name, () => (x.group ? go.kernel(x.region, x.graph, x.name) : go.graph(x.region, x.graph, x.nodes[0]))) },
    { name: "graph", left: true, value: (x) => x.graph, show: (x) => link(graphName(x), () => go.graph(x.region, x.graph, x.nodes[0]), "Show in the graph") },
    { name: "time", value: (x) => x.seconds, show: (x) => seconds(x.seconds) },
    { name: "bound", left: true, value: (x) => x.bound, show: (x) => x.bound },
  ];
  return [
    h("h2", {}, `${file.place}:${number}`),
    h("pre", { class: "line user" }, file.text.split("\n")[number - 1].trim()),
    h("p", { class: "note" }, `${seconds(time)}, ${percent(time, total)} of the step, in ${launches(found.length)}; a launch shares its time out among the lines that it came from.`),
    table(columns, found, () => {}, columns[2]).element,
  ];
}
