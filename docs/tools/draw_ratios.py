"""Draw docs/images/ratios.svg: how many times as fast as its peers zgraph was, as it was measured over links.

python docs/tools/draw_ratios.py            # draw it anew
python docs/tools/draw_ratios.py --check    # fail where the drawing is not that of the figures
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fill_tables import ROOT, load
from generated import keep_up

PICTURE = ROOT / "docs" / "images" / "ratios.svg"
SETTINGS = (
    (("shaped_link-2x33.7M-1gbit", "shaped_link-2x33.7M-1gbit-deepspeed"), "2 ranks, 33.7 M parameters"),
    (("shaped_link-4x33.7M-2hosts-1gbit",), "4 ranks on 2 hosts, 33.7 M"),
    (("shaped_link-2x109.5M-1gbit",), "2 ranks, 109.5 M"),
    (("slow_links-2x33.7M-100mbit",), "2 ranks, 33.7 M, links of 100 Mbit/s"),
)
PAIRS = (
    ("zgraph-0", "ddp", "stage 0 vs DDP"),
    ("zgraph-0-reduce-bf16", "ddp-bf16", "stage 0, bf16 gradients vs DDP, bf16 hook"),
    ("zgraph-2-step", "deepspeed-2", "stage 2 vs DeepSpeed ZeRO-2"),
    ("zgraph-3-step", "deepspeed-3", "stage 3 vs DeepSpeed ZeRO-3, not compiled"),
    ("zgraph-3", "simplefsdp-overlap", "stage 3 vs SimpleFSDP, PyTorch's scheduler"),
    ("zgraph-3", "fsdp2", "stage 3 vs FSDP2"),
    ("zgraph-3-bf16", "fsdp2-bf16", "stage 3, bf16 vs FSDP2, bf16"),
    ("zgraph-3-bf16-loco", "fsdp2-bf16", "stage 3, bf16, LoCo() vs FSDP2, bf16"),
    ("outer-30", "ddp-powersgd-1", "outer steps vs DDP, PowerSGD of rank 1"),
    ("outer-30", "zgraph-0-loco-means4", "outer steps vs stage 0, LoCo(), 4-bit means"),
)
LEFT, TOP, UNIT, ROW, RIGHT = 330, 58, 118, 21, 130


@dataclass(frozen=True)
class Bar:
    """One pair of strategies: its ratio, and the 95 % interval around it."""

    label: str
    ratio: float
    low: float
    high: float


def main() -> int:
    return keep_up({PICTURE: draw([(title, bars_of(names)) for names, title in SETTINGS])})


def bars_of(names: Sequence[str]) -> list[Bar]:
    """Of the pairs that some runs have measured, in the order of `PAIRS`."""
    return [
        Bar(label, *rows[ours]["times_faster"][peer])
        for ours, peer, label in PAIRS
        for rows in (load(name)["rows"] for name in names)
        if peer in rows.get(ours, {}).get("times_faster", {})
    ]


def draw(groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """The picture as SVG: a bar for each pair, from zero, with its interval."""
    most = max(bar.high for _, bars in groups for bar in bars)
    width = LEFT + int(most * UNIT) + RIGHT
    height = TOP + sum(ROW * len(bars) + 2 * ROW for _, bars in groups) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#1b2430">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="16" y="24" font-size="14" font-weight="600">Speed of zgraph, as a multiple of its peer</text>',
        '<text x="16" y="42" fill="#5a6678">Step time of the peer / step time of zgraph: medians over interleaved '
        "repetitions, 95 % intervals. gloo, two x86 cores, 1 Gbit/s unless it says otherwise.</text>",
    ]
    y = TOP
    for title, bars in groups:
        y += ROW
        lines.append(f'<text x="16" y="{y + 5}" font-weight="600">{title}</text>')
        y += ROW // 2
        first = y
        for bar in bars:
            lines += one(bar, y)
            y += ROW
        lines.append(
            f'<path d="M{LEFT + UNIT} {first - 2}V{y}" stroke="#1b2430" stroke-dasharray="3 3" stroke-width="1"/>'
        )
        y += ROW // 2
    return "\n".join([*lines, "</svg>", ""])


def one(bar: Bar, y: int) -> list[str]:
    low, high, end = (LEFT + UNIT * value for value in (bar.low, bar.high, bar.ratio))
    middle = y + 8
    return [
        f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end">{bar.label}</text>',
        f'<rect x="{LEFT}" y="{y + 1}" width="{end - LEFT:.1f}" height="15" fill="#7f9fe0"/>',
        f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8" '
        'stroke="#1b2430" stroke-width="1.3"/>',
        f'<text x="{max(high, end) + 8:.1f}" y="{y + 13}">{bar.ratio:.2f} [{bar.low:.2f}, {bar.high:.2f}]</text>',
    ]


if __name__ == "__main__":
    raise SystemExit(main())
