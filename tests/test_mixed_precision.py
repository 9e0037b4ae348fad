"""Half precision equals the replicated model bit for bit: narrow parameters, autocast, loss scaling, token weights."""

from __future__ import annotations

import pytest
import torch

from tests import models
from tests.ranks import Ranks
from tests.replicated import Case, compare, token_batch

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _cases(label: str, half: torch.dtype) -> dict[str, Case]:
    parameters = {"param_dtype": half}
    return {
        f"{label}_parameters": Case(build=models.Uneven, options=parameters, evaluate=True),
        f"{label}_language": Case(
            build=lambda: models.Language(layers=1), batch=token_batch, options=parameters, evaluate=True
        ),
        f"{label}_wide_request": Case(build=models.Uneven, options=parameters | {"reduce_dtype": torch.float32}),
        f"{label}_wire": Case(build=models.Uneven, options={"reduce_dtype": half}),
        f"{label}_sum": Case(build=models.Uneven, options=parameters | {"reduction": "sum"}),
        f"{label}_reused": Case(build=models.Reused, options=parameters),
        f"{label}_frozen": Case(build=models.Frozen, options=parameters),
        f"{label}_graph_breaks": Case(build=models.Broken, options=parameters),
        f"{label}_retain_graph": Case(build=models.Uneven, options=parameters, backwards=2),
        f"{label}_experts": Case(
            build=models.Routed, options=parameters | {"units": (models.Experts,)}, zeros=("moe.",)
        ),
        f"{label}_autocast": Case(build=models.Uneven, autocast=half, evaluate=True),
        f"{label}_autocast_language": Case(
            build=lambda: models.Language(layers=1), batch=token_batch, autocast=half, evaluate=True
        ),
        f"{label}_autocast_reused": Case(build=models.Reused, autocast=half),
        f"{label}_autocast_attention": Case(build=models.Attending, autocast=half),
        f"{label}_autocast_batch_norm": Case(build=models.Normalised, autocast=half, evaluate=True),
        f"{label}_autocast_graph_breaks": Case(build=models.Broken, autocast=half),
        f"{label}_autocast_wire": Case(build=models.Uneven, autocast=half, options={"reduce_dtype": half}),
        f"{label}_autocast_parameters": Case(build=models.Uneven, autocast=half, options=parameters),
    }


CASES = {name: case for label, half in HALF.items() for name, case in _cases(label, half).items()} | {
    # Both narrow, neither holds the other's values: what travels is the one that was asked for.
    "fp16_parameters_bf16_wire": Case(
        build=models.Uneven, options={"param_dtype": torch.float16, "reduce_dtype": torch.bfloat16}
    ),
    "bf16_parameters_fp16_wire": Case(
        build=models.Uneven, options={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float16}
    ),
}

FAST = ("fp16_parameters", "bf16_autocast")  # what `make test-fast` runs of them


def run_case(name: str, zero_stage: int, mode: str) -> int:
    return compare(CASES[name], zero_stage, mode)


@pytest.mark.parametrize("mode", ["eager", "fx"])
@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_equals_the_replicated_model(ranks: Ranks, name: str, zero_stage: int, mode: str) -> None:
    assert min(ranks.run(run_case, name, zero_stage, mode)) > 0
