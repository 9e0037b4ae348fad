"""The pipeline: contracts before anything runs, truthful passes, order of phases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

from tests.support.graphs import compile_model, fake_world, mlp, traced
from zgraph import Fact, GraphPass, PassContext, PassList, PreconditionError, Report, VerifyError
from zgraph.compiler.graph_pass import Phase
from zgraph.graph import meta
from zgraph.passes import (
    ChooseLifetimes,
    DedupeGathers,
    LoCo,
    LowerGathers,
    NoFeedback,
    SinkWaits,
    presets,
)

aten = torch.ops.aten


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2):
        yield


@dataclass(frozen=True, kw_only=True)
class Answer(GraphPass):
    """Returns what it is told, and renames nothing, unless asked to add a node."""

    answer: Any = False
    adds: bool = False
    name: ClassVar[str] = "answer"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if self.adds:
            value = next(node for node in gm.graph.nodes if node.op == "call_function")
            with gm.graph.inserting_after(value):
                meta.create(gm.graph, aten.clone.default, (value,))
        return self.answer


@dataclass(frozen=True, kw_only=True)
class Early(GraphPass):
    """A pass of the joint phase that provides a fact of its own."""

    name: ClassVar[str] = "early"
    phase: ClassVar[Phase] = "joint"
    provides: ClassVar[frozenset[str]] = frozenset({"my_own_fact"})

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class NeedsEarly(GraphPass):
    name: ClassVar[str] = "needs_early"
    requires: ClassVar[frozenset[str]] = frozenset({"my_own_fact"})

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        return False


def run(*passes: GraphPass) -> list[Any]:
    found = traced(mlp)
    return list(PassList(passes).run("graph", found.ctx, found.graphs, lambda *_: None))


def test_a_missing_requirement_names_the_pass_that_could_provide_it() -> None:
    with pytest.raises(PreconditionError) as error:
        PassList([SinkWaits()])
    assert str(error.value) == (
        "sink_waits requires gathers_lowered, reductions_lowered, which no earlier pass provides; add the pass that "
        "provides gathers_lowered before it (zgraph.passes.presets.default() lists them all)."
    )


def test_a_requirement_provided_too_late_says_what_to_move() -> None:
    passes = presets.default()
    lower = next(entry for entry in passes if isinstance(entry, LowerGathers))
    passes.remove(lower)
    with pytest.raises(PreconditionError) as error:
        PassList([*passes, lower])
    assert str(error.value) == (
        "bucket_collectives requires gathers_lowered, which no earlier pass provides; move lower_gathers, which does, "
        "before it."
    )


def test_a_conflict_names_both_passes() -> None:
    passes = presets.default()
    with pytest.raises(PreconditionError) as error:
        PassList([*passes, next(entry for entry in passes if entry.name == "bucket_collectives")])
    assert str(error.value).startswith("bucket_collectives cannot run after ")
    assert "put bucket_collectives before it." in str(error.value)


def test_pipeline_refuses_a_non_list() -> None:
    with pytest.raises(
        ValueError, match=r"'default' is not a list of passes; .*call the preset: zgraph\.passes\.presets"
    ):
        PassList(presets.default)  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", [SinkWaits, "sink_waits", None])
def test_an_entry_that_is_no_pass_is_refused(entry: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a pass; list instances of zgraph.GraphPass, such as SinkWaits\(\)\."):
        PassList([entry])


def test_joint_passes_come_first_whatever_their_place_in_the_list() -> None:
    assert PassList([NeedsEarly(), Early()]).passes == (NeedsEarly(), Early())
    pipeline = PassList([LowerGathers(), ChooseLifetimes(), NeedsEarly(), DedupeGathers(), Early()][::-1])
    assert [entry.name for entry in pipeline.of("joint")] == ["early", "dedupe_gathers", "choose_lifetimes"]
    assert [entry.name for entry in pipeline.of("graph")] == ["needs_early", "lower_gathers"]


def test_order_within_a_phase_is_the_lists() -> None:
    with pytest.raises(PreconditionError, match=r"requires gathers_deduped, .* move dedupe_gathers, which does,"):
        PassList([ChooseLifetimes(), DedupeGathers()])


@pytest.mark.usefixtures("world")
def test_a_users_own_pass_runs_on_every_graph() -> None:
    report = Report()
    compile_model(mlp, {"passes": PassList([*presets.default(), Early(), NeedsEarly()]), "report": report})
    assert [(entry.name, entry.direction) for entry in report.passes if "early" in entry.name] == [
        ("early", "joint"),
        ("needs_early", "forward"),
        ("needs_early", "backward"),
    ]


@pytest.mark.usefixtures("world")
def test_inference_runs_all_passes_on_its_one_graph() -> None:
    report = Report()
    compile_model(mlp, {"report": report}, train=False)
    assert [(entry.name, entry.direction) for entry in report.passes] == [
        (entry.name, "inference") for entry in presets.default()
    ]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("answer", [None, 1, "yes"])
def test_an_answer_that_is_no_bool_is_refused(answer: Any) -> None:
    with pytest.raises(VerifyError) as error:
        run(Answer(answer=answer))
    assert str(error.value) == (
        f"answer on the forward graph: run returned {answer!r}; return True if the graph changed, else False."
    )


@pytest.mark.usefixtures("world")
def test_a_change_that_is_denied_is_refused() -> None:
    with pytest.raises(VerifyError, match="answer on the forward graph: run returned False, but the graph changed"):
        run(Answer(answer=False, adds=True))


@pytest.mark.usefixtures("world")
def test_truthful_answers_are_reported() -> None:
    changed, unchanged = run(Answer(answer=True, adds=True)), run(Answer())
    assert [(entry.direction, entry.changed) for entry in changed] == [("forward", True), ("backward", True)]
    assert not any(entry.changed for entry in unchanged)
    assert all(entry.seconds > 0 for entry in changed)


@pytest.mark.usefixtures("world")
def test_an_exception_of_a_pass_says_where_it_ran() -> None:
    class Broken(GraphPass):
        name = "broken"

        def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
            raise KeyError("its own mistake")

    with pytest.raises(KeyError, match="its own mistake") as error:
        run(Broken())
    assert error.value.__notes__ == ["zgraph: while broken ran on the forward graph"]


@pytest.mark.usefixtures("world")
def test_a_pass_without_run_says_so() -> None:
    class Forgetful(GraphPass):
        name = "forgetful"

    with pytest.raises(NotImplementedError, match=r"Forgetful has no run\(gm, ctx\)"):
        run(Forgetful())


@pytest.mark.usefixtures("world")
def test_passes_see_both_graphs_and_their_own_direction() -> None:
    seen: list[tuple[str, list[str]]] = []

    class Look(GraphPass):
        name = "look"

        def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
            assert ctx.graphs[ctx.direction] is gm
            seen.append((ctx.direction, list(ctx.graphs)))
            return False

    compile_model(mlp, {"passes": PassList([*presets.default(), Look()])})
    assert seen == [("forward", ["forward", "backward"]), ("backward", ["forward", "backward"])]


@pytest.mark.usefixtures("world")
def test_observer_sees_each_graph_after_each_pass() -> None:
    seen: list[tuple[str, str, int]] = []
    found = traced(mlp)
    pipeline = PassList([Answer(answer=True, adds=True), NeedsEarly(), Early()])
    sizes = {direction: len(gm.graph.nodes) for direction, gm in found.graphs.items()}

    def observe(entry: GraphPass | None, ctx: PassContext, graph: fx.Graph) -> None:
        assert entry is not None
        seen.append((entry.name, ctx.direction, len(graph.nodes)))

    list(pipeline.run("graph", found.ctx, found.graphs, observe))
    assert seen == [
        (name, where, sizes[where] + 1) for name in ("answer", "needs_early") for where in ("forward", "backward")
    ]


def test_passes_and_pipelines_are_values() -> None:
    assert SinkWaits(reductions_in_flight=3) == SinkWaits(reductions_in_flight=3)
    assert PassList(presets.default()) == PassList(presets.default())
    assert PassList(presets.default()) != PassList(presets.default(), replay_all=True)
    with pytest.raises(FrozenInstanceError):
        SinkWaits().reductions_in_flight = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_facts_of_the_passes_are_the_named_ones() -> None:
    lossy = presets.default(compression=LoCo(), gather_compression=NoFeedback(bits=8))
    offloading = presets.default(offload_activations=True)
    every = [*presets.default(), *presets.planned(), *lossy, *offloading]
    provided = {fact for entry in every for fact in entry.provides}
    assert provided == set(Fact)
