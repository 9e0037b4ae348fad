"""Train Hugging Face models, unmodified, sharded by zgraph, and compare every gradient with the replicated model's.

    python examples/zoo.py                                        # all models on 2 and 3 ranks, stages 0 and 3
    python examples/zoo.py --models llama,t5 --ranks 2 --lowering inductor

Small configurations with random weights, nothing is downloaded. The reference on each rank is the plain model: the
gradients of all ranks' batches, averaged in rank order. Needs `transformers`. Prints a table; exits with 1 if a model
differs.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zgraph

STEPS = 5
VOCABULARY = 97
LEARNING_RATE = 0.05
LOSS_TOLERANCE = 1e-6  # relative, under Inductor, which sums in another order
PARAMETER_TOLERANCE = 1e-5  # after SGD; relative to the largest entry


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        build: the model, with random weights.
        batch: (generator) -> keyword arguments of its forward, with which it returns a loss.
        units: names of module classes that have to gather as a whole.
        traced: the reference goes through AOTAutograd too (aot_eager), where that alone changes the last bits.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, Tensor]]
    units: tuple[str, ...] = ()
    traced: bool = False


def tokens(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def language_batch(generator: torch.Generator) -> dict[str, Tensor]:
    inputs = tokens(generator, 2, 12)
    return {"input_ids": inputs, "labels": inputs}


def labelled_images(generator: torch.Generator) -> dict[str, Tensor]:
    images = torch.randn(4, 3, 16, 16, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(0, 5, (4,), generator=generator)}


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def mixtral(implementation: str) -> nn.Module:
    config = hf.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return hf.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)


def bert() -> nn.Module:
    return hf.BertForMaskedLM(
        hf.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def vit() -> nn.Module:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            num_labels=5,
        )
    )


def resnet() -> nn.Module:
    return hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5)
    )


def whisper() -> nn.Module:
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
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


def clip() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
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
    "mixtral-eager": Entry(lambda: mixtral("eager"), language_batch, units=("MixtralSparseMoeBlock",)),
    "mixtral-grouped": Entry(lambda: mixtral("grouped_mm"), language_batch, units=("MixtralSparseMoeBlock",)),
    "bert": Entry(bert, language_batch),
    "t5": Entry(t5, language_batch),
    "vit": Entry(vit, labelled_images),
    "resnet": Entry(resnet, labelled_images),
    "whisper": Entry(whisper, whisper_batch),
    "clip": Entry(clip, clip_batch, traced=True),  # of the gradient of its 0-d logit_scale
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


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def check(name: str, zero_stage: int, lowering: str) -> dict[str, Any]:
    """Five SGD steps beside the reference, on every rank of the default group.

    Returns:
        A row of the table: the largest relative errors of losses, gradients and parameters (0.0: equal in every bit),
        and what was compiled.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    entry, world, rank = ZOO[name], dist.get_world_size(), dist.get_rank()
    model = entry.build().train()
    reference = copy.deepcopy(model)
    kinds = {type(part) for part in model.modules() if type(part).__name__ in entry.units}
    zgraph.shard(model, zero_stage=zero_stage, units=kinds)
    called = torch.compile(model, backend="zgraph", options={"lowering": lowering})
    call_reference = torch.compile(reference, backend="aot_eager") if entry.traced else reference
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    expected_optimizer = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE)
    row: dict[str, Any] = {"model": name, "ranks": world, "stage": zero_stage, "lowering": lowering}
    row |= {"loss": 0.0, "gradient": 0.0, "parameter": 0.0, "missing": []}
    for step in range(STEPS):
        batches = [entry.batch(torch.Generator().manual_seed(100 * step + other)) for other in range(world)]
        losses, expected = averaged_gradients(reference, batches, call_reference)
        loss = called(**batches[rank]).loss
        loss.backward()
        row["loss"] = max(row["loss"], abs(loss.item() - losses[rank]) / abs(losses[rank]))
        for parameter_name, parameter in model.named_parameters():
            if (parameter.grad is None) != (parameter_name not in expected):
                # A unit gives a gradient of zeros to what no rank has read.
                if parameter.grad is None or whole(parameter.grad).any():
                    row["missing"].append(parameter_name)
                continue
            if parameter.grad is not None:
                error = relative(whole(parameter.grad), expected[parameter_name])
                row["gradient"] = max(row["gradient"], error)
        for parameter_name, parameter in reference.named_parameters():
            parameter.grad = expected.get(parameter_name)
        optimizer.step()
        expected_optimizer.step()
        optimizer.zero_grad()
    for parameter_name, parameter in model.named_parameters():
        error = relative(whole(parameter.detach()), reference.get_parameter(parameter_name).detach())
        row["parameter"] = max(row["parameter"], error)
    report = zgraph.summary(model)
    newest = {(graph.frame.split("/")[0], graph.direction): graph for graph in report.graphs}
    row["graphs"] = len(report.graphs)
    row["frames"] = len({frame for frame, _ in newest})
    row["recompiles"] = report.recompiles
    row["gathers"] = sum("gather" in transfer.kind for graph in newest.values() for transfer in graph.transfers)
    row["seconds"] = sum(report.seconds.values())
    exact = lowering == "fx"
    row["good"] = not row["missing"] and (
        row["loss"] == row["gradient"] == row["parameter"] == 0.0
        if exact
        else row["loss"] <= LOSS_TOLERANCE and row["parameter"] <= PARAMETER_TOLERANCE
    )
    return row


def run_rank(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in options.models:
        for zero_stage in options.stages:
            row = check(name, zero_stage, options.lowering)
            if dist.get_rank() == 0:
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(ZOO), help=", ".join(ZOO))
    parser.add_argument("--stages", type=numbers, default=[0, 3])
    parser.add_argument("--ranks", type=numbers, default=[2, 3])
    parser.add_argument("--lowering", default="fx", choices=["fx", "inductor"])
    options = parser.parse_args()
    unknown = [name for name in options.models if name not in ZOO]
    if unknown:
        parser.error(f"unknown models {', '.join(unknown)}; there are {', '.join(ZOO)}")
    return options


def main() -> int:
    options = parse_options()
    if "RANK" in os.environ:
        run_rank(options)
        return 0
    columns = ("model", "ranks", "stage", "frames", "graphs", "recompiles", "gathers", "loss", "gradient", "parameter")
    print("| " + " | ".join(columns) + " | |\n|" + "---|" * (len(columns) + 1), flush=True)
    good = True
    for ranks in options.ranks:
        for name in options.models:  # one process per model: what breaks one does not hide the others
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            arguments = ["--models", name, "--stages", ",".join(map(str, options.stages))]
            command += [__file__, *arguments, "--lowering", options.lowering]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            for row in rows:
                cells = [f"{row[key]:.1e}" if isinstance(row[key], float) else str(row[key]) for key in columns]
                print("| " + " | ".join(cells) + f" | {'equal' if row['good'] else 'DIFFERS'} |", flush=True)
            if len(rows) < len(options.stages):
                errors = [line for line in done.stderr.splitlines() if "Error" in line]
                print(f"| {name} | {ranks} | failed: {errors[0] if errors else done.stderr[-200:]} |", flush=True)
            good &= done.returncode == 0 and len(rows) == len(options.stages) and all(row["good"] for row in rows)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
