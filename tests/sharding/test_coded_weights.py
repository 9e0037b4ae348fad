"""Weights stored as codes of 8 or 4 bits serve like weights that were quantized and decoded in memory."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zgraph
from examples.benchmarks.loopback import Wire, loopback
from tests.support.budget import long
from tests.support.memory.live_tensors import local
from tests.support.ranks import Ranks, worlds
from tests.support.resting import check_rests
from zgraph.codegen.kernels import reference
from zgraph.compression.methods import NoFeedback, RngKey

ODD, WIDTH = 65, 80  # rows that two ranks do not share evenly, and groups that do not end with rows


def model(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Linear(WIDTH, ODD), nn.GELU(), nn.Linear(ODD, WIDTH), nn.GELU(), nn.Linear(WIDTH, ODD))


def decoded(weight: Tensor, world: int, bits: int) -> Tensor:
    """What codes of each rank's rows stand for, by the reference of the kernels."""
    method = NoFeedback(bits=bits, group=64 if bits == 4 else 128, clip_search=True)
    most = -(-weight.shape[0] // world) * weight.shape[1]
    parts: list[Tensor] = []
    for rows in weight.detach().chunk(world):
        flat = torch.zeros(most, dtype=weight.dtype)
        flat[: rows.numel()] = rows.flatten()
        codes, scales = reference.quantize(flat.view(1, -1), {}, method, RngKey(0), 0)
        parts.append(reference.dequantize_sum(codes, scales, most, method, RngKey(0))[: rows.numel()].view_as(rows))
    return torch.cat(parts).to(weight.dtype)


def twin(plain: nn.Module, world: int, bits: int, full_precision: tuple[str, ...] = ()) -> nn.Module:
    """The same model with weights that were quantized and decoded."""
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if parameter.ndim == 2 and name not in full_precision:
                parameter.copy_(decoded(parameter, world, bits))
    return plain


def serve(zero_stage: int, offload: zgraph.Offload, precision: str, lowering: str) -> tuple[float, list[str]]:
    """Compare with the twin, compiled and not; the bytes of weights at rest, by those in memory, and the notes."""
    torch.compiler.reset()
    world, bits = torch.distributed.get_world_size(), offload.param_bits or 0
    dtype = torch.bfloat16 if precision in ("bf16", "widened") else torch.float32
    plain = twin(model().to(dtype), world if zero_stage else 1, bits, offload.full_precision)
    param_dtype = {"param_dtype": torch.bfloat16, "widened": torch.float32}.get(precision)
    served = zgraph.shard(model().to(dtype), zero_stage=zero_stage, param_dtype=param_dtype, offload=offload)
    plain = plain if param_dtype is None else plain.to(param_dtype)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).to(param_dtype or dtype)
    report = zgraph.Report()
    options: Any = {"lowering": lowering, "report": report}
    compiled: Any = torch.compile(served, backend="zgraph", options=options)
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()
    with torch.no_grad(), autocast:
        expected = plain(x)
        assert torch.equal(served(x), expected)
        if lowering == "fx":
            assert torch.equal(compiled(x), expected)
        else:
            torch.testing.assert_close(compiled(x), expected)
        assert torch.equal(compiled(x), compiled(x))
    check_rests(served, [])
    whole = [parameter.nbytes for parameter in model().to(dtype).parameters() if parameter.ndim == 2]
    resting = [local(parameter).nbytes for parameter in served.parameters() if local(parameter).dtype == torch.uint8]
    share = sum(resting) * (world if zero_stage else 1) / sum(whole)
    return share, [note for note in report.notes if "are brought to the device" in note]


@worlds(2)
@pytest.mark.parametrize(
    ("zero_stage", "tier", "bits", "precision", "lowering"),
    [
        (3, "disk", 4, "fp32", "fx"),
        (2, "host", 8, "param_dtype", "fx"),
        (0, "disk", 8, "autocast", "fx"),
        (3, "host", 4, "bf16", "fx"),
        (3, "host", 8, "widened", "fx"),
        (3, "disk", 8, "bf16", "inductor"),
        (2, "disk", 4, "autocast", "inductor"),  # compile islands
    ],
)
def test_codes_serve_as_decoded_weights_would(
    ranks: Ranks, zero_stage: int, tier: Any, bits: Any, precision: str, lowering: str, tmp_path: Path
) -> None:
    offload = zgraph.Offload(params=tier, path=tmp_path if tier == "disk" else None, param_bits=bits)
    for share, notes in ranks.run(serve, zero_stage, offload, precision, lowering):
        held = 16 if precision in ("bf16", "widened") else 32
        assert share < (bits + 0.6) / held  # a scale for each group, and padding
        assert len(notes) == 1


