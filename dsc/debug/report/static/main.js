// Tabs, the line of facts, and the keyboard.  A section is made when it is first opened.

const SECTIONS = [
  { name: "Passes", part: "passes", make: passesSection, links: [] },
  { name: "Graph", part: "graphs", make: graphSection, links: ["graph", "picture"] },
  { name: "Memory", part: "memory", make: memorySection, links: [] },
  { name: "Roofline", part: "launches", make: rooflineSection, links: [] },
  { name: "Kernels", part: "kernels", make: kernelsSection, links: ["kernel"] },
  { name: "Source", part: "sources", make: sourceSection, links: ["source"] },
];
const sections = SECTIONS.filter((x) => report[x.part]);
const tabBar = document.getElementById("tabs");
let open = null;

function openTab(name) {
  const section = sections.find((x) => x.name === name);
  if (section === open) return section;
  if (open) {
    open.element.hidden = true;
    open.tab.setAttribute("aria-selected", "false");
  }
  open = section;
  tip.hide();
  if (!section.element) {
    Object.assign(section, { links: {} }, section.make());
    section.element.setAttribute("role", "tabpanel");
    document.getElementById("main").append(section.element);
  }
  section.element.hidden = false;
  section.tab.setAttribute("aria-selected", "true");
  section.tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  section.shown?.();
  return section;
}

function facts() {
  const step = report.step;
  const shown = step
    ? [["modelled step", seconds(step.modelled)], ["kernels", step.kernels], ["ATen calls", step.aten], ["moved", bytes(step.bytes)], ["FLOP", count(step.flops)], ["peak memory", bytes(step.peak)]]
    : [];
  const line = [...shown, ["", report.versions]];
  document.getElementById("facts").append(...line.map(([name, value]) => h("span", {}, name ? h("b", {}, value) : value, name ? ` ${name}` : "")));
}

function onKey(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName);
  if (event.key === "Escape") {
    if (typing) document.activeElement.blur();
    open.escape?.();
    tip.hide();
    return;
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    event.preventDefault();
    if (!open.search) openTab("Graph");
    open.search?.();
    return;
  }
  const number = Number(event.key);
  if (number >= 1 && number <= sections.length) return openTab(sections[number - 1].name);
  if (open.keys?.[event.key]) {
    event.preventDefault();
    open.keys[event.key]();
  }
}

facts();
for (const [i, section] of sections.entries()) {
  section.tab = h("button", { type: "button", role: "tab", "aria-selected": "false", title: `Key ${i + 1}`, onclick: () => openTab(section.name) }, h("kbd", {}, i + 1), section.name);
  tabBar.append(section.tab);
  for (const name of section.links) go[name] = (...what) => openTab(section.name).links[name](...what);
}
tabBar.hidden = sections.length < 2;
document.addEventListener("keydown", onKey);
openTab(sections[0].name);
