"""What one training step of a Llama would take on a cluster, planned on this machine: no GPU, no weights, no network.

    python examples/plan_llama.py                                        # 8 B parameters on 64 H100s
    python examples/plan_llama.py --model 70b --ranks 1024               # minutes
    python examples/plan_llama.py --hardware h200 --budget-gib 60        # what is gathered again follows from it
    python examples/plan_llama.py --whole-step                           # one graph, with AdamW in it
    python examples/plan_llama.py --layers 4 8 16 32                     # how planning grows with the model

Needs transformers: pip install 'zgraph[examples]'.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zgraph

GIB = 2**30

# The published shapes of Llama 3 (Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3).
MODELS: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="8b")
    add("--ranks", type=int, default=64)
    add("--hardware", default="h100", help='"a100", "h100", "h200" or "cpu"')
    add("--sequence", type=int, default=4096, help="tokens of one rank's batch of one")
    add("--budget-gib", type=float, help="what a step may hold beside parameters and optimizer; plans by costs")
    add("--whole-step", action="store_true", help="plan the optimizer's step, too, as zgraph.training_step runs it")
    add("--layers", type=int, nargs="+", help="plan models of so many layers, one after the other")
    options = parser.parse_args()
    torch.set_default_dtype(torch.bfloat16)
    for layers in options.layers or [MODELS[options.model]["num_hidden_layers"]]:
        shape = {**MODELS[options.model], "num_hidden_layers": layers}
        config = LlamaConfig(**shape, vocab_size=128256, num_key_value_heads=8, use_cache=False)
        started = time.perf_counter()
        plan = zgraph.plan(
            lambda config=config: LlamaForCausalLM(config),
            world_size=options.ranks,
            batch=lambda: (torch.zeros(1, options.sequence, dtype=torch.long),),
            hardware=options.hardware,
            passes=pipeline(options.hardware, options.budget_gib),
            optimizer_fn=adamw if options.whole_step else None,
            step_fn=step if options.whole_step else None,
        )
        print(plan)
        nodes = sum(graph.nodes for graph in plan.graphs)
        print(f"{layers} layers, {nodes} nodes, planned in {time.perf_counter() - started:.0f} s\n", flush=True)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    """The lines of a training loop."""

    def train(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train


def pipeline(hardware: str, budget_gib: float | None) -> zgraph.PassList | None:
    """The default passes; with a budget those that schedule by costs."""
    if budget_gib is None:
        return None
    target = zgraph.Target(hardware=zgraph.Hardware.preset(hardware), budget_bytes=int(budget_gib * GIB))
    return zgraph.PassList(zgraph.passes.presets.planned(), target=target)


if __name__ == "__main__":
    main()
