// The graph: modules that open and close, found by search, coloured by what they cost.

import { bodyOf, bytes, color, count, el, time } from "./dom.js";
import { type Group, type Shown, Tree } from "./modules.js";
import { Picture } from "./picture.js";
import type { FrameView } from "./report.js";
import type { Selection } from "./selection.js";

const MOST_ELEMENTS = 150; // that are laid out at once
const MOST_FOUND = 50;

export type Shade = "cost" | "communication" | "memory";
const SHADES: [Shade, string][] = [
  ["cost", "predicted time"],
  ["communication", "time of collectives"],
  ["memory", "bytes of results"],
];

export function drawGraph(view: FrameView, selection: Selection): () => void {
  const body = bodyOf("graph");
  const section = new GraphSection(view, selection, body);
  return () => section.dispose();
}

class GraphSection {
  private graph = 0;
  private tree: Tree;
  private shade: Shade;
  private picture: Picture | null = null;
  private readonly treeElement = el("div", { class: "tree", role: "region", "aria-label": "Modules of the graph", tabindex: 0 });
  private readonly status = el("p", { class: "hint", role: "status" });
  private readonly results = el("ul", { id: "graph-results" });
  private readonly canvas = el("div", { id: "graph-picture", role: "img", "aria-busy": "false", "aria-label": "Picture of the graph; the list of modules beside it says the same." });
  private readonly direction: HTMLSelectElement;
  private readonly near: IntersectionObserver;

  constructor(
    private readonly view: FrameView,
    private readonly selection: Selection,
    body: HTMLElement,
  ) {
    this.tree = new Tree(view, 0);
    this.shade = view.isTimed ? "cost" : "memory";
    this.direction = el(
      "select",
      { id: "graph-direction", change: () => this.show(Number(this.direction.value)) },
      ...view.frame.graphs.map((graph, number) => el("option", { value: number }, graph.direction)),
    );
    const search = el("input", { type: "search", id: "graph-search", input: () => this.find(search.value) });
    const shades = el(
      "select",
      { id: "graph-shade", change: () => this.recolor(shades.value as Shade) },
      ...SHADES.map(([value, text]) => el("option", { value, selected: value === this.shade }, text)),
    );
    const collapse = el("button", { type: "button", id: "graph-collapse", click: () => this.collapse() }, "Collapse all");
    const fit = el("button", { type: "button", click: () => this.picture?.fit() }, "Fit");
    body.append(
      el("div", { class: "controls" }, el("label", {}, "Graph ", this.direction), el("label", {}, "Search ", search), el("label", {}, "Colour by ", shades), collapse, fit),
      this.results,
      this.status,
      el("div", { class: "halves" }, this.treeElement, this.canvas),
    );
    this.drawTree();
    // The picture is laid out when somebody comes near to it: the page is there sooner.
    this.near = new IntersectionObserver((seen) => seen.some((each) => each.isIntersecting) && this.start(), { rootMargin: "300px" });
    this.near.observe(this.canvas);
    selection.follow((place) => {
      if (place.graph !== this.graph) this.show(place.graph);
      this.picture?.mark(this.tree.shownAs(place.node), false);
    });
  }

  dispose(): void {
    this.near.disconnect();
    this.picture?.dispose();
  }

  private start(): void {
    this.near.disconnect();
    if (this.picture) return;
    const failed = () => (this.status.textContent = "This browser cannot lay out the picture; the list of modules says the same.");
    this.picture = new Picture(this.canvas, (id) => this.tapped(id), failed);
    this.drawPicture(true);
  }

  private show(graph: number): void {
    this.graph = graph;
    this.direction.value = String(graph);
    this.tree = new Tree(this.view, graph);
    this.drawTree();
    this.drawPicture(true);
  }

  private recolor(shade: Shade): void {
    this.shade = shade;
    this.drawTree();
    this.drawPicture(false);
  }

  private collapse(): void {
    this.tree = new Tree(this.view, this.graph);
    this.drawTree();
    this.drawPicture(true);
  }

  private tapped(id: string): void {
    if (id.startsWith("node ")) this.selection.select({ graph: this.graph, node: Number(id.slice(5)) });
    else {
      const group = this.tree.groups.get(id.replace(/^open /, ""));
      if (group) this.toggle(group);
    }
  }

  private toggle(group: Group): void {
    if (this.tree.open.has(group.id)) this.tree.close(group);
    else {
      this.makeRoom(group);
      this.tree.open.add(group.id);
    }
    this.drawTree();
    this.drawPicture(false, group.id);
  }

  /** Close what is open elsewhere where the picture would grow too large. */
  private makeRoom(wanted: Group): void {
    const around = new Set([...this.tree.path(wanted), this.tree.root]);
    for (const id of [...this.tree.open]) {
      if (this.tree.countWith(wanted) <= MOST_ELEMENTS) return;
      const group = this.tree.groups.get(id);
      if (group && !around.has(group)) this.tree.close(group);
    }
  }

