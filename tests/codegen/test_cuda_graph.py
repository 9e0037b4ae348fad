"""Steps that are recorded and replayed, by a recorder that does on the CPU what CUDA graphs do on a GPU."""

from __future__ import annotations

import contextlib
import copy
import itertools
import types
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, optim
from torch.distributed.tensor import DTensor

import zgraph
from tests.support.ranks import Ranks, worlds
from tests.support.step_scripts import LR, Net, Script, Setting, compare
from tests.support.whole_tensors import whole
from zgraph.codegen.cuda_graph import (
    MOST_CHANGES,
    WARM_UP_CALLS,
    CudaGraphs,
    Program,
    RecordError,
    Recording,
)
from zgraph.torch_compat.dtensor import local_of


@dataclass
class Tape:
    """Records without leaving a trace, and replays on the very memory that was recorded."""

    calls: list[str] = field(default_factory=list[str])
    has_failed: bool = False

    def check(self, gm: fx.GraphModule, resident: int) -> None:
        self.calls.append("check")

    def warm_up(self, program: Program, inputs: list[Any]) -> Any:
        self.calls.append("warm up")
        return program(inputs)

    def record(self, program: Program, inputs: list[Any]) -> Recording:
        self.calls.append("record")
        kept, tensors = list(inputs), [value for value in inputs if isinstance(value, Tensor)]
        before, random = [tensor.clone() for tensor in tensors], torch.get_rng_state()
        outputs = program(inputs)
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        torch.set_rng_state(random)
        for output in outputs:
            if isinstance(output, Tensor) and all(output.data_ptr() != tensor.data_ptr() for tensor in tensors):
                output.fill_(torch.nan)  # nothing was computed

        def replay() -> None:
            self.calls.append("replay")
            for output, value in zip(outputs, program(list(kept)), strict=True):
                if isinstance(output, Tensor):
                    output.copy_(value)

        return Recording(replay, outputs)


WARM_UP, RECORD, REPLAY = ["warm up"] * WARM_UP_CALLS, ["record", "replay"], ["replay"]
STEPS = 10  # the first makes the optimizer's state, and is another graph


def sgd(groups: Any) -> optim.Optimizer:
    return optim.SGD(groups, lr=LR, momentum=0.9, foreach=True)


def adamw_fused(groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups, lr=LR, fused=True)


def with_tensor(groups: Any) -> optim.Optimizer:
    """Its learning rate may change without another recording."""
    groups = [{**group, "lr": torch.tensor(LR * (1 + place))} for place, group in enumerate(groups)]
    return optim.AdamW(groups, lr=torch.tensor(LR), fused=True)


class Lines(Script):
    """Clips, leaves gradients behind, and changes something once."""

    changed_after = 6

    def step(self, x: Tensor) -> Any:
        self.opt.zero_grad()
        loss = self.loss(x)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.opt.step()
        return {"loss": loss.detach(), "norm": norm, "lr": self.opt.param_groups[0]["lr"]}

    def advance(self, number: int) -> None:
        if number == self.changed_after:
            self.change()

    def change(self) -> None:
        """What happens after that step."""


class Rated(Lines):
    def change(self) -> None:
        for group in self.opt.param_groups:
            group["lr"] = group["lr"] * 0.5


class Loaded(Lines):
    """Takes other tensors for the optimizer's state."""

    def change(self) -> None:
        self.opt.load_state_dict(copy.deepcopy(self.opt.state_dict()))


class Written(Lines):
    """In place, which a recording reads."""

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                local_of(cast(DTensor, parameter)).mul_(0.5)


class Shaped(Lines):
    """Two kinds of calls that take turns."""

    def arguments(self, number: int) -> tuple[Any, ...]:
        (x,) = super().arguments(number)
        return (x[: 4 - number % 2],)


class Drawing(Lines):
    def loss(self, x: Tensor) -> Tensor:
        return super().loss(torch.dropout(x, 0.5, train=True))


class Windowed(Lines):
    def step(self, x: Tensor) -> Any:
        self.opt.zero_grad()
        with zgraph.no_sync(self.model):
            self.loss(x * 0.5).backward()
        loss = self.loss(x)
        loss.backward()
        self.opt.step()
        return {"loss": loss.detach()}


class Shown(Lines):
    """Returns what it has updated, which lies where it lay."""

    def step(self, x: Tensor) -> Any:
        return super().step(x) | {"gain": self.model.gain.detach()}


def calls_of(setting: Setting) -> list[str]:
    """Compare a script with its plain loop; what was asked of the recorder."""
    tape = Tape()
    compare(replace(setting, recorder=lambda: tape))
    return tape.calls


RECORDED = Setting(Lines, adamw_fused, steps=STEPS)
ONCE = ["check", *WARM_UP, *RECORD, *REPLAY * (STEPS - 1 - WARM_UP_CALLS)]


