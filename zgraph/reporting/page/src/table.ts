// Tables whose headers sort and whose rows come a page at a time, however many there are.

import { count, el } from "./dom.js";

export interface Column<Row> {
  title: string;
  /** What a cell shows. */
  show: (row: Row) => string | Node;
  /** What it is sorted by, and what `data-value` holds. */
  value: (row: Row) => string | number;
  explain?: string;
}

export interface TableOptions<Row> {
  caption: string;
  id: string;
  pageSize?: number;
  sortBy?: number;
  descending?: boolean;
  rowKey?: (row: Row) => string;
  marked?: (row: Row) => boolean;
}

export class Table<Row> {
  readonly element: HTMLElement;
  private readonly head: HTMLTableRowElement;
  private readonly rows: HTMLTableSectionElement;
  private readonly pager: HTMLElement;
  private shown: Row[] = [];
  private page = 0;
  private sorted: number;
  private descending: boolean;

  constructor(
    private readonly columns: Column<Row>[],
    private all: Row[],
    private readonly options: TableOptions<Row>,
  ) {
    this.sorted = options.sortBy ?? -1;
    this.descending = options.descending ?? false;
    this.head = el("tr");
    this.rows = el("tbody");
    this.pager = el("div", { class: "pager" });
    const table = el("table", { id: options.id }, el("caption", {}, options.caption), el("thead", {}, this.head), this.rows);
    const scroll = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": options.caption }, table);
    this.element = el("div", { class: "table" }, scroll, this.pager);
    columns.forEach((column, number) => this.addHeader(column, number));
    this.set(all);
  }

  /** Show other rows, from the first page on. */
  set(rows: Row[]): void {
    this.all = rows;
    this.page = 0;
    this.sort();
  }

  /** Show the page of a row. */
  reveal(row: Row): void {
    const number = this.shown.indexOf(row);
    if (number < 0) return;
    this.page = Math.floor(number / this.pageSize);
    this.draw();
  }

  redraw(): void {
    this.draw();
  }

  private get pageSize(): number {
    return this.options.pageSize ?? 50;
  }

  private addHeader(column: Column<Row>, number: number): void {
    const sort = () => {
      this.descending = this.sorted === number ? !this.descending : typeof this.firstValue(column) === "number";
      this.sorted = number;
      this.page = 0;
      this.sort();
    };
    const button = el("button", { type: "button", click: sort, title: column.explain ?? "" }, column.title);
    this.head.append(el("th", { scope: "col" }, button));
  }

  private firstValue(column: Column<Row>): string | number {
    return this.all.length ? column.value(this.all[0]) : "";
  }

  private sort(): void {
    this.shown = [...this.all];
    const column = this.columns[this.sorted];
    if (column) {
      const keyed = this.shown.map((row) => ({ row, key: column.value(row) }));
      const turn = this.descending ? -1 : 1;
      keyed.sort((a, b) => turn * compare(a.key, b.key));
      this.shown = keyed.map(({ row }) => row);
    }
    [...this.head.children].forEach((cell, number) => {
      const how = number !== this.sorted ? "none" : this.descending ? "descending" : "ascending";
      cell.setAttribute("aria-sort", how);
    });
    this.draw();
  }

  private draw(): void {
    const first = this.page * this.pageSize;
    const page = this.shown.slice(first, first + this.pageSize);
    this.rows.replaceChildren(...page.map((row) => this.row(row)));
    const last = first + page.length;
    this.pager.replaceChildren();
    if (this.shown.length <= this.pageSize) return;
    const turn = (by: number) => () => {
      this.page += by;
      this.draw();
    };
    this.pager.append(
      el("button", { type: "button", click: turn(-1), disabled: this.page === 0 }, "Previous"),
      el("span", { role: "status" }, `${count(first + 1)} to ${count(last)} of ${count(this.shown.length)}`),
      el("button", { type: "button", click: turn(1), disabled: last >= this.shown.length }, "Next"),
    );
  }

  private row(row: Row): HTMLTableRowElement {
    const attributes: Record<string, string> = {};
    if (this.options.rowKey) attributes["data-key"] = this.options.rowKey(row);
    if (this.options.marked?.(row)) attributes["class"] = "marked";
    const cells = this.columns.map((column, number) => {
      const value = column.value(row);
      const made = number === 0 ? el("th", { scope: "row" }) : el("td", { class: typeof value === "number" ? "number" : "" });
      made.setAttribute("data-value", String(value));
      made.append(column.show(row));
      return made;
    });
    return el("tr", attributes, ...cells);
  }
}

function compare(a: string | number, b: string | number): number {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}