def test_named_weights_stay_as_they_are(tmp_path: Path) -> None:
    offload = zgraph.Offload(params="disk", path=tmp_path, param_bits=4, full_precision=("4.*",))
    with loopback(1, Wire()):
        served: Any = zgraph.shard(model(), offload=offload)
        plain = twin(model(), 1, 4, ("4.weight",))
        assert [local(served[place].weight).dtype for place in (0, 2, 4)] == [torch.uint8, torch.uint8, torch.float32]
        x = torch.randn(3, WIDTH)
        with torch.inference_mode():
            assert torch.equal(served(x), plain(x))


def check_materialized(offload: zgraph.Offload) -> None:
    expected = zgraph.shard(model(), offload=offload)
    with torch.device("meta"):
        served = nn.Sequential(
            nn.Linear(WIDTH, ODD), nn.GELU(), nn.Linear(ODD, WIDTH), nn.GELU(), nn.Linear(WIDTH, ODD)
        )
    zgraph.shard(served, offload=offload)
    zgraph.materialize(served, seed=0)
    check_rests(served, [])
    for ours, theirs in zip(served.parameters(), expected.parameters(), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(local(ours), local(theirs))
    # What is exported is what serves, and what was stored can be loaded again.
    exported, world = zgraph.full_state_dict(served), torch.distributed.get_world_size()
    for key, value in exported.items():
        assert torch.equal(value, twin(model(), world, 4).state_dict()[key])
    served.load_state_dict(expected.state_dict())
    with pytest.raises(RuntimeError, match=r"0.weight is stored as codes .* Load the weights before zgraph.shard"):
        served.load_state_dict(model().state_dict())
    for ours, theirs in zip(served.parameters(), expected.parameters(), strict=True):
        assert torch.equal(local(ours), local(theirs))


@worlds(2)
def test_weights_of_meta_models_are_coded_when_they_have_values(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(check_materialized, zgraph.Offload(params="disk", path=tmp_path, param_bits=4))


def served_of(zero_stage: int, offload: zgraph.Offload, rows: int) -> nn.Module:
    torch.manual_seed(0)
    return zgraph.shard(nn.Sequential(nn.Linear(64, rows), nn.Linear(rows, 64)), zero_stage=zero_stage, offload=offload)


def check_stored(folder: str) -> None:
    """Codes come back from a checkpoint, and are refused where as many bytes would stand for other weights."""
    offload = zgraph.Offload(params="disk", path=Path(folder, "rests"), param_bits=4)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        served, again = (served_of(3, offload, 65) for _ in range(2))
        expected = served(x)
        for parameter in again.parameters():
            local(parameter).fill_(1)
        assert not torch.equal(again(x), expected)
        zgraph.load_checkpoint(zgraph.save_checkpoint(Path(folder, "codes"), served, step=1), again)
        assert torch.equal(again(x), expected)
        split, whole = served_of(3, offload, 64), served_of(0, offload, 64)
        assert [one.shape for one in split.parameters()] == [one.shape for one in whole.parameters()]
        expected = whole(x)
        saved = zgraph.save_checkpoint(Path(folder, "split"), split, step=1)
        with pytest.raises(
            zgraph.CheckpointError, match=r"2048 elements on each of 2 ranks in the checkpoint, and as "
        ):
            zgraph.load_checkpoint(saved, whole)
        assert torch.equal(whole(x), expected)


@worlds(2)
def test_codes_are_stored_in_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(check_stored, str(tmp_path))


def check_planned(offload: zgraph.Offload) -> None:
    served, plain = zgraph.shard(model(), offload=offload), twin(model(), torch.distributed.get_world_size(), 4)
    x = torch.randn(5, WIDTH)
    needed = 32 << 10
    for budget_bytes in (None, needed, 1000):
        torch.compiler.reset()
        target = zgraph.Target(hardware=zgraph.Hardware.preset("cpu"), budget_bytes=budget_bytes)
        pipeline = zgraph.PassList(zgraph.passes.presets.planned(), target=target)
        options: Any = {"lowering": "fx", "passes": pipeline}
        compiled: Any = torch.compile(served, backend="zgraph", options=options)
        with torch.no_grad():
            if budget_bytes == 1000:
                with pytest.raises(ValueError, match=r"does not fit into budget_bytes=1000\. The smallest budget"):
                    compiled(x)
            else:
                assert torch.equal(compiled(x), plain(x))


@worlds(2)
@pytest.mark.parametrize("tier", ["disk", "host"])
def test_codes_serve_by_a_plan(ranks: Ranks, tier: Any, tmp_path: Path) -> None:
    path = tmp_path if tier == "disk" else None
    ranks.run(check_planned, zgraph.Offload(params=tier, path=path, param_bits=4))


def test_codes_do_not_train(tmp_path: Path) -> None:
    with loopback(1, Wire()):
        served = zgraph.shard(model(), offload=zgraph.Offload(params="disk", path=tmp_path, param_bits=8))
        opt = torch.optim.SGD(served.parameters())

        @zgraph.training_step(served, opt, options={"lowering": "fx"})
        def step(x: Tensor) -> None:
            served(x).sum().backward()
            opt.step()

        for train in (served, torch.compile(served, backend="zgraph", options={"lowering": "fx"}), step):
            with pytest.raises(zgraph.ZgraphError, match=r"param_bits=8: weights are stored as codes.*no_grad\(\)"):
                train(torch.randn(2, WIDTH))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": "host", "param_bits": 2}, "param_bits=2 is not available; write 8, 4 or None"),
        ({"optimizer": "host", "param_bits": 8}, 'parameters stay on the device; write params="host"'),
        ({"params": "host", "optimizer": "host", "param_bits": 8}, "no optimizer can step them"),
        ({"params": "host", "full_precision": ("a",)}, "no parameter is stored as codes; write param_bits=8"),
        ({"params": "host", "param_bits": 8, "full_precision": "a"}, r"write a tuple of patterns, \('a',\)"),
    ],
)
def test_unsupported_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zgraph.Offload(**options)