@worlds(2)
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(RECORDED, id="stage 3"),
        pytest.param(replace(RECORDED, script=Rated, make=with_tensor), id="tensor lr"),
        *(pytest.param(replace(RECORDED, stage=stage), id=f"stage {stage}") for stage in (0, 1, 2)),
        pytest.param(replace(RECORDED, make=sgd), id="sgd"),
        pytest.param(replace(RECORDED, script=Written), id="written"),
        pytest.param(replace(RECORDED, script=Drawing, stage=2), id="dropout"),
        pytest.param(replace(RECORDED, script=Windowed, stage=1), id="no_sync"),
        pytest.param(replace(RECORDED, script=Shown), id="views"),
    ],
)
def test_a_step_is_recorded_once_and_replayed(ranks: Ranks, setting: Setting) -> None:
    makes_state = setting.make is sgd  # in a first step that is not recorded
    for calls in ranks.run(calls_of, setting):
        assert calls == ONCE[: len(ONCE) - makes_state]


@worlds(2)
@pytest.mark.parametrize("script", [Rated, Loaded])
def test_a_step_is_recorded_again_when_numbers_or_addresses_change(ranks: Ranks, script: type[Script]) -> None:
    replayed = Lines.changed_after - WARM_UP_CALLS
    again = STEPS - Lines.changed_after - 1
    for calls in ranks.run(calls_of, replace(RECORDED, script=script)):
        assert calls == ["check", *WARM_UP, *RECORD, *REPLAY * replayed, *WARM_UP[:again]]


@worlds(2)
def test_each_kind_of_call_has_a_recording(ranks: Ranks) -> None:
    for calls in ranks.run(calls_of, replace(RECORDED, script=Shaped, steps=2 * STEPS)):
        assert calls.count("check") == calls.count("record") == 2
        assert calls.count("replay") == 2 * (STEPS - WARM_UP_CALLS)


class Falling(Lines):
    """Another learning rate in each step."""

    def advance(self, number: int) -> None:
        for group in self.opt.param_groups:
            group["lr"] = group["lr"] * 0.9


def refused_for(script: type[Script]) -> str:
    with pytest.raises(zgraph.ZgraphError) as caught:
        compare(Setting(script, adamw_fused, steps=2 * MOST_CHANGES, recorder=Tape))
    return str(caught.value)


@worlds(2)
def test_numbers_that_never_stay_are_refused(ranks: Ranks) -> None:
    for message in ranks.run(refused_for, Falling):
        assert message.startswith(f"zgraph.training_step: lr_0 has another value in each of {MOST_CHANGES} calls")
        assert 'lr=torch.tensor(1e-3, device="cuda")' in message


class Replaced(Lines):
    """A tensor from outside that is another one in each step."""

    def prepare(self) -> None:
        self.kept: list[Tensor] = []
        self.noise = torch.zeros(())

    def step(self, x: Tensor) -> Any:
        return super().step(x + self.noise)

    def advance(self, number: int) -> None:
        self.kept.append(self.noise)
        self.noise = torch.full((), float(number))


@worlds(2)
def test_tensors_that_never_stay_are_refused(ranks: Ranks) -> None:
    for message in ranks.run(refused_for, Replaced):
        assert f"noise has moved in each of {MOST_CHANGES} calls" in message
        assert "pass it to the step as an argument" in message


def overwritten() -> int:
    """How many results and gradients of recorded steps a later step has changed."""
    setting = Setting(Lines, adamw_fused)
    script = Lines(setting)
    options = zgraph.driver.options.CompileOptions(lowering="fx")
    step: Any = zgraph.step.training_step.TrainingStep(script.step, script.model, [script.opt], options, 8, Tape())
    held: list[tuple[Tensor, Tensor]] = []
    for number in range(STEPS):
        found = [step(*script.arguments(number))["loss"]]
        found += [local_of(cast(DTensor, parameter.grad)) for parameter in script.model.parameters()]
        held += [(tensor, tensor.clone()) for tensor in found]
    return sum(not torch.equal(tensor, value) for tensor, value in held)


@worlds(2)
def test_returned_tensors_are_not_overwritten(ranks: Ranks) -> None:
    assert ranks.run(overwritten) == [0, 0]


def measured() -> list[str]:
    """What was asked of the recorder while a step was measured."""
    setting, tape = Setting(Lines, adamw_fused), Tape()
    script = Lines(setting)
    options = zgraph.driver.options.CompileOptions(lowering="fx")
    step: Any = zgraph.step.training_step.TrainingStep(script.step, script.model, [script.opt], options, 8, tape)
    for number in range(STEPS):
        step(*script.arguments(number))
    tape.calls.clear()
    before = whole(script.model.gain.detach()).clone()
    with zgraph.measure(script.model):
        step(*script.arguments(STEPS))
    assert not torch.equal(whole(script.model.gain.detach()), before)
    return tape.calls


@worlds(2)
def test_a_measured_step_runs_operator_by_operator(ranks: Ranks) -> None:
    assert ranks.run(measured) == [[], []]


# --- what cannot be recorded ------------------------------------------------------------------------------------------


