// Asks the thread that lays out pictures; its script stands in the page, for there is no other file.

import type { Box, Task } from "./layout.js";
import type { Reply } from "./layout_worker.js";

export class Layouter {
  private readonly worker: Worker;
  private readonly url: string;
  private number = 0;
  private answer: (places: Map<string, Box>) => void = () => {};

  /** @param onFailure called where the browser lets the page have no thread, or the layout fails */
  constructor(onFailure: () => void) {
    const script = document.getElementById("layout-script")?.textContent ?? "";
    this.url = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
    this.worker = new Worker(this.url);
    this.worker.onerror = onFailure;
    this.worker.onmessage = ({ data }: MessageEvent<Reply>) => {
      // What the click has changed elsewhere is painted first.
      requestAnimationFrame(() => setTimeout(() => data.number === this.number && this.answer(new Map(data.places))));
    };
  }

  /** Lay out, and answer unless something else is asked for before. */
  ask(task: Task, answer: (places: Map<string, Box>) => void): void {
    this.answer = answer;
    this.worker.postMessage({ number: ++this.number, task });
  }

  dispose(): void {
    this.worker.terminate();
    URL.revokeObjectURL(this.url);
  }
}
