// The drawing of a graph: Cytoscape draws on a canvas what another thread has laid out.

import cytoscape from "cytoscape";
import type { Box } from "./layout.js";
import { Layouter } from "./layouter.js";

export interface Element {
  id: string;
  label: string;
  isGroup: boolean;
  /** From 0 to 1. */
  heat: number;
  inside: string | null;
}

export interface Around {
  id: string;
  label: string;
  inside: string | null;
}

export interface Palette {
  text: string;
  line: string;
  cold: string;
  hot: string;
  back: string;
  border: string;
  mark: string;
}

const READABLE = 0.7; // zoom

export interface Drawing {
  elements: Element[];
  around: Around[];
  edges: [string, string, number][];
}

export class Picture {
  private readonly cy: cytoscape.Core;
  private readonly layouter: Layouter;
  private styled = "";
  private marked: string | null = null;
  private centers = false;
  private fits = false;

  constructor(
    private readonly container: HTMLElement,
    onTap: (id: string) => void,
    onFailure: () => void,
  ) {
    this.cy = cytoscape({ container, minZoom: 0.02, maxZoom: 3, boxSelectionEnabled: false, textureOnViewport: false });
    this.cy.on("tap", "node", (event) => {
      if (event.target === event.cy || !event.target.id) return;
      onTap(String(event.target.data("key")));
    });
    this.layouter = new Layouter(onFailure);
    (container as HTMLElement & { elements?: () => object[] }).elements = () =>
      this.cy.nodes().map((node) => ({ key: node.data("key"), ...node.position(), width: node.data("width"), height: node.data("height") }));
  }

  dispose(): void {
    this.layouter.dispose();
    this.cy.destroy();
  }

  /** Draw as soon as it is laid out; what is in the picture stays until then. */
  draw(drawing: Drawing, palette: Palette): void {
    this.container.setAttribute("aria-busy", "true");
    const { elements, around, edges } = drawing;
    const inside = ({ id, inside }: Around | Element) => ({ id, inside });
    this.layouter.ask({ elements: elements.map(inside), around: around.map(inside), edges }, (places) => {
      if (this.cy.destroyed()) return;
      this.put(drawing, places);
      this.style(palette);
      if (this.fits) this.fit();
      this.fits = false;
      this.remark();
      this.container.setAttribute("aria-busy", "false");
    });
  }

  /** Change what differs from what is there. */
  private put({ elements, around, edges }: Drawing, places: Map<string, Box>): void {
    const wanted = new Map<string, cytoscape.ElementDefinition>();
    const add = (data: Record<string, unknown> & { id: string }, box?: Box) => {
      if (box) wanted.set(data.id, { data: { ...data, width: box.width, height: box.height }, position: { x: box.x, y: box.y } });
      else wanted.set(data.id, { data } as cytoscape.ElementDefinition);
    };
    for (const { id, label } of around) add({ id: `g ${id}`, key: `open ${id}`, label, around: 1 }, places.get(id));
    for (const { id, label, isGroup, heat } of elements) {
      add({ id: key(id), key: id, label, heat: Math.round(32 * heat) / 32, shape: isGroup ? "round-rectangle" : "rectangle", border: isGroup ? 2 : 1 }, places.get(id));
    }
    for (const [from, to, width] of edges) add({ id: `e ${from}>${to}`, source: key(from), target: key(to), width: 1 + Math.min(4, Math.log2(width)) });
    this.cy.batch(() => {
      this.cy.elements().filter((each) => !wanted.has(each.id())).remove();
      this.cy.elements().forEach((each) => {
        const { data = {}, position } = wanted.get(each.id()) ?? {};
        wanted.delete(each.id());
        const known = each.data() as Record<string, unknown>;
        const changed = Object.entries(data).filter(([name, value]) => known[name] !== value);
        if (changed.length) each.data(Object.fromEntries(changed));
        if (position && each.isNode()) each.position(position);
      });
      this.cy.add([...wanted.values()]).filter("[around]").ungrabify().panify();
    });
  }

  private style(palette: Palette): void {
    const wanted = JSON.stringify(palette);
    if (wanted !== this.styled) this.cy.style(styles(palette));
    this.styled = wanted;
  }

  /** Fit what is drawn next. */
  fitNext(): void {
    this.fits = true;
  }

  fit(): void {
    this.cy.resize();
    this.cy.fit(undefined, 24);
    // Rather the beginning at a size one can read than everything as dust.
    if (this.cy.zoom() < READABLE) {
      this.cy.zoom(READABLE);
      const { x, y } = this.highest();
      this.cy.pan({ x: this.cy.width() / 2 - READABLE * x, y: 60 - READABLE * y });
    }
  }

  /** Of what lies highest, what is nearest to the middle: beginnings that nothing leads to may lie far to one side. */
  private highest(): { x: number; y: number } {
    const places = this.cy.nodes("[^around]").map((node) => node.position());
    const middle = places.reduce((sum, { x }) => sum + x, 0) / Math.max(1, places.length);
    const top = Math.min(...places.map(({ y }) => y));
    const away = ({ x, y }: { x: number; y: number }) => (y > top + 1 ? Number.MAX_VALUE : Math.abs(x - middle));
    return places.reduce((found, place) => (away(place) < away(found) ? place : found), places[0] ?? { x: 0, y: 0 });
  }

  /** Mark an element, now and in what is drawn next. */
  mark(id: string, center: boolean): void {
    this.marked = id;
    this.centers = center;
    if (this.container.getAttribute("aria-busy") !== "true") this.remark();
  }

  private remark(): void {
    this.cy.nodes().removeClass("marked");
    if (this.marked === null) return;
    const found = [key(this.marked), `g ${this.marked}`].map((id) => this.cy.getElementById(id)).find((each) => each.nonempty());
    const center = this.centers;
    this.centers = false;
    if (!found) return;
    found.addClass("marked");
    const box = this.cy.extent();
    const { x, y } = found[0].position();
    if (center || x < box.x1 || x > box.x2 || y < box.y1 || y > box.y2) this.cy.center(found);
  }
}

function key(id: string): string {
  return `n ${id}`;
}

function styles(palette: Palette): cytoscape.StylesheetJson {
  const box = { width: "data(width)" as unknown as number, height: "data(height)" as unknown as number };
  const text = { color: palette.text, "font-size": 11, "font-family": "system-ui, sans-serif", label: "data(label)" };
  return [
    {
      selector: "node[^around]",
      style: {
        ...text,
        ...box,
        shape: "data(shape)" as unknown as "rectangle",
        "background-color": `mapData(heat, 0, 1, ${palette.cold}, ${palette.hot})`,
        "border-width": "data(border)" as unknown as number,
        "border-color": palette.line,
        "text-valign": "center",
        "text-halign": "center",
        "text-wrap": "wrap",
        "min-zoomed-font-size": 6,
      },
    },
    {
      selector: "node[around]",
      style: { ...text, ...box, "background-color": palette.back, "background-opacity": 0.55, "border-width": 1, "border-color": palette.border, "text-valign": "top", "text-margin-y": 20, shape: "round-rectangle", "z-compound-depth": "bottom" },
    },
    {
      selector: "edge",
      style: { width: "data(width)", "line-color": palette.line, "target-arrow-color": palette.line, "target-arrow-shape": "triangle", "arrow-scale": 0.8, "curve-style": "straight", opacity: 0.4 },
    },
    { selector: ".marked", style: { "border-width": 4, "border-color": palette.mark } },
  ];
}
