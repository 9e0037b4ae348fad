// Elements whose texts are always text: names come from models, and none of them may become HTML.

type Child = Node | string | number | null | undefined | false;

export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Record<string, string | number | boolean | ((event: Event) => void)> = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false) made.setAttribute(name, String(value));
  }
  for (const child of children) {
    if (child instanceof Node) made.append(child);
    else if (child !== null && child !== undefined && child !== false) made.append(String(child));
  }
  return made;
}

export function bodyOf(section: string): HTMLElement {
  const body = document.querySelector<HTMLElement>(`#${section} > .body`);
  if (!body) throw new Error(`the page has no section ${section}`);
  body.replaceChildren();
  return body;
}

export function color(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count: number | null | undefined): string {
  if (count === null || count === undefined) return "unknown";
  let unit = 0;
  let value = count;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit++;
  }
  return `${digits(value)} ${UNITS[unit]}`;
}

export function time(us: number | null | undefined): string {
  if (us === null || us === undefined) return "unknown";
  if (Math.abs(us) >= 1e6) return `${digits(us / 1e6)} s`;
  if (Math.abs(us) >= 1e3) return `${digits(us / 1e3)} ms`;
  return `${digits(us)} µs`;
}

function digits(value: number): string {
  const size = Math.abs(value);
  if (value === Math.round(value) && size < 1e6) return String(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

export function count(value: number): string {
  return value.toLocaleString("en-US");
}

export function percent(part: number, whole: number): string {
  return whole > 0 ? `${((100 * part) / whole).toFixed(part / whole < 0.1 ? 1 : 0)} %` : "";
}

/** Long lists of names as their first few. */
export function few(names: string[], most = 3): string {
  return names.length > most ? `${names.slice(0, most).join(", ")} and ${names.length - most} more` : names.join(", ");
}
