"""Fill the tables of the pages from what was measured, examples/benchmarks/results/*.json.

    python docs/tools/fill_tables.py            # write them anew
    python docs/tools/fill_tables.py --check    # fail where a page holds others

A table stands between `<!-- table NAME -->` and `<!-- end -->`. Results of links are what shaped_link.py
writes with `--json`, put into that folder under the name of the table. zoo.json, offload_inference.json and
offload_capacity.json are what the scripts of these names write; offload_states.json is what offload_overlap.py writes
with `--states`; gpu-h200.json has rows of gpu.py. Needs nothing but Python.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generated import keep_up

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = (
    ROOT / "docs" / "benchmarks.md",
    ROOT / "docs" / "compression.md",
    ROOT / "docs" / "context-parallel.md",
    ROOT / "docs" / "gpus.md",
    ROOT / "docs" / "inference.md",
    ROOT / "docs" / "layer-drop.md",
    ROOT / "docs" / "models.md",
    ROOT / "docs" / "slow-links.md",
    ROOT / "docs" / "start-up.md",
    ROOT / "examples" / "README.md",
)
RESULTS = ROOT / "examples" / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
LABELS = (
    ("ddp", "DDP"),
    ("ddp-blocks", "DDP, blocks compiled one by one"),
    ("ddp-fp16", "DDP, fp16 hook"),
    ("ddp-bf16", "DDP, bf16 hook"),
    ("ddp-powersgd-1", "DDP, PowerSGD of rank 1"),
    ("ddp-powersgd-4", "DDP, PowerSGD of rank 4"),
    ("deepspeed-2", "DeepSpeed 0.19.8, ZeRO-2"),
    ("deepspeed-3", "DeepSpeed, ZeRO-3, not compiled"),
    ("fsdp2", "FSDP2"),
    ("fsdp2-bf16", "FSDP2, bf16"),
    ("simplefsdp-overlap", "SimpleFSDP's graph, PyTorch's overlap scheduler"),
    ("torch-overlap", "zgraph's collectives, PyTorch's overlap scheduler"),
    ("zgraph-0", "zgraph, stage 0"),
    ("zgraph-0-reduce-bf16", "zgraph, stage 0, `reduce_dtype=bf16`"),
    ("zgraph-0-loco", "zgraph, stage 0, `LoCo()`"),
    ("zgraph-0-loco-means4", "zgraph, stage 0, `LoCo()`, means of 4 bits"),
    ("zgraph-0-lowrank1", "zgraph, stage 0, `LowRank(rank=1)`"),
    ("zgraph-0-lowrank4", "zgraph, stage 0, `LowRank(rank=4)`"),
    ("zgraph-0-loco-step", "zgraph, stage 0, `LoCo()`, whole step"),
    ("zgraph-2-loco-step", "zgraph, stage 2, `LoCo()`, whole step"),
    ("zgraph-0-signs-step", "zgraph, stage 0, `SignMomentum()`, whole step"),
    ("zgraph-2-signs-step", "zgraph, stage 2, `SignMomentum()`, whole step"),
    ("zgraph-1", "zgraph, stage 1"),
    ("zgraph-2", "zgraph, stage 2"),
    ("zgraph-3", "zgraph, stage 3"),
    ("zgraph-3-rules", "zgraph, stage 3, by rules"),
    ("zgraph-0-bf16", "zgraph, stage 0, bf16"),
    ("zgraph-1-bf16", "zgraph, stage 1, bf16"),
    ("zgraph-2-bf16", "zgraph, stage 2, bf16"),
    ("zgraph-3-bf16", "zgraph, stage 3, bf16"),
    ("zgraph-0-step", "zgraph, stage 0, whole step"),
    ("zgraph-0-all-reduce-step", "zgraph, stage 0, gloo's all_reduce, whole step"),
    ("zgraph-0-reduce-bf16-step", "zgraph, stage 0, `reduce_dtype=bf16`, whole step"),
    ("zgraph-2-step", "zgraph, stage 2, whole step"),
    ("zgraph-3-step", "zgraph, stage 3, whole step"),
    ("zgraph-3-bf16-step", "zgraph, stage 3, bf16, whole step"),
)
# Rows of micro_batches.py; those of bf16 have "-bf16" after the name.
ACCUMULATING = (
    ("ddp", "DDP, `no_sync`"),
    ("fsdp2", "FSDP2"),
    ("fsdp2-last", "FSDP2, reduces in the last micro-batch"),
    ("fsdp2-kept", "the same, and keeps parameters gathered"),
    ("zgraph-2", "zgraph, stage 2, `no_sync`"),
    ("zgraph-3", "zgraph, stage 3"),
    ("zgraph-0-by-layer", "zgraph, stage 0, layer by layer"),
    ("zgraph-3-by-layer", "zgraph, stage 3, layer by layer"),
    ("zgraph-3-by-layer-least", "the same, every layer recomputed"),
    ("zgraph-3-by-layer-kept", "the same, nothing recomputed"),
)
# Rows of muon.py: with AdamW, and with Muon.
OPTIMIZERS = (
    ("ddp", "DDP"),
    ("fsdp2", "FSDP2"),
    ("zgraph-0", "zgraph, stage 0"),
    ("zgraph-2", "zgraph, stage 2"),
    ("zgraph-3", "zgraph, stage 3"),
    ("zgraph-3-muon-everywhere", "the same, every rank computes all matrices"),
)
# Rows of slow_links.py, and the files of its columns.
SITES = (
    ("alone", "compute without a network"),
    ("outer-30", "outer steps, `every=30`"),
    ("outer-60", "outer steps, `every=60, delay=6`"),
    ("zgraph-0-lowrank1", "zgraph, stage 0, `LowRank(rank=1)`"),
    ("zgraph-0-loco-means4", "zgraph, stage 0, `LoCo()`, means of 4 bits"),
    ("ddp-powersgd-1", "DDP, PowerSGD of rank 1"),
    ("ddp-bf16", "DDP, bf16 hook"),
    ("ddp", "DDP"),
)
SLOW_LINKS = tuple(f"slow_links-2x33.7M-{rate}" for rate in ("10mbit", "100mbit", "1gbit"))
# What each column of the table of methods is made of; where two files have a row, the first one's is taken.
METHODS = (
    ("shaped_link-2x33.7M-100mbit",),
    ("methods-200mbit", "shaped_link-2x33.7M-200mbit"),
    ("methods-1gbit",),
    ("methods-10gbit",),
)
# What the columns of a table of gpu.py are called, and the figures that they show.
STEP = {
    **{"in turns ms": "in turns ms", "isolated step ms": "alone ms", "GPU busy ms": "busy ms", "kernels": "kernels"},
    **{"peak above what is held, MiB": "rise MiB"},
}
GPU = {
    "step-gpt": STEP,
    "step-llama": STEP,
    "peaks": {
        "predicted MiB": "predicted MiB",
        "measured MiB": "rise MiB",
        "measured / predicted": "measured of predicted",
    },
    "kernels": {"ms": "ms", "GB/s": "GB/s", "of a copy's speed": "share of a copy", "host us a call": "host us a call"},
    "offload": {
        **{"step ms": "ms", "held on the GPU, MiB": "held MiB", "peak above it, MiB": "rise MiB"},
        **{"to the GPU ms": "to device ms", "to the host ms": "to host ms", "both at once ms": "both ways at once ms"},
    },
}
# Names of the models that examples/zoo.py trains, as docs/models.md spells them.
MODELS = {
    "gpt2": "GPT-2",
    "llama": "Llama",
    "mixtral-eager": "Mixtral, eager experts",
    "mixtral-grouped": "Mixtral, `grouped_mm` experts",
    "bert": "BERT",
    "t5": "T5",
    "vit": "ViT",
    "resnet": "ResNet",
    "whisper": "Whisper",
    "clip": "CLIP",
}


def main() -> int:
    return keep_up({page: filled(page.read_text()) for page in PAGES})


def filled(page: str) -> str:
    """The page with its tables made anew."""
    return MARKED.sub(lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}", page)


def table(name: str) -> str:
    if name == "methods":
        return methods([[load(name) for name in names] for names in METHODS])
    if name == "slow_links":
        return slow_links([load(one) for one in SLOW_LINKS])
    if name.startswith("gpu-"):
        return gpu(load("gpu-h200"), name.removeprefix("gpu-"))
    kinds = {
        "convergence": convergence,
        "convergence-muon": convergence,
        "convergence-adamw_8bit": convergence,
        "convergence-outer": convergence,
        "convergence-signs": convergence,
        "zoo": zoo,
        "offload_states": states,
    }
    kinds |= {
        "generate": generated,
        "context_parallel": context_parallel,
        "layer_drop-fx": dropped,
        "offload_inference": inference,
        "offload_capacity": capacity,
        "many_shapes-fx": shapes,
    }
    kinds |= dict.fromkeys(("micro_batches-2x33.7M-1gbit", "micro_batches-2x33.7M-1gbit-bf16"), accumulating)
    kinds |= {"muon-2x33.7M-1gbit": muon, "muon-2x33.7M-1gbit-8": muon}
    kinds |= {"first_step-fx": first_steps, "first_step-inductor": first_steps}
    return kinds.get(name, steps)(load(name))


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def steps(result: dict[str, Any]) -> str:
    """Steps over links of one rate, what they send and hold, and how many times as fast as its peers each row is."""
    labels = {name: label for name, label in LABELS if name in result["rows"]}  # rows of compute only have none
    has_peaks = all("peak_bytes" in result["rows"][name] for name in labels)
    heads = ("", "step ms (quartiles)", "sent MB", *(["peak MiB"] if has_peaks else []), "times as fast as")
    rows: list[tuple[str, ...]] = []
    for name, label in labels.items():
        row = result["rows"][name]
        compared = [
            f"{labels[peer]} {ratio:.2f} ({low:.2f}-{high:.2f})"
            for peer, (ratio, low, high) in row["times_faster"].items()
            if not peer.startswith("zgraph") and low < high  # a single repetition leaves no interval
        ]
        peak = [f"{row['peak_bytes'] / 2**20:.0f}"] if has_peaks else []
        spread = f"{row['step_ms_median']:.0f} ({row['step_ms_low']:.0f}-{row['step_ms_high']:.0f})"
        rows.append((label, spread, f"{row['sent_bytes'] / 1e6:.1f}", *peak, "; ".join(compared)))
    return markdown(heads, rows) + provenance([result])


def accumulating(result: dict[str, Any]) -> str:
    """Steps of several micro-batches, and how many times as fast as two peers each row is."""
    suffix = "-bf16" if "ddp-bf16" in result["rows"] else ""
    heads = ("", "step ms (quartiles)", "sent MB", "peak MiB", "times as fast as FSDP2", "as DDP")
    rows: list[tuple[str, ...]] = []
    for name, label in ACCUMULATING:
        row = result["rows"].get(name + suffix)
        if row is None:
            continue
        spread = f"{row['step_ms_median']:.0f} ({row['step_ms_low']:.0f}-{row['step_ms_high']:.0f})"
        ratios = (result["rows"][peer + suffix]["step_ms_median"] / row["step_ms_median"] for peer in ("fsdp2", "ddp"))
        numbers = f"{row['sent_bytes'] / 1e6:.1f}", f"{row['peak_bytes'] / 2**20:.0f}"
        shown = "DDP, bf16 hook, `no_sync`" if name + suffix == "ddp-bf16" else label
        rows.append((shown, spread, *numbers, *(f"{ratio:.2f}" for ratio in ratios)))
    return markdown(heads, rows) + provenance([result])


def muon(result: dict[str, Any]) -> str:
    """Steps with Muon, and how they compare with those of AdamW and with DDP's."""
    heads = (
        "",
        "AdamW, step ms",
        "Muon, step ms (quartiles)",
        "of AdamW's",
        "sent MB",
        "peak MiB",
        "times as fast as DDP",
    )
    rows: list[tuple[str, ...]] = []
    found = result["rows"]
    for name, label in OPTIMIZERS:
        adamw, row = found.get(name.removesuffix("-muon-everywhere")), found.get(f"{name}-muon", found.get(name))
        if row is None or row is adamw:
            continue
        spread = f"{row['step_ms_median']:.0f} ({row['step_ms_low']:.0f}-{row['step_ms_high']:.0f})"
        beside = ("", "") if adamw is None else (f"{adamw['step_ms_median']:.0f}", _of(row, adamw))
        numbers = f"{row['sent_bytes'] / 1e6:.1f}", f"{row['peak_bytes'] / 2**20:.0f}"
        rows.append((label, beside[0], spread, beside[1], *numbers, _of(found["ddp-muon"], row)))
    return markdown(heads, rows) + provenance([result])


