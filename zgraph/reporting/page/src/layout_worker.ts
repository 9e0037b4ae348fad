// The layout in a thread of its own: the page answers while a picture is laid out.

import { type Box, Layout, type Task } from "./layout.js";

export interface Reply {
  number: number;
  places: [string, Box][];
}

const layout = new Layout();
const scope = self as unknown as { onmessage: (event: MessageEvent<{ number: number; task: Task }>) => void; postMessage: (reply: Reply) => void };
scope.onmessage = ({ data: { number, task } }) => scope.postMessage({ number, places: [...layout.places(task)] });
