"""Train Hugging Face models, unmodified, sharded by zgraph, and compare every gradient with the replicated model's.

    python examples/zoo.py                                               # ten models, 2 and 3 ranks, stages 0 and 3
    python examples/zoo.py --models llama,t5 --ranks 2 --lowerings fx    # less
    python examples/zoo.py --json examples/benchmarks/results/zoo.json   # for docs/models.md

Small configurations with random weights, nothing is downloaded. The reference on each rank is the plain model: the
gradients of all ranks' batches, averaged in rank order. Under fx losses, gradients and parameters of five steps must
equal it bit for bit; under Inductor losses within 1e-6 and parameters within 1e-5. Needs `transformers`. Prints a line
for each case and a summary at the end; exits with 1 if a model differs.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zgraph
from zgraph.torch_compat.dynamo import graph_break_reasons

LOWERINGS = ("fx", "inductor")
STEPS = 5
LAYERS = 2  # of each stack of equal blocks
VOCABULARY = 97
LEARNING_RATE = 0.05
LOSS_TOLERANCE = 1e-6  # relative, under Inductor, which sums in another order
PARAMETER_TOLERANCE = 1e-5  # after SGD; relative to the largest entry
ROUNDING = 1e-6  # a gradient that is never larger is zero in exact arithmetic, as that of a key's bias in attention


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        build: (layers) -> the model, with random weights.
        batch: (generator) -> keyword arguments of its forward, with which it returns a loss.
        units: names of module classes that have to gather as a whole.
        traced: why the reference goes through AOTAutograd too (aot_eager); "": it runs as it is.
    """

    build: Callable[[int], nn.Module]
    batch: Callable[[torch.Generator], dict[str, Tensor]]
    units: tuple[str, ...] = ()
    traced: str = ""


def tokens(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def language_batch(generator: torch.Generator) -> dict[str, Tensor]:
    inputs = tokens(generator, 2, 12)
    return {"input_ids": inputs, "labels": inputs}


def labelled_images(generator: torch.Generator) -> dict[str, Tensor]:
    images = torch.randn(4, 3, 16, 16, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(0, 5, (4,), generator=generator)}


def gpt2(layers: int) -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=16,
            n_embd=32,
            n_layer=layers,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def llama(layers: int) -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def mixtral(layers: int, implementation: str) -> nn.Module:
    config = hf.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return hf.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)


def bert(layers: int) -> nn.Module:
    return hf.BertForMaskedLM(
        hf.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5(layers: int) -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=layers,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def vit(layers: int) -> nn.Module:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            num_labels=5,
        )
    )


def resnet(layers: int) -> nn.Module:
    return hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, layers], layer_type="basic", num_labels=5)
    )


def whisper(layers: int) -> nn.Module:
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            d_model=32,
            encoder_layers=layers,
            decoder_layers=layers,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_source_positions=12,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


def whisper_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 24, generator=generator), "labels": tokens(generator, 2, 10)}


def clip(layers: int) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 2}
    vision = {**sizes, "image_size": 16, "patch_size": 4}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24))


def clip_batch(generator: torch.Generator) -> dict[str, Any]:
    texts = tokens(generator, 3, 10)
    texts[:, -1] = 2
    return {"input_ids": texts, "pixel_values": torch.randn(3, 3, 16, 16, generator=generator), "return_loss": True}


ZOO = {
    "gpt2": Entry(gpt2, language_batch),
    "llama": Entry(llama, language_batch),
    "mixtral-eager": Entry(
        functools.partial(mixtral, implementation="eager"), language_batch, units=("MixtralSparseMoeBlock",)
    ),
    "mixtral-grouped": Entry(
        functools.partial(mixtral, implementation="grouped_mm"), language_batch, units=("MixtralSparseMoeBlock",)
    ),
    "bert": Entry(bert, language_batch),
    "t5": Entry(t5, language_batch),
    "vit": Entry(vit, labelled_images),
    "resnet": Entry(resnet, labelled_images),
    "whisper": Entry(whisper, whisper_batch),
    "clip": Entry(clip, clip_batch, traced="AOTAutograd alone changes the last bit of the gradient of logit_scale"),
}