  private find(wanted: string): void {
    const { nodes } = this.view.frame.graphs[this.graph];
    const text = wanted.trim().toLowerCase();
    this.results.replaceChildren();
    if (!text) {
      this.status.textContent = "";
      return;
    }
    const columns = [nodes.target, nodes.module, nodes.parameters];
    const matching = new Set<number>();
    this.view.frame.strings.forEach((each, number) => each.toLowerCase().includes(text) && matching.add(number));
    const names = this.view.frame.lines.name;
    const found: number[] = [];
    for (let node = 0; node < nodes.line.length; node++) {
      if (names[nodes.line[node]].toLowerCase().includes(text) || columns.some((column) => matching.has(column[node]))) found.push(node);
    }
    this.status.textContent = `${count(found.length)} found${found.length > MOST_FOUND ? `, the first ${MOST_FOUND} are listed` : ""}`;
    for (const node of found.slice(0, MOST_FOUND)) {
      const place = { graph: this.graph, node };
      this.results.append(el("li", {}, el("button", { type: "button", class: "link", click: () => this.go(node) }, this.view.name(place)), ` ${this.view.text(nodes.module[node])}`));
    }
  }

  /** Select a node, and open what it lies in. */
  private go(node: number): void {
    this.selection.select({ graph: this.graph, node });
    this.makeRoom(this.tree.groupOf[node]);
    this.tree.reveal(node);
    this.drawTree();
    this.drawPicture(false, `node ${node}`);
  }

  private weight(node: number): number {
    const { nodes } = this.view.frame.graphs[this.graph];
    if (this.shade === "memory") return nodes.storage[node] >= 0 ? nodes.bytes[node] : 0;
    const cost = nodes.cost_us?.[node] ?? 0;
    return this.shade === "cost" || nodes.lane[node] > 0 ? cost : 0;
  }

  private weightOf(all: number[]): number {
    return all.reduce((sum, node) => sum + this.weight(node), 0);
  }

  private text(weight: number): string {
    return this.shade === "memory" ? bytes(weight) : time(weight);
  }

  private drawTree(): void {
    const lines = (group: Group): HTMLElement[] => [
      ...group.groups.map((each) => {
        const isOpen = this.tree.open.has(each.id);
        const button = el(
          "button",
          { type: "button", class: "group", "aria-expanded": String(isOpen), "data-group": each.id, click: () => this.clicked(each) },
          each.title,
        );
        const about = ` ${count(each.all.length)} ${each.all.length === 1 ? "node" : "nodes"}, ${this.text(this.weightOf(each.all))}`;
        return el("li", {}, button, el("span", { class: "quiet" }, about), isOpen ? el("ul", {}, ...lines(each)) : null);
      }),
      ...group.nodes.map((node) => {
        const place = { graph: this.graph, node };
        const weight = this.weight(node);
        const button = el("button", { type: "button", class: "link", click: () => this.selection.select(place) }, this.view.name(place));
        return el("li", {}, button, el("span", { class: "quiet" }, weight ? ` ${this.text(weight)}` : ""));
      }),
    ];
    this.treeElement.replaceChildren(el("ul", {}, ...lines(this.tree.root)));
  }

  private clicked(group: Group): void {
    this.toggle(group);
    for (const button of this.treeElement.querySelectorAll<HTMLButtonElement>("button.group")) {
      if (button.dataset["group"] === group.id) button.focus({ preventScroll: true });
    }
  }

  private drawPicture(fit: boolean, mark?: string): void {
    if (!this.picture) return;
    const shown = this.tree.shown();
    const edges = new Map<string, [string, string, number]>();
    const seen: string[] = [];
    for (const { id, group, node } of shown) for (const each of node === null ? group.all : [node]) seen[each] = id;
    this.view.frame.graphs[this.graph].nodes.inputs.forEach((inputs, node) => {
      for (const input of inputs) {
        if (seen[input] === seen[node]) continue;
        const key = `${seen[input]}>${seen[node]}`;
        const known = edges.get(key);
        if (known) known[2]++;
        else edges.set(key, [seen[input], seen[node], 1]);
      }
    });
    const weights = shown.map((each) => this.weightOf(each.node === null ? each.group.all : [each.node]));
    const most = Math.max(...weights, 1e-9);
    const elements = shown.map((each, number) => ({ id: each.id, label: this.label(each, weights[number]), isGroup: each.node === null, heat: weights[number] / most, inside: this.parentOf(each) }));
    const around = [...this.tree.open].flatMap((id) => {
      const group = this.tree.groups.get(id);
      return group && group !== this.tree.root ? [{ id, label: group.title, inside: group.parent && group.parent !== this.tree.root ? group.parent.id : null }] : [];
    });
    const palette = { text: color("text"), line: color("quiet"), cold: color("raised"), hot: color(this.shade === "communication" ? "communication" : this.shade === "memory" ? "class1" : "compute"), back: color("faint"), border: color("line"), mark: color("exposed") };
    if (fit) this.picture.fitNext();
    if (mark) this.picture.mark(mark, true);
    this.picture.draw({ elements, around, edges: [...edges.values()] }, palette);
  }

  private label(each: Shown, weight: number): string {
    const name = each.node === null ? `${each.group.title} (${each.group.all.length})` : this.view.name({ graph: this.graph, node: each.node });
    const short = name.length > 30 ? `${name.slice(0, 28)}…` : name;
    return weight ? `${short}\n${this.text(weight)}` : short;
  }

  private parentOf(each: Shown): string | null {
    const parent = each.node === null ? each.group.parent : each.group;
    return parent && parent !== this.tree.root ? parent.id : null;
  }
}
