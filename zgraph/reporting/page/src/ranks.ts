// What ranks differ in: their times and bytes beside each other.

import { bodyOf, bytes, count, el, time } from "./dom.js";
import type { FrameView, RankGraph } from "./report.js";
import { Table } from "./table.js";

interface Row {
  rank: number;
  graph: RankGraph;
  measured: number | null;
  blocked: number | null;
}

export function drawRanks(view: FrameView): void {
  const body = bodyOf("ranks");
  const { ranks, world_size } = view.report;
  const rows = ranks.flatMap(({ rank, graphs, times }) =>
    graphs.map((graph): Row => {
      const found = times?.measured.find((each) => each.frame === graph.frame && each.direction === graph.direction);
      const blocked = found ? Object.values(found.blocked_us).reduce((a, b) => a + b, 0) : null;
      return { rank, graph, measured: found?.us ?? null, blocked };
    }),
  );
  if (ranks.length < 2) {
    const how = world_size > 1 ? " Put the folders of several ranks into one, and zgraph shows them beside each other." : "";
    body.append(el("p", {}, `This report is of rank ${view.report.rank} of ${count(world_size)}.${how}`));
  }
  const table = new Table<Row>(
    [
      { title: "Rank", show: (row) => String(row.rank), value: (row) => row.rank },
      { title: "Frame", show: (row) => row.graph.frame, value: (row) => row.graph.frame },
      { title: "Graph", show: (row) => row.graph.direction, value: (row) => row.graph.direction },
      { title: "Nodes", show: (row) => count(row.graph.nodes), value: (row) => row.graph.nodes },
      { title: "Sent", show: (row) => bytes(row.graph.sent_bytes), value: (row) => row.graph.sent_bytes },
      { title: "Peak", show: (row) => bytes(row.graph.peak_bytes), value: (row) => row.graph.peak_bytes ?? -1 },
      { title: "Predicted", show: (row) => time(row.graph.predicted_us), value: (row) => row.graph.predicted_us ?? -1 },
      { title: "Exposed", show: (row) => time(row.graph.exposed_us), value: (row) => row.graph.exposed_us ?? -1 },
      ...(rows.some((row) => row.measured !== null)
        ? [
            { title: "Measured", show: (row: Row) => time(row.measured), value: (row: Row) => row.measured ?? -1 },
            { title: "Measured waits", show: (row: Row) => time(row.blocked), value: (row: Row) => row.blocked ?? -1 },
          ]
        : []),
    ],
    rows,
    { caption: "Graphs of each rank", id: "ranks-table", sortBy: 0, rowKey: (row) => `${row.rank} ${row.graph.frame} ${row.graph.direction}` },
  );
  body.append(el("div", {}, table.element));
}
