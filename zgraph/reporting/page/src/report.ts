// What report.json holds, as docs/report-json.md explains it, and what is derived from it.

export interface LineColumns {
  name: string[];
  value: number[];
  call: string[];
  parameters: number[];
}

export interface NodeColumns {
  line: number[];
  op: number[];
  target: number[];
  shape: number[];
  dtype: number[];
  stride: number[];
  module: number[];
  source: number[];
  parameters: number[];
  bytes: number[];
  storage: number[];
  lane: number[];
  cost_us: number[] | null;
  start_us: number[] | null;
  end_us: number[] | null;
  exposed_us: number[] | null;
  inputs: number[][];
}

export interface CollectiveColumns {
  node: number[];
  wait: number[];
  kind: number[];
  group: number[];
  group_size: number[];
  dtype: number[];
  codec: number[];
  payload_bytes: number[];
  sent_bytes: number[];
  received_bytes: number[];
  parameters: number[][];
  predicted_us: number[] | null;
  exposed_us: number[] | null;
  reason: number[];
}

export interface Graph {
  direction: string;
  nodes: NodeColumns;
  collectives: CollectiveColumns;
  predicted_us: number | null;
  exposed_us: number | null;
  sent_bytes: number;
  received_bytes: number;
  critical: number[];
  peak_bytes: number | null;
}

export interface Memory {
  directions: string[];
  nodes: number;
  storages: Record<"node" | "bytes" | "first" | "last" | "kind" | "space" | "held", number[]>;
  workspace_bytes: number[];
  held_bytes: number;
  budget_bytes: number | null;
  peak_bytes: number;
  peak_position: number;
  at_peak: number[];
  unknown: string[];
}

export interface Totals {
  nodes: number;
  sent_bytes: number;
  peak_bytes: number | null;
  predicted_us: number | null;
  exposed_us: number | null;
}

export type Runs = [number, number][];

export interface Pass {
  name: string;
  options: string;
  direction: string;
  changed: boolean;
  notes: string[];
  before: Totals | null;
  after: Totals | null;
  hunks: [number, number, Runs][];
}

export interface Parameters {
  name: string[];
  shape: number[];
  dtype: number[];
  zero_stage: number[];
  lifetime: number[];
  codec: number[];
  rests: number[];
  local_bytes: number[];
  feedback_bytes: number[];
  collectives: [number, number][][];
  wire_bytes: number[];
}

export interface Frame {
  frame: string;
  reason: string;
  lowering: string;
  from_step: number;
  hardware: { name: string; backend: string; memory_bytes: number } | null;
  strings: string[];
  lanes: string[];
  lines: LineColumns;
  captured: Record<string, Runs>;
  passes: Pass[];
  graphs: Graph[];
  memory: Memory | null;
  parameters: Parameters;
}

export interface Measured {
  frame: string;
  direction: string;
  calls: number;
  us: number;
  blocked_us: Record<string, number>;
  waited_at_us?: Record<string, number>;
  peak_bytes: number | null;
}

export interface Times {
  phases: Record<string, number>;
  passes: Record<string, number[]>;
  measured: Measured[];
}

export interface RankGraph extends Totals {
  frame: string;
  direction: string;
}

/** A step of a pipeline under one schedule. */
export interface PipelineRun {
  step_us: number;
  bubble: number;
  peak_bytes: number[];
  in_flight: number[];
  fits: boolean;
}

/** The plan of a pipeline, which `pipeline.json` holds. */
export interface Pipeline {
  micro_batches: number;
  schedule: string;
  schedules: Record<string, PipelineRun>;
  budget_bytes: number | null;
  unkept: PipelineRun | null;
  stages: {
    rank: number;
    forward_us: number;
    backward_us: number;
    parameter_bytes: number;
    activation_bytes: number;
    stage_3_bytes: number;
    keep_bytes: number | null;
    sent_to_next_bytes: number;
  }[];
  actions: Record<"rank" | "stage" | "micro_batch" | "start_us" | "end_us", number[]> & { kind: ("forward" | "backward" | "weights")[] };
}

/** The plan of outer steps, which `sites.json` holds. */
export interface Sites {
  every: number;
  fragments: number;
  delay: number;
  sent_bytes: number;
  round_us: number;
  exposed_us: number;
  kept_bytes: number;
  step_us: number;
  rounds: Record<"fragment" | "start_us" | "end_us", number[]>;
}

