// A drawn graph to pan, zoom and search; a box leads to its kernel, its remarks and its line of source.

function graphSection() {
  const graphs = report.graphs;
  const world = s("g");
  const canvas = s("svg", { class: "picture canvas", tabindex: 0, role: "img", "aria-label": "The graph" }, world);
  const panel = h("aside", { class: "panel", hidden: true });
  const note = h("span", { class: "matches", role: "status" });
  const search = h("input", { type: "search", placeholder: "Search (/)", "aria-label": "Search the graph", oninput: () => find(0) });
  const choice = h("select", { "aria-label": "Which graph", onchange: () => show(Number(choice.value)) }, graphs.map((g, i) => h("option", { value: i }, `${graphName(g)} after ${g.stage}`)));
  const layers = h("button", { type: "button", class: "action", title: "Layers that look alike are drawn once, or all", onclick: () => { all = !all; draw(true); } });
  const view = { x: 0, y: 0, k: 1 };
  const drawn = new Map();
  let [now, all, selected, matches, at] = [initial(graphs), false, null, [], 0];

  const key = () => (all && graphs[now].all ? "all" : "short");
  const boxOf = (name) => world.querySelector(`[data-n="${CSS.escape(name)}"]`);

  function show(index, name = null) {
    if (index !== now) {
      now = index;
      selected = null;
    }
    draw(true);
    if (name) select(name);
  }

  function draw(fresh) {
    const g = graphs[now];
    const picture = g[key()];
    const id = `${now} ${key()}`;
    if (!drawn.has(id)) {
      const parsed = new DOMParser().parseFromString(`<svg xmlns="http://www.w3.org/2000/svg">${picture.svg}</svg>`, "image/svg+xml");
      drawn.set(id, [...parsed.documentElement.childNodes].map((n) => document.importNode(n, true)));
    }
    world.replaceChildren(...drawn.get(id));
    choice.value = now;
    layers.hidden = !g.all;
    layers.textContent = all ? "Fold layers" : "All layers";
    if (fresh) fit();
    if (selected) select(selected, false);
    if (search.value) find(0, false);
  }

  function place() {
    world.setAttribute("transform", `translate(${view.x},${view.y}) scale(${view.k})`);
  }

  /** The whole width, from the top; not so small that nothing can be read. */
  function fit() {
    const picture = graphs[now][key()];
    const width = canvas.clientWidth || 900;
    view.k = Math.max(Math.min((width - 16) / picture.width, 1), width < 700 ? 0.6 : 0.35);
    view.y = 8;
    view.x = (width - picture.width * view.k) / 2;
    if (view.x < 0) {
      const first = world.querySelector(".box");
      const x = first ? Number(/translate\(([-\d.]+)/.exec(first.getAttribute("transform"))[1]) : 0;
      view.x = Math.min(8, Math.max(width - picture.width * view.k - 8, width / 2 - (x + 60) * view.k));
    }
    place();
  }

  function zoom(factor, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) {
    const k = Math.max(0.03, Math.min(4, view.k * factor));
    view.x = x - ((x - view.x) * k) / view.k;
    view.y = y - ((y - view.y) * k) / view.k;
    view.k = k;
    place();
  }

  function centre(name) {
    const found = boxOf(name);
    if (!found) return;
    const [x, y] = /translate\(([-\d.]+),([-\d.]+)/.exec(found.getAttribute("transform")).slice(1).map(Number);
    const width = Number(found.querySelector("rect").getAttribute("width"));
    view.k = Math.max(view.k, 0.7);
    view.x = canvas.clientWidth * (panel.hidden || innerWidth < 700 ? 0.5 : 0.36) - (x + width / 2) * view.k;
    view.y = canvas.clientHeight * (innerWidth < 700 ? 0.22 : 0.4) - y * view.k;
    place();
  }

  function select(name, move = true) {
    for (const old of world.querySelectorAll(".hot")) old.classList.remove("hot");
    const g = graphs[now];
    if (!boxOf(name) && g.all && !all && g.boxes[name]) {
      all = true;
      selected = name;
      draw(true);
      return;
    }
    const box = boxOf(name);
    if (!box) {
      selected = null;
      closePanel();
      return;
    }
    selected = name;
    world.parentNode.classList.add("focused");
    box.classList.add("hot");
    const [reads, readers] = [[], []];
    for (const wire of world.querySelectorAll(".wire")) {
      const { a, b } = wire.dataset;
      if (a !== name && b !== name) continue;
      wire.classList.add("hot");
      boxOf(a)?.classList.add("hot");
      boxOf(b)?.classList.add("hot");
      (a === name ? readers : reads).push(a === name ? b : a);
    }
    panel.replaceChildren(...boxDetail(g, name, reads, readers, closePanel));
    panel.hidden = false;
    if (move) centre(name);
  }

  function closePanel() {
    selected = null;
    panel.hidden = true;
    world.parentNode.classList.remove("focused");
    for (const old of world.querySelectorAll(".hot")) old.classList.remove("hot");
  }

  function find(step, move = true) {
    const words = search.value.trim().toLowerCase();
    for (const old of world.querySelectorAll(".match")) old.classList.remove("match");
    if (!words) {
      matches = [];
      note.textContent = "";
      return;
    }
    const g = graphs[now];
    const drawnHere = (name) => Boolean(boxOf(name));
    const found = Object.entries(g.boxes).filter(([name, b]) => searched(name, b).includes(words)).map(([name]) => name);
    const before = matches[at];
    matches = found.filter(drawnHere);
    if (!matches.length && found.length && g.all && !all) {
      all = true;
      draw(true);
      return;
    }
    for (const name of matches) boxOf(name).classList.add("match");
    const exact = matches.findIndex((name) => [name, g.boxes[name].op].some((x) => x.toLowerCase() === words));
    const on = Math.max(matches.indexOf(before), 0);
    if (!step) at = Math.max(exact, 0);
    else at = selected === before ? (on + step + matches.length) % (matches.length || 1) : on;
    note.textContent = matches.length ? `${at + 1} of ${matches.length}` : "no match";
    if (matches.length && move) step ? select(matches[at]) : centre(matches[at]);
  }

  moveByPointer(canvas, view, place, zoom, (target) => {
    const box = target.closest?.("[data-n]");
    if (box) select(box.dataset.n, false);
    else closePanel();
  });
  search.addEventListener("keydown", (event) => {
    const step = { Enter: event.shiftKey ? -1 : 1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    find(step);
  });

  const buttons = [["+", "Zoom in", () => zoom(1.3)], ["−", "Zoom out", () => zoom(1 / 1.3)], ["Fit", "Whole width", fit]].map(([text, title, onclick]) => h("button", { type: "button", class: "action", title, "aria-label": title, onclick }, text));
  const bar = h("div", { class: "toolbar" }, choice, layers, search, note, h("span", { class: "gap" }), buttons);
  const element = h("div", { class: "graph" }, bar, h("div", { class: "stage" }, canvas, panel), graphLegend());
  const pan = (dx, dy) => () => { view.x += dx; view.y += dy; place(); };
  return {
    element,
    links: {
      picture: (index) => show(index),
      graph: (region, graph, name) => show(Math.max(latest(graphs, region, graph, name), 0), name),
    },
    shown: () => draw(!world.childNodes.length),
    search: () => { search.focus(); search.select(); },
    escape: () => (panel.hidden ? ((search.value = ""), find(0)) : closePanel()),
    keys: { ArrowDown: pan(0, -90), ArrowUp: pan(0, 90), ArrowLeft: pan(90, 0), ArrowRight: pan(-90, 0), "+": () => zoom(1.3), "=": () => zoom(1.3), "-": () => zoom(1 / 1.3), f: fit, n: () => find(1), p: () => find(-1) },
  };
}

/** The forward as it is at the end, or what there is. */
function initial(graphs) {
  const last = graphs.findLastIndex((g) => g.graph === "forward" || g.graph === "inference");
  return Math.max(last, 0);
}

/** The last picture of a graph that has the box; without a name the last one. */
function latest(graphs, region, graph, name) {
  const fits = (g) => g.region === region && g.graph === graph;
  const found = graphs.findLastIndex((g) => fits(g) && (!name || g.boxes[name]));
  return found >= 0 ? found : graphs.findLastIndex(fits);
}

function searched(name, b) {
  return [name, b.title, b.op, b.module, b.kernel, b.keep, b.text, b.line?.[3]].join(" ").toLowerCase();
}

const DECISIONS = {
  kernel: "computed in a kernel",
  aten: "left to ATen",
  open: "no pass has decided yet who computes it",
  view: "a view: moves nothing",
  input: "an input, or a tensor that the forward saved",
  parameter: "a parameter",
  result: "a result",
};
const KEEPS = { save: "saved for the backward", recompute: "computed again in the backward", offload: "offloaded to the host", compress: "saved in fewer bits" };

function boxDetail(g, name, reads, readers, close) {
  const b = g.boxes[name];
  if (!b) return [h("h2", {}, name)];
  const launch = report.launches?.find((x) => x.region === g.region && x.graph === g.graph && x.nodes.includes(name));
  const facts = [
    ["decision", DECISIONS[b.decision]],
    b.keep && ["memory", KEEPS[b.keep] || b.keep],
    b.kernel && ["kernel", launch && go.kernel ? link(`${b.kernel}: ${launch.name}`, () => go.kernel(g.region, g.graph, launch.name)) : b.kernel],
    launch && ["launch", `${seconds(launch.seconds)} on ${report.target.name}, ${bytes(launch.bytes)}, ${launch.bound} bound`],
    b.module && ["module", b.module],
    b.line && ["source", go.source ? link(b.line[3], () => go.source(b.line[0], b.line[1])) : b.line[3]],
    b.flops && ["alone", `${count(b.flops)}FLOP, ${bytes(b.bytes)} moved`],
    b.made && ["result", bytes(b.made)],
    b.count && ["stands for", plural(b.count, "node")],
    reads.length && ["reads", reads.map((n) => [link(n, () => go.graph(g.region, g.graph, n)), " "])],
    readers.length && ["read by", readers.map((n) => [link(n, () => go.graph(g.region, g.graph, n)), " "])],
  ].filter(Boolean);
  const said = (report.passes || []).flatMap((p) => (p.region === g.region ? p.remarks.filter((r) => r[0] === name && (p.graph === g.graph || p.graph === "joint")).map((r) => [p.name, ...r.slice(1)]) : []));
  return [
    h("button", { type: "button", class: "close", "aria-label": "Close", onclick: close }, "×"),
    h("h2", {}, b.title || b.op),
    h("pre", { class: "line" }, b.text),
    b.line ? h("pre", { class: "line user" }, b.line[2]) : null,
    h("dl", { class: "facts" }, facts.map(([k, v]) => [h("dt", {}, k), h("dd", {}, v)])),
    said.length ? h("ul", { class: "remarks" }, said.map(([pass, verdict, why]) => h("li", { class: verdict }, h("b", {}, `${pass} ${verdict}`), h("span", {}, why)))) : null,
  ].filter(Boolean);
}

/** Drag to pan, wheel and two fingers to zoom; a press that does not move is a click. */
function moveByPointer(canvas, view, place, zoom, click) {
  const down = new Map();
  let moved = 0;
  const at = (event) => {
    const r = canvas.getBoundingClientRect();
    return [event.clientX - r.left, event.clientY - r.top];
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (!down.size) moved = 0;
    down.set(event.pointerId, at(event));
  });
  canvas.addEventListener("pointermove", (event) => {
    const last = down.get(event.pointerId);
    if (!last) return;
    const here = at(event);
    const other = [...down].find(([id]) => id !== event.pointerId)?.[1];
    moved += Math.hypot(here[0] - last[0], here[1] - last[1]);
    if (moved > 4) canvas.setPointerCapture(event.pointerId);
    if (other) {
      const before = Math.hypot(last[0] - other[0], last[1] - other[1]);
      const after = Math.hypot(here[0] - other[0], here[1] - other[1]);
      zoom(after / (before || 1), (here[0] + other[0]) / 2, (here[1] + other[1]) / 2);
    } else {
      view.x += here[0] - last[0];
      view.y += here[1] - last[1];
      place();
    }
    down.set(event.pointerId, here);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, (event) => {
      if (down.delete(event.pointerId) && name === "pointerup" && moved <= 4) click(event.target);
    });
  }
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.ctrlKey || event.metaKey || event.deltaMode || Math.abs(event.deltaY) >= 40) return zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0016)), ...at(event));
    view.x -= event.deltaX;
    view.y -= event.deltaY;
    place();
  }, { passive: false });
}

function graphLegend() {
  const box = (kind, words) => [s("svg", { class: "picture", width: 16, height: 12 }, s("g", { class: `box ${kind}` }, s("rect", { x: 1, y: 1, width: 14, height: 10, rx: 2 }))), words];
  const mark = (kind, words) => [s("svg", { class: "picture", width: 8, height: 12 }, s("g", { class: "box" }, s("rect", { class: `mark ${kind}`, width: 4, height: 12 }))), words];
  const items = [box("kernel c0", "kernel (a colour each)"), box("aten", "left to ATen"), box("view", "view"), box("open", "undecided"), box("input", "input, saved"), box("parameter", "parameter"), box("result", "result"), mark("save", "saved for backward"), mark("recompute", "computed again")];
  return h("div", { class: "legend-row" }, items.map((i) => h("span", {}, i)));
}
