"""How fast the page of a report answers, in headless Chromium: its size, first paint, and each interaction.

    python examples/benchmarks/report_page.py                        # a made-up report of 20,000 nodes
    python examples/benchmarks/report_page.py --report out/          # one that was written
    python examples/benchmarks/report_page.py --json page.json

An interaction *answers* when the frame that follows it has been painted, and is *done* three frames (50 ms) after the
last picture that it changes. What a report lacks, such as a second graph, is named in the table as skipped.

Needs playwright (pip install 'zgraph[test]'), a Chromium of the system, and a checkout: the tests make up the report.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import about, parser_of, save, spread, table

from zgraph.reporting.export.reading import load
from zgraph.reporting.page.write_page import write_page


def click(selector: str, stride: int = 1) -> str:
    return f"""
        const found = [...document.querySelectorAll("{selector}")];
        if (!found.length) return false;
        found[({stride} * round) % found.length].click();"""


def enter(field: str, values: str, event: str = "input") -> str:
    return f"""
        const field = document.getElementById("{field}"), values = "{values}".split(" ");
        if (!field) return false;
        field.value = values[round % values.length];
        field.dispatchEvent(new Event("{event}"));"""


def zoom(chart: str) -> str:
    return f"""
        const chart = document.getElementById("{chart}");
        if (!chart) return false;
        chart.dispatchEvent(new KeyboardEvent("keydown", {{ key: ["+", "+", "+", "-", "0"][round % 5] }}));"""


# What an interaction does, as the body of a function that yields false where there is nothing to do it with. `round`
# counts the repetitions, so that none does what another has done.
INTERACTIONS = {
    "open a group of the graph": click("button.group[aria-expanded=false]", stride=7),
    "close a group": click("button.group[aria-expanded=true]", stride=7),
    "search the graph": enter("graph-search", "mm add view a e"),
    "go to what was found": click("#graph-results button", stride=11),
    "colour the graph otherwise": enter("graph-shade", "cost memory communication", "change"),
    "show the other graph": """
        const field = document.getElementById("graph-direction");
        if (field.options.length < 2) return false;
        field.value = String((Number(field.value) + 1) % field.options.length);
        field.dispatchEvent(new Event("change"));""",
    "collapse all": click("#graph-collapse"),
    "zoom the timeline": zoom("timeline-chart"),
    "zoom the memory curve": zoom("memory-chart"),
    "select a collective": click("#collectives-table tbody button"),
    "sort the collectives": click("#collectives-table thead button"),
    "sort the parameters": click("#parameters-table thead button"),
    "filter the parameters": enter("parameters-filter", "0 1 2 3 4 5 6 7 8 9"),
    "show the diff of a pass": click("#passes-table tbody button"),
}

# Milliseconds until an action is answered, and until all is done: null where there was nothing to do it with.
MEASURE = """async ([action, round]) => {
    const painted = () => new Promise((resolve) => requestAnimationFrame(() => {
        const channel = new MessageChannel();
        channel.port1.onmessage = resolve;
        channel.port2.postMessage(0);
    }));
    await painted();
    const began = performance.now();
    if (new Function("round", action)(round) === false) return null;
    await painted();
    const answers = performance.now() - began;
    // Pictures follow in tasks behind the answer, and that of the graph when it is laid out.
    for (let calm = 0; calm < 3; calm++) {
        await painted();
        if (document.getElementById("graph-picture").getAttribute("aria-busy") === "true") calm = -1;
    }
    return [answers, performance.now() - began];
}"""

MARKS = """() => ({
    paint: performance.getEntriesByName("first-contentful-paint")[0].startTime,
    ...Object.fromEntries(performance.getEntriesByType("mark").map((mark) => [mark.name, mark.startTime])),
})"""


def main() -> None:
    parser = parser_of(__doc__, nodes=20_000, loads=5, rounds=10)
    parser.add_argument("--report", type=Path, help="folder or report.json to show instead of the made-up one")
    options = parser.parse_args()
    where = about()
    document = load(options.report) if options.report else made_up(options.nodes)
    with tempfile.TemporaryDirectory() as folder:
        page = write_page(document, Path(folder))
        size = page.stat().st_size
        browser, loads, samples = measure(page, options.loads, options.rounds)
    nodes = sum(len(graph["nodes"]["line"]) for frame in document["frames"] for graph in frame["graphs"])
    print(f"{nodes} nodes, {size / 2**20:.2f} MiB; {browser} on {where['processor']}, commit {where['commit']}\n")
    named = {"first paint": "paint", "timeline is drawn": "zgraph timeline", "everything is drawn": "zgraph all"}
    print(table(("page", "ms (quartiles)"), [(name, spread(loads[key])) for name, key in named.items()]) + "\n")
    cells = [
        (name, *(map(spread, zip(*taken, strict=True)) if taken else ("skipped: nothing to do it with", "")))
        for name, taken in samples.items()
    ]
    print(table(("interaction", "answers, ms", "done, ms"), cells))
    found = {"browser": browser, "nodes": nodes, "bytes": size, "loads": loads, "interactions": samples}
    save(options.json, {**where, **found})


def made_up(nodes: int) -> dict[str, Any]:
    """A report of so many nodes, as the tests make it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.support.reports import large_report

    return large_report(nodes)


Samples = dict[str, list[list[float]]]


def measure(page: Path, loads: int, rounds: int) -> tuple[str, dict[str, list[float]], Samples]:
    """The browser, and milliseconds: until the page is seen and drawn, until each interaction is answered and done."""
    from playwright import sync_api

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise SystemExit("there is no Chromium: apt-get install chromium")
    seen: dict[str, list[float]] = {}
    samples: Samples = {name: [] for name in INTERACTIONS}
    with sync_api.sync_playwright() as driver:
        # A container's root has no user namespaces for a sandbox; the page is our own.
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])

        def opened() -> sync_api.Page:
            view = browser.new_page(viewport={"width": 1400, "height": 900})
            view.goto(page.as_uri())
            view.wait_for_selector("html[data-drawn]", state="attached")
            return view

        for _ in range(loads):
            view = opened()
            for name, after in view.evaluate(MARKS).items():
                seen.setdefault(name, []).append(round(after, 1))
            view.close()
        view = opened()
        view.locator("#graph").scroll_into_view_if_needed()
        view.wait_for_selector("#graph-picture[aria-busy=false]")
        for round_ in range(rounds):
            for name, action in INTERACTIONS.items():
                took = view.evaluate(MEASURE, [action, round_])
                if took:
                    samples[name].append([round(each, 1) for each in took])
        version = f"Chromium {browser.version}"
        browser.close()
    return version, seen, samples


if __name__ == "__main__":
    main()