export interface Report {
  version: string;
  made_with: Record<string, string>;
  rank: number;
  world_size: number;
  memory_classes: string[];
  memory_spaces: string[];
  at_rest: Record<string, number>;
  frames: Frame[];
  ranks: { rank: number; graphs: RankGraph[]; times?: Times }[];
  times?: Times;
  pipeline?: Pipeline;
  sites?: Sites;
}

/** A node of the frame: position of its graph, and its position there. */
export interface Place {
  graph: number;
  node: number;
}

/** The memory curve: for each class its bytes at each position of the step. */
export function bytesByClass(report: Report, memory: Memory): Map<string, number[]> {
  const device = report.memory_spaces.indexOf("device");
  const steps = report.memory_classes.map(() => new Array<number>(memory.nodes + 1).fill(0));
  const { bytes, first, last, kind, space, held } = memory.storages;
  for (let row = 0; row < bytes.length; row++) {
    if (held[row] || space[row] !== device) continue;
    steps[kind[row]][first[row]] += bytes[row];
    steps[kind[row]][last[row] + 1] -= bytes[row];
  }
  const found = new Map<string, number[]>();
  report.memory_classes.forEach((name, number) => {
    let alive = 0;
    const curve = steps[number].slice(0, memory.nodes).map((step) => (alive += step));
    if (curve.some((value) => value > 0)) found.set(name, curve);
  });
  if (memory.workspace_bytes.some((value) => value > 0)) found.set("workspace", memory.workspace_bytes);
  return found;
}

/** One frame with what the sections look up again and again. */
export class FrameView {
  readonly users: number[][][];
  /** By graph: the collective that a node starts or waits for. */
  readonly collectiveOf: Map<number, number>[];
  /** When each graph begins in the step, if times are known. */
  readonly offsets: number[];
  /** Position in the step of each graph's first node. */
  readonly firstPosition: number[];
  readonly measured: (Measured | undefined)[];

  constructor(
    readonly report: Report,
    readonly frame: Frame,
  ) {
    this.users = frame.graphs.map((graph) => {
      const users: number[][] = graph.nodes.line.map(() => []);
      graph.nodes.inputs.forEach((inputs, node) => inputs.forEach((input) => users[input].push(node)));
      return users;
    });
    this.collectiveOf = frame.graphs.map((graph) => {
      const found = new Map<number, number>();
      graph.collectives.node.forEach((node, row) => found.set(node, row));
      graph.collectives.wait.forEach((node, row) => node >= 0 && found.set(node, row));
      return found;
    });
    let us = 0;
    let position = 0;
    this.offsets = [];
    this.firstPosition = [];
    for (const graph of frame.graphs) {
      this.offsets.push(us);
      this.firstPosition.push(position);
      us += graph.predicted_us ?? 0;
      position += graph.nodes.line.length;
    }
    const measured = report.times?.measured ?? [];
    this.measured = frame.graphs.map((graph) =>
      measured.find((each) => each.frame === frame.frame && each.direction === graph.direction),
    );
  }

  get isTimed(): boolean {
    return this.frame.graphs.every((graph) => graph.predicted_us !== null && graph.nodes.start_us !== null);
  }

  get stepUs(): number {
    return this.frame.graphs.reduce((sum, graph) => sum + (graph.predicted_us ?? 0), 0);
  }

  text(number: number): string {
    return this.frame.strings[number] ?? "";
  }

  name({ graph, node }: Place): string {
    return this.frame.lines.name[this.frame.graphs[graph].nodes.line[node]];
  }

  lineText(line: number): string {
    const { name, value, call, parameters } = this.frame.lines;
    const behind = this.text(parameters[line]);
    return this.text(value[line])
      ? `${name[line]}: ${this.text(value[line])} = ${call[line]}${behind ? `  # ${behind}` : ""}`
      : call[line];
  }

  /** A position of the step, which counts through all graphs. */
  position({ graph, node }: Place): number {
    return this.firstPosition[graph] + node;
  }

  placeAt(position: number): Place {
    let graph = this.frame.graphs.length - 1;
    while (graph > 0 && this.firstPosition[graph] > position) graph--;
    return { graph, node: position - this.firstPosition[graph] };
  }

  /** Begin and end in the step. */
  span({ graph, node }: Place): [number, number] {
    const { start_us, end_us } = this.frame.graphs[graph].nodes;
    const offset = this.offsets[graph];
    return [offset + (start_us?.[node] ?? 0), offset + (end_us?.[node] ?? 0)];
  }
}
