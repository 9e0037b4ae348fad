"""Draw docs/images/report-*.png: what the page of a report shows of planned and of measured steps.

    python docs/tools/draw_report.py                  # all of them: some minutes
    python docs/tools/draw_report.py --only measured  # or another one of PICTURES

Needs a Chromium of the system, zgraph[test], whose transformers has the model, and zgraph[benchmarks], whose pillow
writes small files. What was measured differs from run to run, so nothing compares the pictures with these.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import zgraph
from zgraph.analysis.hardware import Link
from zgraph.reporting.export.reading import load
from zgraph.reporting.page.write_page import write_page

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 80_000
COLOURS = 128
GIGABIT = Link(latency_us=100.0, bytes_per_us=119.5)  # what TCP leaves of 1 Gbit/s
TEN_GIGABIT = Link(latency_us=50.0, bytes_per_us=1195.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(PICTURES), help="draw one of them")
    chosen = parser.parse_args().only
    with tempfile.TemporaryDirectory() as folder:
        for name, draw in PICTURES.items():
            if chosen in (None, name):
                save(draw(Path(folder)), IMAGES / f"report-{name}.png")


def timeline(folder: Path) -> bytes:
    """Figures and timeline of Llama-3-8B on one of 64 H100s."""
    return shot(llama_page(folder / "llama", zgraph.Hardware.preset("h100"), None), "#timeline-chart", height=520)


def memory(folder: Path) -> bytes:
    """The memory curve of the same step."""
    return shot(llama_page(folder / "llama", zgraph.Hardware.preset("h100"), None), "#memory-chart", above=140)


def slow_link(folder: Path) -> bytes:
    """The same model over links of 1 Gbit/s: bf16 gradients above, LoCo's codes below."""
    machine = replace(
        zgraph.Hardware.preset("h100"), name="an H100 behind 1 Gbit/s", inter_host=GIGABIT, ranks_per_host=1
    )
    pages = [
        llama_page(folder / name, machine, method) for name, method in (("bf16", None), ("loco", zgraph.passes.LoCo()))
    ]
    return stacked([shot(page, "#timeline-chart", height=540) for page in pages])


