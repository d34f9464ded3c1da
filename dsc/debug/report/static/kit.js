// What all sections share: elements, numbers for people, links from one section to another.

const report = JSON.parse(document.getElementById("data").textContent);
const go = {}; // what `main` fills: go.graph(region, graph, node), go.kernel(...), go.source(...), go.picture(index)

/** An HTML element: `h("a", {class: "x", onclick: f}, "text", child)`.  Text is never read as HTML. */
function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

function scaled(n, units, base = 1000) {
  let size = 0;
  while (Math.abs(n) >= base * 0.9995 && size < units.length - 1) {
    n /= base;
    size += 1;
  }
  const digits = Math.abs(n) >= 99.95 || (size === 0 && Number.isInteger(n)) ? 0 : Math.abs(n) >= 9.995 ? 1 : 2;
  return `${n.toFixed(digits)} ${units[size]}`.trim();
}

const bytes = (n) => scaled(n, ["B", "kB", "MB", "GB", "TB"]);
const count = (n) => scaled(n, ["", "k", "M", "G", "T", "P"]);
const rate = (n) => scaled(n, ["", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"]).replace(/\.0+ /, " ");
const seconds = (t) => (t > 0 ? scaled(t * 1e9, ["ns", "µs", "ms", "s"]) : "0");
const percent = (part, whole) => (whole > 0 ? `${part && part / whole < 0.0005 ? "< 0.1" : ((100 * part) / whole).toFixed(part / whole >= 0.0995 ? 0 : 1)} %` : "–");
const launches = (n) => `${n} launch${n === 1 ? "" : "es"}`;
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const sum = (values) => values.reduce((a, b) => a + b, 0);
const graphName = (x) => (report.regions > 1 ? `${x.graph} ${x.region}` : x.graph);

/** A button that looks like a link. */
function link(text, onclick, title = null) {
  return h("button", { class: "link", type: "button", title, onclick }, text);
}

/** Names, each a link to the box in the graph. */
function nodeLinks(region, graph, names, most = 12) {
  const shown = names.slice(0, most).map((n) => [link(n, () => go.graph(region, graph, n)), " "]);
  return [shown, names.length > most ? `and ${names.length - most} more` : ""];
}

const tip = {
  box: document.getElementById("tip"),
  show(event, ...lines) {
    tip.box.replaceChildren(...lines.filter(Boolean).map((line) => h("div", {}, line)));
    tip.box.hidden = false;
    const { offsetWidth: w, offsetHeight: t } = tip.box;
    tip.box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - w - 6))}px`;
    tip.box.style.top = `${event.clientY + 18 + t > innerHeight ? event.clientY - t - 12 : event.clientY + 18}px`;
  },
  hide() {
    tip.box.hidden = true;
  },
};

/** A table whose columns sort: `columns` are {name, value(row), show(row), left, bar}.  Gives the element and `move`. */
function table(columns, rows, onpick, sortBy = null) {
  const body = h("tbody");
  let picked = null;
  let order = { column: sortBy, down: true };
  const heads = columns.map((column) =>
    h("th", { class: column.left ? "left" : "", scope: "col" }, link(column.name, () => sort(column), "Sort")),
  );
  const lines = new Map();

  function sort(column) {
    order = { column, down: order.column === column ? !order.down : !column.left };
    fill();
  }

  function pick(row, quiet = false) {
    if (picked) lines.get(picked)?.classList.remove("picked");
    picked = row;
    if (!row) return;
    lines.get(row).classList.add("picked");
    lines.get(row).scrollIntoView({ block: "nearest" });
    if (!quiet) onpick(row);
  }

  function fill() {
    const { column, down } = order;
    const sorted = column ? [...rows].sort((a, b) => compare(column.value(a), column.value(b)) * (down ? -1 : 1)) : rows;
    heads.forEach((head, i) => head.setAttribute("aria-sort", columns[i] === column ? (down ? "descending" : "ascending") : "none"));
    body.replaceChildren(...sorted.map((row) => lines.get(row)));
  }

  for (const row of rows) {
    const cells = columns.map((c) =>
      h("td", { class: [c.left ? "left" : "", c.wide ? "wide" : ""].join(" ") }, c.bar ? h("span", { class: "track" }, h("span", { class: "bar", style: `width:${(100 * c.bar(row)).toFixed(1)}%` })) : null, c.show(row)),
    );
    lines.set(row, h("tr", { onclick: () => pick(row) }, cells));
  }
  fill();
  const element = h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), body));
  const move = (step) => {
    const visible = [...body.children];
    const now = visible.findIndex((line) => line.classList.contains("picked"));
    const next = visible[Math.max(0, Math.min(visible.length - 1, now + step))];
    for (const [row, line] of lines) if (line === next) pick(row);
  };
  return { element, pick, move };
}

function compare(a, b) {
  return typeof a === "string" ? a.localeCompare(b) : a - b;
}

const STRINGS = String.raw`"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'`;
const RESERVED = "def class return for in if else while import from try finally del with as static void const int long float double struct typedef None True False and or not inline";
const WORDS = Object.fromEntries(
  Object.entries({ python: "#", cpp: "//" }).map(([language, comment]) => [
    language,
    new RegExp(String.raw`(${comment}.*$)|(${STRINGS})|\b(${RESERVED.replaceAll(" ", "|")})\b|\b(\d[\d._]*(?:e[+-]?\d+)?)\b`, "g"),
  ]),
);

/** Source text with comments, words and numbers in colours. */
function code(text, language = "python") {
  return h("pre", { class: "code" }, text.split("\n").map((line) => [...coloured(line, language), "\n"]));
}

function* coloured(line, language = "python") {
  let at = 0;
  for (const match of line.matchAll(WORDS[language])) {
    if (match.index > at) yield line.slice(at, match.index);
    const kind = ["comment", "string", "word", "number"].find((_, i) => match[i + 1]);
    yield h("span", { class: kind }, match[0]);
    at = match.index + match[0].length;
  }
  if (at < line.length) yield line.slice(at);
}

/** Ticks of a linear axis from 0 to `most`: about `n`, at round numbers. */
function ticks(most, n = 5) {
  const raw = most / n || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((x) => x >= raw);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

/** Calls `draw(width)` now and whenever the element becomes another width. */
function whenSized(element, draw) {
  let last = 0;
  new ResizeObserver(() => {
    const width = Math.floor(element.clientWidth);
    if (width && width !== last) draw((last = width));
  }).observe(element);
}

function empty(words) {
  return h("p", { class: "empty" }, words);
}