@dataclass
class Torn(Tape):
    """A tape that tears at its n-th record, when the host has run the program for nothing."""

    at: int = 1

    def record(self, program: Program, inputs: list[Any]) -> Recording:
        recording = super().record(program, inputs)
        if self.calls.count("record") == self.at:
            raise RecordError("zgraph.training_step: the step cannot be recorded as a CUDA graph: torn.")
        return recording


def calls_of_torn(setting: Setting, at: int) -> tuple[list[str], list[str]]:
    """What was asked of a recorder that fails, in a step that equals its plain loop; and the warnings."""
    tape = Torn(at=at)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(replace(setting, recorder=lambda: tape))
    return tape.calls, [str(each.message) for each in caught if each.category is zgraph.ZgraphWarning]


@worlds(2)
def test_unrecordable_step_runs_unrecorded_and_warns_once(ranks: Ranks) -> None:
    for calls, said in ranks.run(calls_of_torn, replace(RECORDED, script=Drawing), 1):
        assert calls == ["check", *WARM_UP, "record"]
        assert said == ["zgraph.training_step: the step cannot be recorded as a CUDA graph: torn."]


@worlds(2)
def test_earlier_recordings_are_not_replayed_after_a_failure(ranks: Ranks) -> None:
    """A failed record replaces the generator that the other recordings draw from."""
    for calls, said in ranks.run(calls_of_torn, replace(RECORDED, script=Shaped, steps=2 * STEPS), 2):
        assert calls[-1] == "record" and calls.count("record") == 2 and len(said) == 1


class Capturing:
    """Stands for torch.cuda: what was captured into which pool, and the current stream."""

    def __init__(self) -> None:
        self.current, self.pools, self.fails = "main", [], False
        self.drawn: list[str] = []
        self.streams: list[str] = []  # that were recorded

    def graph(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Any:
        @contextlib.contextmanager
        def capture() -> Any:
            self.pools.append(pool)
            self.streams.append(stream)
            self.current = stream
            yield
            if self.fails:  # as in torch, before the stream is set back
                raise RuntimeError("operation failed due to a previous error during capture")
            self.current = "main"

        return capture()


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Capturing:
    found, handles, sides = Capturing(), itertools.count(), itertools.count()

    class Graph:
        def replay(self) -> None: ...

    class Stream(str):
        device = torch.device("cuda", 0)

        def wait_stream(self, other: Stream) -> None: ...

    @contextlib.contextmanager
    def on_stream(stream: Stream) -> Any:
        before, found.current = found.current, str(stream)
        yield
        found.current = before

    generator = types.SimpleNamespace(clone_state=lambda: "clone", graphsafe_set_state=found.drawn.append)
    main = Stream("main")
    fakes = {
        "Stream": lambda: Stream(f"side {next(sides)}"),
        "stream": on_stream,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: next(handles),
        "graph": found.graph,
        "current_stream": lambda: main,
        "set_stream": lambda stream: setattr(found, "current", str(stream)),
        "synchronize": lambda: None,
        "default_generators": (generator,),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return found


def test_pool_is_released_with_its_last_recording(capturing: Capturing) -> None:
    recorder = CudaGraphs()
    first = recorder.record(lambda inputs: [], [])
    second = recorder.record(lambda inputs: [], [])
    assert capturing.pools == [0, 0]
    del first
    third = recorder.record(lambda inputs: [], [])
    assert capturing.pools == [0, 0, 0]
    del second, third
    recorder.record(lambda inputs: [], [])
    assert capturing.pools == [0, 0, 0, 1]


def test_a_recorded_stream_runs_nothing_else(capturing: Capturing) -> None:
    """A cuBLAS workspace of another program's or pool's could be freed under the recording."""
    recorder = CudaGraphs()
    warmed = [recorder.warm_up(lambda inputs: capturing.current, []) for _ in range(2)]
    kept = [recorder.record(lambda inputs: [], []) for _ in range(2)]
    assert len({*warmed, *capturing.streams, "main"}) == 3
    kept.clear()
    recorder.record(lambda inputs: [], [])
    assert len({*warmed, *capturing.streams, "main"}) == 4


def test_a_failed_capture_gives_stream_and_generator_back(capturing: Capturing) -> None:
    capturing.fails = True
    with pytest.raises(
        RecordError, match=r"^zgraph\.training_step: .* previous error during capture\. Training continues without"
    ):
        CudaGraphs().record(lambda inputs: [], [])
    assert (capturing.current, capturing.drawn) == ("main", ["clone"])


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_model_on_the_host_is_refused() -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"cuda_graph=True needs a model on a GPU, .* are on cpu; move it before"):
        zgraph.training_step(model, sgd(model.parameters()), options={"cuda_graph": True})


def test_forward_and_backward_alone_are_refused() -> None:
    compiled = torch.compile(Net(), backend="zgraph", options={"cuda_graph": True})
    with pytest.raises(Exception, match=r"cuda_graph requires a whole step.*Write @zgraph\.training_step\(model, opt"):
        compiled(torch.ones(1, 5))