def averaged_gradients(
    reference: nn.Module, batches: list[dict[str, Tensor]], call: Callable[..., Any] | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Each rank's loss, and the gradients of all of them, summed in fp32 in rank order and divided once."""
    losses: list[float] = []
    sums: dict[str, Tensor] = {}
    buffers = {name: buffer.clone() for name, buffer in reference.named_buffers()}
    for rank, batch in enumerate(batches):
        for name, buffer in reference.named_buffers():
            buffer.copy_(buffers[name])  # each rank has its own running statistics; this rank's are set at the end
        reference.zero_grad()
        loss = (reference if call is None else call)(**batch).loss
        loss.backward()
        losses.append(loss.item())
        if rank == dist.get_rank():
            own = {name: buffer.clone() for name, buffer in reference.named_buffers()}
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.clone()
    for name, buffer in reference.named_buffers():
        buffer.copy_(own[name])
    return losses, {name: total / len(batches) for name, total in sums.items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def relative(found: Tensor, expected: Tensor, scale: float) -> float:
    """The largest difference by scale; 0.0 only where all entries are equal, inf where one is not a number."""
    if torch.equal(found, expected):
        return 0.0
    error = ((found - expected).abs().max() / max(scale, 1e-30)).item()
    return math.inf if math.isnan(error) else error


@dataclass(frozen=True)
class Reference:
    """Five SGD steps of the replicated model.

    Attributes:
        start: the model before the first step.
        losses: by step and rank.
        gradients: by step and name, averaged over the ranks.
        parameters: after the last step.
    """

    start: nn.Module
    losses: list[list[float]]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]

    def error(self, name: str, found: Tensor, expected: Tensor) -> float:
        """The largest difference, relative to the largest entry; where all there is is rounding, as it is."""
        largest = [gradients[name].abs().max().item() for gradients in self.gradients if name in gradients]
        only_rounding = bool(largest) and max(largest) <= ROUNDING
        return relative(found, expected, 1.0 if only_rounding else expected.abs().max().item())


def batches_of(entry: Entry, step: int) -> list[dict[str, Tensor]]:
    """One of each rank."""
    return [entry.batch(torch.Generator().manual_seed(100 * step + rank)) for rank in range(dist.get_world_size())]


def train_reference(name: str, layers: int) -> Reference:
    """On every rank, with the batches of all ranks."""
    torch.compiler.reset()
    torch.manual_seed(0)
    entry = ZOO[name]
    model = entry.build(layers).train()
    start = copy.deepcopy(model)
    call = torch.compile(model, backend="aot_eager") if entry.traced else model
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses: list[list[float]] = []
    gradients: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        found, averages = averaged_gradients(model, batches_of(entry, step), call)
        losses.append(found)
        gradients.append(averages)
        for parameter_name, parameter in model.named_parameters():
            parameter.grad = averages.get(parameter_name)
        optimizer.step()
    return Reference(start, losses, gradients, {name: value.detach() for name, value in model.named_parameters()})


def check(name: str, reference: Reference, zero_stage: int, lowering: str) -> dict[str, Any]:
    """Five SGD steps beside the reference, on every rank of the default group.

    Returns:
        A row of the table: the largest relative errors of losses, gradients and parameters (0.0: equal in every bit),
        and what was compiled.
    """
    torch.compiler.reset()
    entry, rank = ZOO[name], dist.get_rank()
    model = copy.deepcopy(reference.start)
    kinds = {type(part) for part in model.modules() if type(part).__name__ in entry.units}
    zgraph.shard(model, zero_stage=zero_stage, units=kinds)
    called = torch.compile(model, backend="zgraph", options={"lowering": lowering})
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    row: dict[str, Any] = {"model": name, "ranks": dist.get_world_size(), "stage": zero_stage, "lowering": lowering}
    row |= {"loss": 0.0, "gradient": 0.0, "parameter": 0.0, "missing": []}
    breaks_before, started = graph_break_reasons(), time.perf_counter()
    for step in range(STEPS):
        loss = called(**batches_of(entry, step)[rank]).loss
        loss.backward()
        expected_loss, expected = torch.tensor(reference.losses[step][rank]), reference.gradients[step]
        row["loss"] = max(row["loss"], relative(loss.detach(), expected_loss, expected_loss.abs().item()))
        for parameter_name, parameter in model.named_parameters():
            if (parameter.grad is None) != (parameter_name not in expected):
                # A unit gives a gradient of zeros to what no rank has read.
                if parameter.grad is None or whole(parameter.grad).any():
                    row["missing"].append(parameter_name)
                continue
            if parameter.grad is not None:
                error = reference.error(parameter_name, whole(parameter.grad), expected[parameter_name])
                row["gradient"] = max(row["gradient"], error)
        optimizer.step()
        optimizer.zero_grad()
    for parameter_name, parameter in model.named_parameters():
        error = reference.error(parameter_name, whole(parameter.detach()), reference.parameters[parameter_name])
        row["parameter"] = max(row["parameter"], error)
    report = zgraph.summary(model)
    newest = {(graph.frame.split("/")[0], graph.direction): graph for graph in report.graphs}
    row["graphs"] = len(report.graphs)
    row["recompiles"] = report.recompiles
    row["reasons"] = list(dict.fromkeys(graph.reason for graph in report.graphs if graph.reason))
    row["gathers"] = sum("gather" in transfer.kind for graph in newest.values() for transfer in graph.transfers)
    row["breaks"] = {
        reason: count - breaks_before.get(reason, 0)
        for reason, count in graph_break_reasons().items()
        if count > breaks_before.get(reason, 0)
    }
    row["seconds"] = time.perf_counter() - started
    row["good"] = not row["missing"] and (
        row["loss"] == row["gradient"] == row["parameter"] == 0.0
        if lowering == "fx"
        else row["loss"] <= LOSS_TOLERANCE and row["parameter"] <= PARAMETER_TOLERANCE
    )
    return row


def run_rank(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in options.models:
        reference = train_reference(name, LAYERS)
        for lowering in options.lowerings:
            for zero_stage in options.stages:
                row = check(name, reference, zero_stage, lowering)
                rows: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(rows, row)
                if dist.get_rank() == 0:
                    print(json.dumps(worst(rows)), flush=True)
    dist.destroy_process_group()


def worst(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's row, with the largest errors of all ranks."""
    errors = {key: max(row[key] for row in rows) for key in ("loss", "gradient", "parameter")}
    return {**rows[0], **errors, "good": all(row["good"] for row in rows)}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--models", type=words, default=list(ZOO), help=", ".join(ZOO))
    parser.add_argument("--stages", type=numbers, default=[0, 3])
    parser.add_argument("--ranks", type=numbers, default=[2, 3])
    parser.add_argument("--lowerings", type=words, default=list(LOWERINGS))
    parser.add_argument("--json", type=Path, help="file for the summary, of which docs/models.md is made")
    options = parser.parse_args()
    for chosen, known in ((options.models, tuple(ZOO)), (options.lowerings, LOWERINGS)):
        for word in chosen:
            if word not in known:
                parser.error(f"unknown {word!r}; there are {', '.join(known)}")
    return options


def run_model(name: str, ranks: int, options: argparse.Namespace) -> Generator[dict[str, Any]]:
    """The rows of one model, as they come. A process of its own: what breaks one model does not hide the others."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    command += ["--models", name, "--stages", ",".join(map(str, options.stages))]
    command += ["--lowerings", ",".join(options.lowerings)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as running:
            assert running.stdout is not None
            yield from (json.loads(line) for line in running.stdout if line.startswith("{"))
        if running.returncode:
            errors.seek(0)
            lines = errors.read().splitlines()
            print(next((line for line in lines if "Error" in line), f"exit {running.returncode}"), flush=True)


def summarized(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry for each model: what the first lowering compiled at the last stage, and how many cases passed."""
    found: list[dict[str, Any]] = []
    for name in options.models:
        own = [row for row in rows if row["model"] == name]
        entry: dict[str, Any] = {"model": name, "cases": len(options.ranks) * len(options.stages)}
        if own:
            lowering, stage = own[0]["lowering"], own[-1]["stage"]
            shown = next(row for row in own if row["lowering"] == lowering and row["stage"] == stage)
            entry |= {key: shown[key] for key in ("graphs", "gathers", "recompiles", "breaks", "reasons")}
        for lowering in options.lowerings:
            some = [row for row in own if row["lowering"] == lowering]
            entry[lowering] = {"passed": sum(row["good"] for row in some)}
            entry[lowering] |= {key: max((row[key] for row in some), default=None) for key in ("loss", "parameter")}
        found.append(entry)
    return found


def shown(entry: dict[str, Any], lowerings: list[str]) -> list[str]:
    """A line for a model of the summary, and one for each reason of its graph breaks and recompiles."""
    name, breaks = entry["model"], entry.get("breaks", {})
    counts = f"{entry.get('graphs', 0)} graphs, {sum(breaks.values())} breaks, {entry.get('gathers', 0)} gathers"
    passed = (f"{lowering} {entry[lowering]['passed']} of {entry['cases']}" for lowering in lowerings)
    lines = [f"{name}: {counts}, {entry.get('recompiles', 0)} recompiles; {', '.join(passed)}"]
    lines += [f"    {count} graph breaks: {reason}" for reason, count in breaks.items()]
    lines += [f"    recompiled: {reason}" for reason in entry.get("reasons", [])]
    return [*lines, f"    compared with aot_eager: {ZOO[name].traced}"] if ZOO[name].traced else lines


def main() -> int:
    options = parse_options()
    if "RANK" in os.environ:
        run_rank(options)
        return 0
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        for name in options.models:
            for row in run_model(name, ranks, options):
                rows.append(row)
                errors = ", ".join(f"{key} {row[key]:.1e}" for key in ("loss", "gradient", "parameter"))
                verdict = "equal" if row["good"] else f"DIFFERS {row['missing']}"
                case = f"{name}, {ranks} ranks, stage {row['stage']}, {row['lowering']}"
                print(f"{case}: {verdict} ({errors}), {row['seconds']:.1f} s", flush=True)
    entries = summarized(rows, options)
    print("", *(line for entry in entries for line in shown(entry, options.lowerings)), sep="\n")
    if options.json:
        settings = {"ranks": options.ranks, "stages": options.stages, "steps": STEPS}
        versions = {"torch": torch.__version__, "transformers": hf.__version__}
        options.json.write_text(json.dumps({**settings, "versions": versions, "rows": entries}, indent=1) + "\n")
    expected = len(options.models) * len(options.ranks) * len(options.stages) * len(options.lowerings)
    return int(len(rows) < expected or not all(row["good"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