def _of(row: dict[str, Any], other: dict[str, Any]) -> str:
    return f"{row['step_ms_median'] / other['step_ms_median']:.2f}"


def methods(columns: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Median steps of each method over links of several rates; of two results the first one's row is taken."""
    merged = [dict(row for result in reversed(results) for row in result["rows"].items()) for results in columns]
    heads = ("step ms", "sent MB", *(spelled(results[0]["rate"]) for results in columns))
    rows = [
        (
            label,
            f"{merged[0][name]['sent_bytes'] / 1e6:.1f}",
            *(f"{rows[name]['step_ms_median']:.0f}" for rows in merged),
        )
        for name, label in LABELS
        if all(name in rows for rows in merged)
    ]
    return markdown(heads, rows) + provenance([result for results in columns for result in results])


def slow_links(results: Sequence[dict[str, Any]]) -> str:
    """Median steps over slow links; "" where a row was not run, because a step would take minutes."""
    heads = ("step ms", "sent MB", *(spelled(result["rate"]) for result in results))
    rows: list[tuple[str, ...]] = []
    for name, label in SITES:
        found = [result["rows"].get(name) for result in results]
        sent = next((f"{row['sent_bytes'] / 1e6:.2f}" for row in found if row is not None), "")
        rows.append((label, sent, *("" if row is None else f"{row['step_ms_median']:.0f}" for row in found)))
    return markdown(heads, rows) + provenance(results)


def spelled(rate: str) -> str:
    """The rate of links: "200mbit" reads 200 Mbit/s."""
    return re.sub(r"(\d+)([mg])bit", lambda found: f"{found[1]} {found[2].upper()}bit/s", rate)


def convergence(result: dict[str, Any]) -> str:
    """Losses at the end of training, and how they compare with those of none."""
    heads = ("method", "final loss", "relative to none, and each seed", "held out", "relative to none")
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        seeds = ", ".join(f"{100 * seed:+.2f}" for seed in row["relative_by_seed"] or ())
        relative = "" if row["relative"] is None else f"{percent(row['relative'])} ({seeds})"
        held_out = "" if row["held_out_relative"] is None else percent(row["held_out_relative"])
        rows.append((row["method"], f"{row['loss']:.4f}", relative, f"{row['held_out_loss']:.4f}", held_out))
    return markdown(heads, rows) + provenance([result])


def zoo(result: dict[str, Any]) -> str:
    """What was compiled for each model, and how close it stays to its replica."""
    heads = ("model", "graphs", "graph breaks", "gathers", "recompiles", "fx", "Inductor: loss, parameters")
    rows = [
        (
            MODELS[row["model"]],
            str(row["graphs"]),
            str(sum(row["breaks"].values())),
            str(row["gathers"]),
            str(row["recompiles"]),
            f"{row['fx']['passed']} of {row['cases']}",
            f"{row['inductor']['passed']} of {row['cases']}: "
            f"{row['inductor']['loss']:.0e}, {row['inductor']['parameter']:.0e}",
        )
        for row in result["rows"]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    ranks, stages = (" and ".join(map(str, result[key])) for key in ("ranks", "stages"))
    return markdown(heads, rows) + (
        f"\n{result['steps']} SGD steps on {ranks} ranks at stages {stages}, {versions}, on a CPU. "
        f"{result.get('source', '')}".rstrip()
        + "\n"
    )


def states(result: dict[str, Any]) -> str:
    """Steps with parameters and optimizer state on the host."""
    heads = ("on the host", "copies", "peak MB", "step ms (quartiles)", "predicted ms", "times the step without")
    free = statistics.median(result["rows"][0]["ms"])
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        is_free = row is result["rows"][0]
        rows.append(
            (
                "nothing" if is_free else row["rests"],
                "" if is_free else row["way"],
                f"{row['predicted_bytes'] / 1e6:.0f}",
                spread_of(row["ms"]),
                "" if row["way"] == "without prefetch" else f"{row['predicted_ms']:.0f}",
                f"{statistics.median(row['ms']) / free:.2f}",
            )
        )
    return markdown(heads, rows) + provenance([result])


def inference(result: dict[str, Any]) -> str:
    """A token through a model whose weights rest on disk, and what their codes lose."""
    heads = ("weights at rest", "MB read", "ms (quartiles)", "ms to read", "peak MB", "loss", "logits differ by")
    exact = result["errors"][0]["loss"]
    lost = {f"{one['bits']} bits": one for one in result["errors"]}
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        error = lost.get(row["way"])
        rows.append(
            (
                row["way"],
                f"{row['read_bytes'] / 1e6:.0f}",
                spread_of(row["ms"]),
                f"{1e3 * row['read_bytes'] / row['disk_bytes_per_s']:.0f}" if row["read_bytes"] else "",
                f"{row['peak_bytes'] / 1e6:.0f}",
                "" if error is None else percent(error["loss"] / exact - 1),
                "" if error is None else f"{100 * error['logits']:.2f} %",
            )
        )
    return markdown(heads, rows) + provenance([result])


def generated(result: dict[str, Any]) -> str:
    """Tokens of a Llama with weights in several forms."""
    heads = ("weights", "stored MB", "ms to read", "ms a token", "tokens/s, batch 1", "tokens/s, batch 8", "peak MB")
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        stored, read = row.get("stored_mb"), row.get("ms_to_read")
        rows.append(
            (
                row["way"] if row["way"].startswith(("zgraph", "llama.cpp")) else f"transformers, {row['way']}",
                "" if stored is None else f"{stored:.0f}",
                "" if read is None else f"{read:.0f}",
                spread_of(row["ms_1"]),
                f"{1e3 / row['ms_1'][1]:.1f}",
                f"{8e3 / row['ms_8'][1]:.1f}" if "ms_8" in row else "",
                f"{row['peak_mb']:.0f}",
            )
        )
    return markdown(heads, rows) + provenance([result])


def context_parallel(result: dict[str, Any]) -> str:
    """Steps on a long sequence, by one rank and by two that share it."""
    heads = ("heads of keys", "way", "step ms", "/ whole", "memory MiB", "/ whole", "predicted MiB", "sent MB")
    rows: list[tuple[str, ...]] = []
    for key_heads in (4, 1):
        for way, row in result[f"key_heads_{key_heads}"].items():
            predicted = row["predicted_mib"]
            rows.append(
                (
                    str(key_heads),
                    way,
                    f"{statistics.median(row['step_ms']):.0f}",
                    f"{row['of_whole'][1]:.2f} ({row['of_whole'][0]:.2f}-{row['of_whole'][2]:.2f})",
                    f"{statistics.median(row['rise_mib']):.0f}",
                    f"{row['rise_of_whole'][1]:.2f}",
                    "" if predicted is None else f"{predicted:.0f}",
                    f"{statistics.median(row['sent_mb']):.0f}",
                )
            )
    return markdown(heads, rows) + provenance([result])


def dropped(result: dict[str, Any]) -> str:
    """Steps by number of blocks that `LayerDrop` keeps."""
    heads = ("kept blocks", "step ms (quartiles)", "of 12 blocks", "of the proportional time", "sent MB", "GFLOPs")
    rows: list[tuple[str, ...]] = []
    for name, row in result["rows"].items():
        low, middle, high = statistics.quantiles(row["step_ms"], n=4)
        rows.append(
            (
                name if name.isdecimal() else f"12, without `LayerDrop`, {name}",
                f"{middle:.0f} ({low:.0f}-{high:.0f})",
                f"{row['of_all'][1]:.2f}",
                f"{row['of_proportional'][1]:.3f}" if name != "0" else "",
                f"{row['sent_bytes'] / 1e6:.1f}",
                f"{row['flops'] / 1e9:.1f}",
            )
        )
    return markdown(heads, rows) + provenance([result])


def capacity(result: dict[str, Any]) -> str:
    """The largest models that train in some memory."""
    names = {
        "plain": "plain PyTorch",
        "fsdp2": "FSDP2, offloaded to the host",
        "deepspeed-cpu": "DeepSpeed ZeRO-3, offloaded to the host",
        "deepspeed-nvme": "DeepSpeed ZeRO-3, offloaded to disk",
        "zgraph": "zgraph, all on disk",
        "zgraph-8bit": "the same with bf16 weights and `AdamW8bit`",
    }
    base = result["ways"]["plain"]
    rows = [
        (
            names[way],
            f"{row['layers']} layers of width {row['width']}",
            f"{row['numel'] / 1e6:.0f}",
            f"{row['numel'] / base['numel']:.1f}",
        )
        for way, row in result["ways"].items()
        if way in names and row is not None
    ]
    heads = (f"in {result['gib']} GiB", "largest that trains", "M parameters", "times plain PyTorch")
    return markdown(heads, rows) + provenance([result])


def shapes(result: dict[str, Any]) -> str:
    """How often batches of many shapes are compiled."""
    rows: list[tuple[str, ...]] = []
    for name, row in result["rows"].items():
        ends = ["uncompiled, with a warning"] if row["gave_up"] else []
        ends += [f"an error at step {row['refused_at']}"] if row["refusal"] else []
        more = row["compiled"] - 1
        grown = f"{row['grown_mib'] / more:.0f}" if more else ""
        error = f"{row['off']:.0e}" if row["off"] else "0"
        rows.append((name, str(row["compiled"]), f"{row['compiling_s']:.0f}", grown, error, "; ".join(ends)))
    heads = ("", "compiled", "processor s", "MiB for each more", "largest error of a gradient", "at the limit")
    return markdown(heads, rows) + provenance([result])


def first_steps(result: dict[str, Any]) -> str:
    """Seconds from sharding to the end of the first step."""
    has_cache = any(row["warm_s"] for row in result["rows"].values())
    keys = ("first_s", *(["warm_s"] if has_cache else []), "second_s")
    rows: list[tuple[str, ...]] = []
    for name, row in result["rows"].items():
        first, *others = (f"{statistics.median(row[key]):.1f}" for key in keys)
        rows.append((name, first, f"{row['of_torch_compile']:.2f}", *others))
    cached = ["from the cache, s"] if has_cache else []
    heads = ("", "first step, s", "of torch.compile", *cached, "second step, s")
    return markdown(heads, rows) + provenance([result])


def gpu(result: dict[str, Any], part: str) -> str:
    """The rows of one part of gpu.py."""
    rows = [row for row in result["rows"] if row["part"] == part]
    cells = [(row["what"], *(_figure(row["figures"].get(key)) for key in GPU[part].values())) for row in rows]
    commits = "`, `".join(dict.fromkeys(row["commit"] for row in rows))  # in later runs parts were measured again
    return markdown(("", *GPU[part]), cells) + provenance([result | {"commit": commits}])


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}".removesuffix(".0")


def percent(share: float) -> str:
    return f"{100 * share:+.2f} %" if share else "0.00 %"


def spread_of(ms: Sequence[float]) -> str:
    """The median, with quartiles."""
    low, middle, high = statistics.quantiles(ms, n=4)
    return f"{middle:.0f} ({low:.0f}-{high:.0f})"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, ["---"] * len(heads), *rows))


def provenance(results: Sequence[dict[str, Any]]) -> str:
    """Machine and commit of each result, and what is to be known of it; one line for those that agree."""
    of_line: dict[str, list[str]] = {}
    for result in results:
        where = f"{result['processor']}, {result['cores']} cores, commit `{result['commit']}`"
        notes = [result[key].rstrip(".") for key in ("source", "note") if key in result]
        of_line.setdefault(". ".join([where, *notes]), []).append(result.get("rate", ""))
    one = len(of_line) == 1
    lines = [
        f"Measured on {line}." if one else f"- {', '.join(map(spelled, rates))}: {line}."
        for line, rates in of_line.items()
    ]
    return "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
