"""The Python blocks of the README and of the pages in docs/, and what a reader has at hand when they type them."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zgraph
from tests.support import experts, front_ends, models
from tests.support.context import Language as Shared
from tests.support.graphs import fake_world
from tests.support.resting import check_rests
from tests.support.tensor_parallel import Mlp, features
from zgraph.cli.plan import call
from zgraph.torch_compat.fake_values import fake_mode

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
INCLUDED = '--8<-- "examples/'  # the site shows the example, which tests/house/test_examples.py runs
RANKS = 2


class Net(nn.Module):
    """A language model that returns its loss, on the meta device where it is built there."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.trunk = models.Language(layers=1, width=width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.trunk(x).flatten(0, 1).float(), y.flatten())


class Llama(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers import LlamaForCausalLM

        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=labels).loss


class Chunk(nn.Module):
    """A stage of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.timestep = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.timestep(x))


def _tokens() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, models.VOCABULARY, (2, 9))
    return tokens[:, :-1], tokens[:, 1:]


def _mesh() -> Any:
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))


def _unsharded() -> dict[str, Any]:
    x, y = _tokens()
    return {"init_device_mesh": init_device_mesh, "model": Net(), "x": x, "y": y}


def _sharded() -> dict[str, Any]:
    # 80 wide: one of its weights is large enough to be compressed by default.
    model = zgraph.shard(Net(width=80), _mesh())
    opt = torch.optim.AdamW(model.parameters())
    return {"model": model, "opt": opt, "batches": [_tokens() for _ in range(3)], "step": 0}


def _with_a_folder() -> dict[str, Any]:
    Path("scratch").mkdir(exist_ok=True)
    return {"Net": Net, "batches": [_tokens() for _ in range(2)]}


def _with_a_folder_on_a_mesh() -> dict[str, Any]:
    return {**_with_a_folder(), "mesh": _mesh()}


def _with_batches_of_a_site() -> dict[str, Any]:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return {"init_device_mesh": init_device_mesh, "Net": Net, "batches": [_tokens() for _ in range(7)]}


def _equal_sites(names: dict[str, Any]) -> None:
    for parameter in names["model"].parameters():
        first = parameter.full_tensor().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, parameter.full_tensor())
    assert names["outer"].sent_bytes > 0


def _resumed_site(names: dict[str, Any]) -> None:
    assert names["found"].step == 100
    _equal_sites(names)


def _outer_planned(names: dict[str, Any]) -> None:
    assert names["plan"].outer_steps(sites=2, link="100mbit").delay >= 1


def _with_many_batches() -> dict[str, Any]:
    return {"Net": Net, "batches": [_tokens() for _ in range(43)]}


def _training() -> dict[str, Any]:
    given = _sharded()
    given["model"] = torch.compile(given["model"], backend="zgraph")
    given["scheduler"] = torch.optim.lr_scheduler.ConstantLR(given["opt"])

    def train_step(batch: tuple[Tensor, Tensor]) -> None:
        given["model"](*batch).backward()
        given["opt"].step()
        given["opt"].zero_grad()

    train_step(given["batches"][0])
    return given | {"train_step": train_step}


def _sharded_on_gpu() -> dict[str, Any]:
    dist.init_process_group("nccl")
    return {"model": zgraph.shard(Net().cuda(), init_device_mesh("cuda", (1,)))}


def _adversaries() -> dict[str, Any]:
    model: Any = zgraph.shard(nn.ModuleDict({"generator": nn.Linear(4, 3), "critic": nn.Linear(3, 1)}), _mesh())
    opt_d, opt_g = (torch.optim.Adam(part.parameters()) for part in (model.critic, model.generator))
    return {"model": model, "opt_d": opt_d, "opt_g": opt_g, "F": F}


def _llama() -> dict[str, Any]:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {"Llama": Llama, "config": LlamaConfig(vocab_size=64, max_position_embeddings=4096, **sizes)}


def _generating() -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=32, bos_token_id=None)
    config.eos_token_id, config.pad_token_id = None, 0
    Path("scratch").mkdir(exist_ok=True)
    return {"model": GPT2LMHeadModel(config), "prompt": torch.randint(0, 32, (1, 3))}


def _choosing() -> dict[str, Any]:
    """Tokens, two of eight experts for each, and a layer as an expert."""
    Path("scratch").mkdir(exist_ok=True)
    given = {"x": torch.randn(2, 64), "chosen": torch.tensor([[0, 3], [5, 3]]), "shares": torch.rand(2, 2)}
    return given | {"nn": nn, "Expert": partial(nn.Linear, 64, 64)}


def _with_a_batch() -> dict[str, Any]:
    """A model that is not compiled, and a batch."""
    given = _sharded()
    x, y = _tokens()
    return given | {"x": x, "y": y}


def _blocks() -> dict[str, Any]:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    return {"model": model, "mesh": _mesh()}


def _unsharded_on_a_mesh() -> dict[str, Any]:
    return {"model": Net(), "mesh": _mesh()}


def _a_shared_llama() -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
    zgraph.shard(llama, init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "cp")), context="cp")
    return {"llama": llama, "tokens": torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(0))}


def _llama_has_gradients(names: dict[str, Any]) -> None:
    assert all(parameter.grad is not None for parameter in names["llama"].parameters())


def _a_pass() -> dict[str, Any]:
    return {"dataclass": dataclass, "ClassVar": ClassVar, "fx": fx, "changed": False}


def _train(names: dict[str, Any]) -> None:
    """What the block has compiled trains."""
    names["model"](*_tokens()).backward()
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


def _trained(names: dict[str, Any]) -> None:
    assert names["loss"].isfinite()
    assert Path("out/rank0").is_dir()


def _reduced(names: dict[str, Any]) -> None:
    states = [names["opt"].state[parameter] for parameter in names["model"].parameters()]
    assert all(int(state["step"]) == 1 for state in states)


def _with_unequal_loaders() -> dict[str, Any]:
    model = zgraph.shard(nn.Linear(8, 4))
    loader = [torch.randn(4, 8) for _ in range(2 + dist.get_rank())]
    return {"model": model, "opt": torch.optim.AdamW(model.parameters()), "loader": loader, "dist": dist}


def _stepped_on_all(names: dict[str, Any]) -> None:
    (step,) = {int(state["step"]) for state in names["opt"].state.values()}
    assert step == RANKS + 1


def _planned(names: dict[str, Any]) -> None:
    with fake_mode():
        model, inputs = call(names["step"])
    assert isinstance(model, Llama) and len(inputs) == 2


def _sharded_inside(names: dict[str, Any]) -> None:
    weight = names["model"].trunk.blocks[0].qkv.weight
    assert weight.to_local().shape[0] == -(-weight.shape[0] // 4)


def _compressed(names: dict[str, Any]) -> None:
    _train(names)
    sent = [transfer for graph in zgraph.summary(names["model"]).graphs for transfer in graph.transfers]
    assert any("LoCo" in method for transfer in sent for method in transfer.methods)


def _signed(names: dict[str, Any]) -> None:
    assert all(names["step"](*batch).isfinite() for batch in names["batches"])
    assert any(one.from_step == 1000 for one in names["passes"])


def _saved(names: dict[str, Any]) -> None:
    assert names["step"] == 0
    latest = zgraph.latest_checkpoint("runs/a")
    assert latest is not None and zgraph.load_checkpoint(latest, names["model"], names["opt"]).step == 0


def _materialized(names: dict[str, Any]) -> None:
    assert not any(parameter.is_meta for parameter in names["model"].parameters())


def _measured(names: dict[str, Any]) -> None:
    assert "measured" in str(zgraph.explain(names["model"]))


def _counted(names: dict[str, Any]) -> None:
    last = names["metrics"].last
    assert last.step == 3 and last.own["loss"] == float(names["loss"]) and last.sent_bytes > 0
    assert len(list(Path().glob("run-*.jsonl"))) >= 1


def _paused(names: dict[str, Any]) -> None:
    assert isinstance(names["loss"], float)


def _runs_as_a_pass(names: dict[str, Any]) -> None:
    model = torch.compile(nn.Linear(2, 2), backend="zgraph", options={"passes": names["pipeline"]})
    model(torch.ones(1, 2)).sum().backward()


def _exported(names: dict[str, Any]) -> None:
    assert names["largest"] in names["network"]
    assert Path("forward.graphml").is_file() and Path("backward.graphml").is_file()


def _nothing(names: dict[str, Any]) -> None:
    pass


def _stepped(names: dict[str, Any]) -> None:
    assert all(parameter in names["opt"].state for parameter in names["model"].parameters())


def _at_rest(names: dict[str, Any]) -> None:
    assert names["offload"].update == "device"
    check_rests(names["model"], [])


def _a_pipeline() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("pp", "dp"))
    chunk = zgraph.shard(Chunk(), mesh["dp"])
    stage = PipelineStage(chunk, dist.get_rank(), RANKS, torch.device("cpu"), group=mesh["pp"].get_group())
    parameters = list(chunk.parameters())
    return {
        "mesh": mesh,
        "chunks": [chunk],
        "schedule": ScheduleGPipe(stage, 2, loss_fn=F.mse_loss),
        "parameters": parameters,
        "optimizer": torch.optim.AdamW(parameters),
        "batches": [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(3)],
    }


def _mlp_blocks() -> dict[str, Any]:
    class Blocks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Mlp() for _ in range(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](x)

    names = {"ColwiseParallel": ColwiseParallel, "RowwiseParallel": RowwiseParallel, "make_model": Blocks}
    return names | {"parallelize_module": parallelize_module, "batch": lambda: (torch.zeros(4, 6),)}


def _waited_for(names: dict[str, Any]) -> None:
    assert names["found"].traffic["tp"].sent_bytes > 0


def _layers() -> dict[str, Any]:
    return {
        "nn": nn,
        "embed": lambda: nn.Embedding(8, 16),
        "block": lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()),
        "head": lambda: nn.Linear(16, 8),
    }


def _kept(names: dict[str, Any]) -> None:
    stages = names["found"].pipeline.stages
    assert names["room"] == [stage.stage_3_bytes for stage in stages] and all(names["room"])


def _split(names: dict[str, Any]) -> None:
    assert sum(map(len, names["stages"])) == 8


def _an_mlp() -> dict[str, Any]:
    names = {"dp": 1, "tp": RANKS, "ColwiseParallel": ColwiseParallel, "RowwiseParallel": RowwiseParallel}
    return names | {"init_device_mesh": init_device_mesh, "parallelize_module": parallelize_module, "model": Mlp()}


def _mlp_trained(names: dict[str, Any]) -> None:
    inputs, target = features(0, 0)
    (names["model"](inputs) - target).square().mean().backward()
    names["opt"].step()
    assert all(parameter in names["opt"].state for parameter in names["model"].parameters())


def _a_mixture() -> dict[str, Any]:
    model = experts.Mixture()
    model.experts.group = dist.group.WORLD
    names = {"init_device_mesh": init_device_mesh, "distribute_tensor": distribute_tensor, "Shard": Shard}
    return names | {"model": model, "dp": 1, "ep": RANKS, "nn": nn}


def _mixture_trained(names: dict[str, Any]) -> None:
    experts.loss_of(names["model"](experts.tokens_of(dist.get_rank(), 0))).backward()
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


def _a_chunk() -> dict[str, Any]:
    """What one of two stages begins with."""
    return {
        "mesh": init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("pp", "dp")),
        "chunk": Chunk(),
        "index": dist.get_rank(),
        "count": RANKS,
        "device": torch.device("cpu"),
        "Schedule1F1B": Schedule1F1B,
        "loss_fn": F.mse_loss,
        "nn": nn,
        "batches": [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(2)],
    }


def _chunk_stepped(names: dict[str, Any]) -> None:
    states = names["optimizer"].state
    assert all(int(states[parameter]["step"]) == 2 for parameter in names["chunk"].parameters())


def _stage_saved(names: dict[str, Any]) -> None:
    assert zgraph.load_checkpoint("runs/a/step_00000002", names["model"], names["optimizer"]).step == 2


def _equal_replicas(names: dict[str, Any]) -> None:
    names["replicas"].check_equal()
    assert all(len(names["optimizer"].state[parameter]) for parameter in names["parameters"])


def _dropped(names: dict[str, Any]) -> None:
    assert names["drop"].step == len(names["batches"])
    assert all(int(state["step"]) >= 1 for state in names["opt"].state.values())


def _packed(names: dict[str, Any]) -> None:
    if "step" not in names:
        names["model"](*_tokens()).backward()
        names["opt"].step()
    assert {tuple(state) for state in names["opt"].state.values()} == {("step", "packed")}
    assert {one.dtype for one in names["model"].parameters()} == {torch.bfloat16}


def _with_eight_bits() -> dict[str, Any]:
    mesh = _mesh()
    model = zgraph.shard(Net().bfloat16(), mesh)
    names = {"model": model, "opt": zgraph.AdamW8bit(model.parameters()), "Net": Net, "mesh": mesh}
    _packed(names)
    return names


def _unpacked(names: dict[str, Any]) -> None:
    moments = [value for state in names["adamw"].state.values() for key, value in state.items() if key != "step"]
    assert {value.dtype for value in moments} == {torch.float32} and len(moments) == 2 * len(names["weights"])
    for parameter, whole in zip(names["model"].parameters(), names["weights"], strict=True):
        assert parameter.dtype == torch.float32 and torch.equal(parameter.to_local(), whole.to_local())


def _stepped_whole(names: dict[str, Any]) -> None:
    assert names["metrics"]["loss"].isfinite()
    assert all(int(state["step"]) == len(names["batches"]) for state in names["opt"].state.values())


def _interleaved(names: dict[str, Any]) -> None:
    assert names["step"](names["batches"]).isfinite()
    assert "3 micro-batches run each of" in str(zgraph.explain(names["model"]))


def _muon_stepped(names: dict[str, Any]) -> None:
    before = [one.full_tensor().clone() for one in names["hidden"]]
    assert len(before) > 2
    names["step"](*names["batches"][0])
    assert all(not torch.equal(one.full_tensor(), old) for one, old in zip(names["hidden"], before, strict=True))


def _both_stepped(names: dict[str, Any]) -> None:
    for _ in range(2):
        assert all(loss.isfinite() for loss in names["step"](torch.ones(2, 3), torch.ones(2, 4)))
    for optimizer in (names["opt_d"], names["opt_g"]):
        assert all(int(state["step"]) == 2 for state in optimizer.state.values())


def _generated(names: dict[str, Any]) -> None:
    assert names["tokens"].shape == (1, 3 + 6)


def _generated_between_steps(names: dict[str, Any]) -> None:
    _generated(names)
    assert all(one.grad is not None and one.grad.isfinite().all() for one in names["model"].parameters())


def _computed(names: dict[str, Any]) -> None:
    assert names["logits"].isfinite().all()


def _as_uncompiled(names: dict[str, Any]) -> None:
    """The compiled experts compute as uncompiled ones, which decode whole weights."""
    experts, x, chosen, shares = (names[name] for name in ("experts", "x", "chosen", "shares"))
    for expert in experts:
        expert._compiled_call_impl = None
    with torch.no_grad():
        torch.testing.assert_close(names["found"], experts(x, chosen, shares))


def _summarized(names: dict[str, Any]) -> None:
    assert zgraph.summary(names["model"]).step_bytes > 0


def _two_stages(names: dict[str, Any]) -> None:
    norm, rest = names["model"].trunk.norm.weight, names["model"].trunk.blocks[0].qkv.weight
    assert norm.to_local().shape == norm.shape
    assert rest.to_local().shape[0] < rest.shape[0]


def _chosen(names: dict[str, Any]) -> None:
    assert names["chosen"] in names["pipeline"].passes


def _loaded(names: dict[str, Any]) -> None:
    for key, stored in names["state"]["model"].items():
        assert torch.equal(stored.to_local(), names["model"].state_dict()[key].to_local())


def _saved_by_fsdp2() -> dict[str, Any]:
    """A model and a mesh, and in runs/fsdp2 a checkpoint of the model after a step with FSDP2."""
    trained, mesh = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5)), _mesh()
    model = copy.deepcopy(trained)
    fully_shard(trained, mesh=mesh)
    opt = torch.optim.AdamW(trained.parameters())
    trained(torch.randn(4, 6)).square().mean().backward()
    opt.step()
    state, optimizer_state = get_state_dict(trained, opt)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id="runs/fsdp2")
    return {"model": model, "mesh": mesh, "trained": trained}


def _loaded_from_fsdp2(names: dict[str, Any]) -> None:
    stored = names["trained"].state_dict()
    loaded = names["model"].state_dict()
    assert all(torch.equal(value.full_tensor(), loaded[key].full_tensor()) for key, value in stored.items())
    assert all(int(names["opt"].state[parameter]["step"]) == 1 for parameter in names["model"].parameters())
    names["model"](torch.randn(4, 6)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


def _gathered(names: dict[str, Any]) -> None:
    assert Path("model.pt").exists() or not names["full"]


def _reduced_on_gpu(names: dict[str, Any]) -> None:
    assert all(parameter.grad is not None and parameter.is_cuda for parameter in names["model"].parameters())


def _replayed(names: dict[str, Any]) -> None:
    batch = [tokens.cuda() for tokens in _tokens()]
    losses = [float(names["step"](*batch)) for _ in range(8)]
    assert losses == sorted(losses, reverse=True)


def _is_fsdp(names: dict[str, Any]) -> None:
    from torch.distributed.fsdp import FSDPModule

    assert all(isinstance(block, FSDPModule) for block in names["model"].blocks)


@dataclass(frozen=True)
class Setting:
    """Where a block is run.

    Attributes:
        begins: the block, by its first line.
        given: makes the names that the text around it takes for granted. None: it goes on where the block before it
            on the page has ended.
        check: of what the block has made.
        on: "ranks": on two real ones; "one process"; "eight ranks" that are not there; "a GPU": one rank of NCCL.
    """

    begins: str
    given: Callable[[], dict[str, Any]] | None
    check: Callable[[dict[str, Any]], None]
    on: str = "ranks"


SETTINGS = [
    Setting("import torch, zgraph\nfrom torch.distributed.device_mesh import init_device_mesh", _unsharded, _trained),
    # getting-started.md
    Setting("import torch\nfrom torch import nn", dict, _stepped),
    Setting("model.eval()", None, _gathered),
    Setting("zgraph.step_on_shards(opt)", None, _stepped),
    Setting("print(zgraph.summary(model))", None, _summarized),
    Setting("import os\nimport torch.distributed as dist", _unsharded, _reduced_on_gpu, on="a GPU"),
    # sharding.md
    Setting("zgraph.shard(model.trunk.norm, mesh, zero_stage=0)", _unsharded_on_a_mesh, _two_stages),
    Setting("for x, y in batches[:-1]:", _sharded, _reduced),
    Setting('mesh  = init_device_mesh("cpu", (2, 4)', _unsharded, _sharded_inside, on="eight ranks"),
    Setting('with torch.device("meta"):', lambda: {"Net": models.Attending, "mesh": _mesh()}, _materialized),
    Setting("scaler = zgraph.GradScaler", _with_a_batch, _reduced),
    Setting('replicas = zgraph.Replicas(mesh["pp"]', _a_pipeline, _equal_replicas),
    # context-parallel.md
    Setting(
        'mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))',
        lambda: {"Net": Shared, "init_device_mesh": init_device_mesh},
        _reduced,
    ),
    Setting('batch = zgraph.context_batch(llama, {"input_ids"', _a_shared_llama, _llama_has_gradients),
    # layer-drop.md
    Setting("drop = zgraph.LayerDrop(model.trunk.blocks", _sharded, _dropped),
    Setting('path = zgraph.save_checkpoint("runs/a", model, opt, step=drop.step', None, _dropped),
    # ranks-that-differ.md
    Setting(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.embed, self.vision",
        lambda: {"dist": dist, "nn": nn, "mesh": _mesh()},
        _reduced,
    ),
    Setting("spare, batches = ", _with_unequal_loaders, _stepped_on_all),
    # several-dimensions.md
    Setting('mesh = init_device_mesh("cpu", (dp, tp)', _an_mlp, _mlp_trained),
    Setting('mesh = init_device_mesh("cpu", (dp, ep)', _a_mixture, _mixture_trained),
    Setting('zgraph.shard(chunk, mesh["dp"], zero_stage=1)', _a_chunk, _chunk_stepped),
    Setting("model = nn.ModuleDict({str(index): chunk})", None, _stage_saved),
    # training-step.md
    Setting("@zgraph.training_step(model, opt,", _sharded, _stepped_whole),
    Setting("passes = zgraph.passes.presets.default(interleave", _sharded, _interleaved),
    Setting("hidden = [p for name, p in model.named_parameters()", _sharded, _muon_stepped),
    Setting("@zgraph.training_step(model, [opt_d", _adversaries, _both_stepped),
    Setting("opt = torch.optim.AdamW(model.parameters(), lr=torch.tensor(", _sharded_on_gpu, _replayed, on="a GPU"),
    # compression.md
    Setting("P      = zgraph.passes\npasses", _sharded, _compressed),
    Setting("P      = zgraph.passes\nchosen", dict, _chosen, on="one process"),
    Setting("opt    = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)\npasses", _sharded, _signed),
    # checkpoints.md
    Setting('latest = zgraph.latest_checkpoint("runs/a")', _training, _saved),
    Setting("import torch.distributed.checkpoint as dcp", None, _loaded),
    Setting("from torch.distributed.checkpoint.state_dict import", _saved_by_fsdp2, _loaded_from_fsdp2),
    Setting("full = zgraph.full_state_dict(model)", _training, _gathered),
    # offload.md
    Setting("hardware = zgraph.calibrate()", _sharded, _train),
    Setting('offload = zgraph.Offload(params="host", optimizer="disk"', _with_a_folder, _stepped),
    Setting('offload = zgraph.Offload(params="host", optimizer="host", update="device")', _with_a_folder, _at_rest),
    # inference.md
    Setting("model = zgraph.shard(model.eval(), offload=", _generating, _generated),
    Setting('offload = zgraph.Offload(params="disk", path="scratch", param_bits', _generating, _computed),
    Setting("class Experts(nn.ModuleList):", _choosing, _as_uncompiled),
    Setting("model = zgraph.shard(model, zero_stage=3)\nmodel.forward", _generating, _generated_between_steps),
    # adamw-8bit.md
    Setting("model = zgraph.shard(model.bfloat16()", _unsharded_on_a_mesh, _packed),
    Setting('offload = zgraph.Offload(params="disk", optimizer="disk"', _with_a_folder_on_a_mesh, _packed),
    Setting("state   = opt.unpacked_state_dict()", _with_eight_bits, _unpacked),
    # slow-links.md
    Setting('mesh  = init_device_mesh("cpu", (2, 1)', _with_batches_of_a_site, _equal_sites),
    Setting("place = f", None, _resumed_site),
    Setting("plan = zgraph.plan(Net, world_size=1", _with_batches_of_a_site, _outer_planned, on="one process"),
    # planning.md
    Setting("def batch():", _llama, _nothing, on="one process"),
    Setting("def shard(model, mesh):", _mlp_blocks, _waited_for, on="one process"),
    Setting("layers = lambda: nn.Sequential(embed()", _layers, _split, on="one process"),
    Setting("target   = zgraph.Target(hardware=zgraph.Hardware.preset", None, _kept, on="one process"),
    Setting("target   = zgraph.Target(hardware=zgraph.calibrate", _sharded, _train),
    Setting("with zgraph.measure(model):", _training, _measured),
    # metrics.md
    Setting("metrics = zgraph.Metrics(model", _training, _counted),
    Setting("with metrics.pause():", None, _paused),
    # command-line.md
    Setting("def step():", _llama, _planned, on="one process"),
    # inductor.md
    Setting('model = torch.compile(model, backend="zgraph", options={"lowering": "fx"})', _sharded, _train),
    # migrating.md
    Setting("from torch.distributed.fsdp import", _blocks, _is_fsdp),
    Setting("model = zgraph.shard(model, mesh, param_dtype=", _unsharded_on_a_mesh, _train),
    # front-ends.md
    Setting(
        "from zgraph.integrations.accelerate", front_ends.script_of_accelerate, front_ends.accumulates, on="one process"
    ),
    Setting(
        "from zgraph.integrations.transformers", front_ends.arguments_of_trainer, front_ends.trains, on="one process"
    ),
    Setting(
        "from zgraph.integrations.lightning",
        front_ends.lightning_at_hand,
        front_ends.strategy_is_ours,
        on="one process",
    ),
    Setting("from lightning.fabric.strategies import", front_ends.fabric_at_hand, front_ends.fabric_trained),
    Setting("# meta, shard, to_empty, init", front_ends.meta_at_hand, front_ends.meta_trained),
    # read-a-dump.md
    Setting("import networkx", _unsharded, _exported, on="one process"),
    # write-a-pass.md
    Setting("@dataclass(frozen=True, kw_only=True)", _a_pass, _runs_as_a_pass, on="one process"),
]


@dataclass(frozen=True)
class Story:
    """Blocks of a page that run one after the other, with the names of those before.

    Attributes:
        page: its name, as "docs/sharding.md".
        blocks: the first makes its own start.
    """

    page: str
    blocks: tuple[str, ...]

    @property
    def on(self) -> str:
        return setting_of(self.blocks[0]).on


def blocks_of(page: Path) -> list[str]:
    """The Python blocks of a page, without those that show an example."""
    return [block for block in BLOCK.findall(page.read_text()) if not block.startswith(INCLUDED)]


def settings_of(block: str) -> list[Setting]:
    return [one for one in SETTINGS if block.startswith(one.begins)]


def setting_of(block: str) -> Setting:
    (setting,) = settings_of(block)
    return setting


def stories() -> list[Story]:
    """All blocks, those that go on behind the one that they go on from. A block that several pages show runs once."""
    found: dict[tuple[str, ...], str] = {}
    for page in PAGES:
        told: list[tuple[str, ...]] = []
        for block in blocks_of(page):
            if len(settings_of(block)) != 1:
                continue  # a test of its own complains
            if setting_of(block).given is None:
                told[-1] = (*told[-1], block)
            else:
                told.append((block,))
        for blocks in told:
            found.setdefault(blocks, str(page.relative_to(ROOT)))
    return [Story(page, blocks) for blocks, page in found.items()]


def run_story(story: Story, directory: str) -> None:
    """Run blocks as they are printed, in a directory of their own, and look at what they have made."""
    with contextlib.chdir(directory), fake_world(8) if story.on == "eight ranks" else contextlib.nullcontext():
        names: dict[str, Any] = {"torch": torch, "zgraph": zgraph}
        for block in story.blocks:
            setting = setting_of(block)
            names |= {} if setting.given is None else setting.given()
            exec(compile(block, f"a block of {story.page}", "exec"), names)
            setting.check(names)