# Slow: it imports transformers, and compiles for a prompt and for one token.
@pytest.mark.parametrize("bits", [4, *long(8)])
def test_a_language_model_generates_from_codes(tmp_path: Path, bits: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def language() -> Any:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 64, "n_positions": 64}
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0)).eval()

    prompt = torch.randint(0, 64, (1, 5))
    plain: Any = twin(language(), 1, bits)
    expected = plain.generate(prompt, max_new_tokens=6, do_sample=False)
    with loopback(1, Wire()):
        served: Any = zgraph.shard(language(), offload=zgraph.Offload(params="disk", path=tmp_path, param_bits=bits))
        assert torch.equal(served.generate(prompt, max_new_tokens=6, do_sample=False), expected)
        served.forward = torch.compile(served.forward, backend="zgraph", options={"lowering": "fx"}, dynamic=True)
        assert torch.equal(served.generate(prompt, max_new_tokens=6, do_sample=False), expected)


# --- operators that read codes ----------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Rows of whole groups: a table that is looked up and multiplied, a layer whose rows ranks share unevenly, and a
    weight that is multiplied without a transpose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(ODD, 128), nn.Linear(128, ODD)
        self.weight, self.bias = nn.Parameter(torch.randn(ODD, 128) / 8), nn.Parameter(torch.randn(128))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.layer(self.table(ids))).flatten(0, 1)
        return torch.addmm(self.bias, x, self.weight) @ self.table.weight.T  # as Conv1D of GPT-2


def read_codes(zero_stage: int, offload: zgraph.Offload, precision: str, lowering: str, batch: int) -> None:
    torch.compiler.reset()
    dtype, half = torch.bfloat16 if precision == "bf16" else torch.float32, torch.bfloat16
    param_dtype = half if precision == "param_dtype" else None
    served = zgraph.shard(Tied().to(dtype), zero_stage=zero_stage, param_dtype=param_dtype, offload=offload)
    report = zgraph.Report()
    options: Any = {"lowering": lowering, "report": report}
    compiled: Any = torch.compile(served, backend="zgraph", options=options)
    ids = torch.arange(7 * batch).view(batch, 7) % ODD
    world = torch.distributed.get_world_size() if zero_stage else 1
    exact = twin(Tied().to(dtype).float(), world, offload.param_bits or 0).double()  # weights are not rounded
    autocast = torch.autocast("cpu", half) if precision == "autocast" else contextlib.nullcontext()
    with torch.no_grad():
        expected = exact(ids)
        with autocast:
            found, decoded = compiled(ids), served(ids)  # `served` decodes whole weights
        with pytest.raises(IndexError, match=f"in a table of {ODD}"):  # ranks have rows of padding
            compiled(torch.full_like(ids, ODD))
    if precision == "fp32":
        torch.testing.assert_close(found, decoded)
    assert (found - expected).norm() <= 1.1 * (decoded - expected).norm()
    assert found.dtype == decoded.dtype and "read_codes on inference: 4 operators read codes" in report.notes
    in_place = any("bytes of codes are read where they rest" in note for note in report.notes)
    assert in_place == (world == 1 and offload.params == "host"), report.notes


@worlds(1, 2, 3)
@pytest.mark.parametrize(
    ("zero_stage", "tier", "bits", "precision", "lowering", "batch"),
    [
        (3, "disk", 4, "fp32", "fx", 1),
        (0, "host", 8, "fp32", "fx", 10),  # more rows than a fused product takes
        (2, "host", 4, "bf16", "fx", 1),
        (0, "disk", 4, "autocast", "fx", 1),
        (3, "host", 8, "param_dtype", "fx", 1),
        (3, "host", 8, "autocast", "inductor", 1),
        *long((3, "host", 8, "bf16", "inductor", 1), (1, "disk", 4, "fp32", "inductor", 10)),
    ],
)
def test_products_and_lookups_read_codes(
    ranks: Ranks, zero_stage: int, tier: Any, bits: Any, precision: str, lowering: str, batch: int, tmp_path: Path
) -> None:
    offload = zgraph.Offload(params=tier, path=tmp_path if tier == "disk" else None, param_bits=bits)
    ranks.run(read_codes, zero_stage, offload, precision, lowering, batch)
