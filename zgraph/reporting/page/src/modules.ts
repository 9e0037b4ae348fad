// The nodes of a graph by the user's modules: a tree whose groups open one by one, so that few elements are ever drawn.

import type { FrameView } from "./report.js";

const MOST_GROUPS = 60;
const MOST_NODES = 40; // of one module side by side; more are grouped by their order

export interface Group {
  id: string;
  title: string;
  parent: Group | null;
  groups: Group[];
  nodes: number[];
  /** All nodes inside, those of groups inside included. */
  all: number[];
}

/** An element of the picture: a closed group, or a node of an open one. */
export interface Shown {
  id: string;
  group: Group;
  node: number | null;
}

export class Tree {
  readonly root: Group;
  readonly groups = new Map<string, Group>();
  readonly groupOf: Group[] = [];
  readonly open = new Set<string>();

  constructor(view: FrameView, graph: number) {
    this.root = this.group("", "the whole graph", null);
    this.open.add("");
    const { module } = view.frame.graphs[graph].nodes;
    module.forEach((number, node) => this.place(view.text(number)).nodes.push(node));
    for (const group of [...this.groups.values()]) this.split(group);
    for (const group of [...this.groups.values()]) this.bundle(group);
    for (const group of this.groups.values()) for (const node of group.nodes) this.groupOf[node] = group;
    this.collect(this.root);
    this.skipLonely();
  }

  /** The group that a node is seen in: itself if all around it are open. */
  shownAs(node: number): string {
    const closed = this.path(this.groupOf[node]).find((group) => !this.open.has(group.id));
    return closed ? closed.id : `node ${node}`;
  }

  /** Open everything around a node. */
  reveal(node: number): void {
    for (const group of this.path(this.groupOf[node])) this.open.add(group.id);
  }

  close(group: Group): void {
    if (group === this.root) return;
    this.open.delete(group.id);
    group.groups.forEach((each) => this.close(each));
  }

  shown(): Shown[] {
    const found: Shown[] = [];
    const visit = (group: Group) => {
      if (!this.open.has(group.id)) {
        found.push({ id: group.id, group, node: null });
        return;
      }
      for (const node of group.nodes) found.push({ id: `node ${node}`, group, node });
      group.groups.forEach(visit);
    };
    visit(this.root);
    return found;
  }

  /** How many elements the picture would have with a group open as well. */
  countWith(group: Group): number {
    return this.shown().length - 1 + group.nodes.length + group.groups.length;
  }

  /** Groups from the outermost to the group itself, without the root. */
  path(group: Group): Group[] {
    const found: Group[] = [];
    for (let each: Group | null = group; each && each !== this.root; each = each.parent) found.unshift(each);
    return found;
  }

  private place(module: string): Group {
    if (!module) return this.groups.get("") ?? this.root;
    const known = this.groups.get(module);
    if (known) return known;
    const cut = module.lastIndexOf(".");
    return this.group(module, module.slice(cut + 1), this.place(cut < 0 ? "" : module.slice(0, cut)));
  }

  private group(id: string, title: string, parent: Group | null): Group {
    const made: Group = { id, title, parent, groups: [], nodes: [], all: [] };
    this.groups.set(id, made);
    parent?.groups.push(made);
    return made;
  }

  /** Nodes of a module that are too many, or stand beside modules, go into groups by their order. */
  private split(group: Group): void {
    if (group.nodes.length <= (group.groups.length > 2 ? 8 : MOST_NODES)) return;
    const { nodes } = group;
    group.nodes = [];
    const most = Math.max(MOST_NODES, Math.ceil(nodes.length / MOST_NODES));
    for (let at = 0; at < nodes.length; at += most) {
      const part = nodes.slice(at, at + most);
      const title = `nodes ${part[0]} to ${part[part.length - 1]}`;
      const made = this.group(`${group.id}/${part[0]}`, title, group);
      made.nodes = part;
      if (part.length > MOST_NODES) this.split(made);
    }
  }

  /** Modules that are too many side by side, as the layers of a deep model, go into groups by their order. */
  private bundle(group: Group): void {
    if (group.groups.length <= MOST_GROUPS) return;
    const { groups } = group;
    group.groups = [];
    const most = Math.max(MOST_GROUPS / 3, Math.ceil(groups.length / MOST_GROUPS));
    for (let at = 0; at < groups.length; at += most) {
      const part = groups.slice(at, at + most);
      const made = this.group(`${group.id}|${at}`, `${part[0].title} to ${part[part.length - 1].title}`, group);
      made.groups = part;
      for (const each of part) each.parent = made;
    }
  }

  private collect(group: Group): number[] {
    group.all = [...group.nodes, ...group.groups.flatMap((each) => this.collect(each))];
    return group.all;
  }

  /** A group that holds but one other opens with the page. */
  private skipLonely(): void {
    let group = this.root;
    while (group.groups.length === 1 && !group.nodes.length) {
      group = group.groups[0];
      this.open.add(group.id);
    }
    const big = [...group.groups].sort((a, b) => b.all.length - a.all.length)[0];
    if (big && big.all.length > 0.8 * this.root.all.length && big.groups.length > 1) {
      this.open.add(big.id);
      for (const inside of big.groups) {
        if (inside.groups.length > 1 && inside.all.length > 0.8 * big.all.length) this.open.add(inside.id);
      }
    }
  }
}
