// Which node is selected; sections listen, so that one click shows it everywhere.

import type { Place } from "./report.js";

type Listener = (place: Place) => void;

export class Selection {
  private listeners: Listener[] = [];
  private followers: Listener[] = [];
  place: Place | null = null;

  /** Hear of it at once. */
  listen(listener: Listener): void {
    this.listeners.push(listener);
  }

  /** Hear of it when what listens at once has been painted: for pictures, which take longer. */
  follow(listener: Listener): void {
    this.followers.push(listener);
  }

  select(place: Place): void {
    this.place = place;
    for (const listener of this.listeners) listener(place);
    const waiting = [...this.followers];
    const next = () => {
      if (this.place !== place) return;
      waiting.shift()?.(place);
      if (waiting.length) setTimeout(next);
    };
    requestAnimationFrame(() => setTimeout(next));
  }

  forget(): void {
    this.listeners = [];
    this.followers = [];
    this.place = null;
  }
}