def measured(folder: Path) -> bytes:
    """The GPT of examples/train_gpt.py on two ranks of this machine, with what zgraph.measure has found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    paths = [str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    gpt = folder / "gpt"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), MEASURES: str(gpt)}
    subprocess.run(command, env=environment, check=True)
    return shot(write_page(load(gpt), gpt), "#timeline-chart", height=560)


def whole_step(folder: Path) -> bytes:
    """A GPT at stage 2 over links of 10 Gbit/s: its forward and backward above, and the whole step below."""
    machine = replace(zgraph.Hardware.preset("cpu"), inter_host=TEN_GIGABIT, ranks_per_host=1)
    pages = [gpt_page(folder / name, machine, whole) for name, whole in (("three-calls", False), ("whole", True))]
    return stacked([shot(page, "#timeline-chart", height=520) for page in pages])


PICTURES: dict[str, Callable[[Path], bytes]] = {
    "timeline": timeline,
    "memory": memory,
    "slow-link": slow_link,
    "measured": measured,
    "whole-step": whole_step,
}
MEASURES = "ZGRAPH_DRAW_MEASURED"  # names the folder, in the environment of the ranks


def llama_page(folder: Path, machine: zgraph.Hardware, compression: Any) -> Path:
    """The page of a step of Llama-3-8B planned for 64 ranks; planned once for a folder."""
    if folder.exists():
        return folder / "index.html"
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    plan = zgraph.plan(
        lambda: LlamaForCausalLM(config),
        world_size=64,
        batch=lambda: (torch.zeros(1, 4096, dtype=torch.long),),
        hardware=machine,
        passes=zgraph.PassList(zgraph.passes.presets.default(compression=compression)),
    )
    plan.report(folder)
    return write_page(load(folder), folder)


def gpt_page(folder: Path, machine: zgraph.Hardware, whole: bool) -> Path:
    """The page of a step of a GPT with 33 M parameters, planned for two ranks, with AdamW in it or without."""
    sys.path.insert(0, str(ROOT / "examples"))
    from train_gpt import GPT  # pyright: ignore[reportMissingImports]

    tokens = (8, 128)
    plan = zgraph.plan(
        lambda: GPT(layers=10, width=512, heads=8, sequence=tokens[1]),
        world_size=2,
        batch=lambda: (torch.zeros(tokens, dtype=torch.long), torch.zeros(tokens, dtype=torch.long)),
        hardware=machine,
        shard_fn=lambda model: zgraph.shard(model, zero_stage=2),
        optimizer_fn=(lambda model: torch.optim.AdamW(model.parameters(), fused=True)) if whole else None,
    )
    print(plan)
    plan.report(folder)
    return write_page(load(folder), folder)


def train_and_measure(folder: Path) -> None:
    """What each rank runs: a few steps of the example, measured, and its report."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from train_gpt import GPT  # pyright: ignore[reportMissingImports]

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    machine = zgraph.calibrate(mesh)
    torch.manual_seed(0)
    model = zgraph.shard(GPT(layers=4, width=192, heads=6, sequence=128), mesh, zero_stage=3)
    target = zgraph.Target(hardware=machine, time_kernels=True)
    options: Any = {"passes": zgraph.PassList(zgraph.passes.presets.planned(), target=target), "lowering": "fx"}
    compiled: Any = torch.compile(model, backend="zgraph", dynamic=False, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def steps(count: int) -> None:
        for _ in range(count):
            tokens = torch.randint(256, (8, 129))
            compiled(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(3)
    with zgraph.measure(compiled):
        steps(8)
    zgraph.report(compiled, folder)
    dist.destroy_process_group()


def shot(page: Path, shown: str, height: int = 0, above: int = 0) -> bytes:
    """A picture of the page without what stands beside it: the top of it, or from so much above an element."""
    from playwright import sync_api

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise SystemExit("there is no Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1180, "height": 900}, color_scheme="light")
        view.goto(page.as_uri())
        view.wait_for_selector("html[data-drawn]", state="attached")
        view.add_style_tag(content="aside { display: none } .columns { display: block !important }")
        view.wait_for_timeout(500)
        if height:
            picture = view.screenshot(clip={"x": 0, "y": 0, "width": 1180, "height": height})
        else:
            box = view.locator(shown).bounding_box()
            assert box is not None
            clip = {"x": 0, "y": box["y"] - above, "width": 1180, "height": box["height"] + above + 12}
            picture = view.screenshot(full_page=True, clip=clip)  # type: ignore[arg-type]
        browser.close()
    return picture


def stacked(pictures: list[bytes]) -> bytes:
    """Pictures of one width, one below the other."""
    from PIL import Image  # pyright: ignore

    opened = [Image.open(io.BytesIO(each)).convert("RGB") for each in pictures]
    whole = Image.new("RGB", (opened[0].width, sum(each.height for each in opened)))
    top = 0
    for each in opened:
        whole.paste(each, (0, top))
        top += each.height
    return png(whole)


def png(picture: Any) -> bytes:
    written = io.BytesIO()
    picture.save(written, "PNG", optimize=True)
    return written.getvalue()


def save(picture: bytes, path: Path) -> None:
    """Write a picture with few colours, which its kind of drawing has."""
    from PIL import Image  # pyright: ignore

    small = Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    data = png(small)
    if len(data) > MOST_BYTES:
        raise SystemExit(f"{path} would have {len(data)} bytes, and may have {MOST_BYTES}")
    path.write_bytes(data)
    print(f"wrote {path}, {len(data)} bytes")


if __name__ == "__main__":
    if MEASURES in os.environ:
        train_and_measure(Path(os.environ[MEASURES]))
    else:
        main()
