"""Sites that are killed, cut off and slow, while they train with outer steps.

    sudo .venv/bin/python examples/benchmarks/site_faults.py --kills 50 --json results.json

Four sites in network namespaces train the GPT of examples/train_gpt.py, and meet at a store in a fifth. A random one is
killed again and again, and comes back with the state of its optimizer; the link of another one is down for 20 seconds;
the last one is half as fast. Training ends after so many steps whose rounds have counted, of all sites together. The
same is done without faults, for each seed. Exits with 1 if anchors of the same round differ between sites, also those
of a site that comes, or if a step waits for longer than the deadline.
"""

# pyright: reportPrivateUsage=false
# Anchors and their rounds are looked at while rounds run, which state_dict would wait for.

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from netns import INTERFACE, ShapedNetwork
from record import about, parser_of, save

import zgraph
from zgraph.runtime.exchanges.changes import checksum

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_gpt import GPT, cut, evaluate, make_optimizer, read_sources

SITES, PORT, DEADLINE_S = 4, 29400, 20.0
CUT_S = 20.0
STEP_S = 0.06  # of a step, which sleeps for what it does not compute; twice as much on the last site
SEQUENCE, BATCH, EVERY, FRAGMENTS = 64, 2, 20, 4


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "site":
        address, site, seed, folder = sys.argv[2:]
        train(address, int(site), int(seed), Path(folder))
        return 0
    parser = parser_of(__doc__, kills=50, steps=6000, seeds=3, rate="100mbit")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # namespaces are removed on the way out
    rows: dict[str, dict[str, Any]] = {}
    for name, seed, kills in [
        *((f"no faults, seed {seed}", seed, 0) for seed in range(options.seeds)),
        ("faults, seed 0", 0, options.kills),
    ]:
        rows[name] = row = run(options, seed, kills)
        print(name, {key: value for key, value in row.items() if key != "failures"}, *row["failures"], sep="\n  ")
    save(options.json, about() | {"kills": options.kills, "counted_steps": options.steps, "rows": rows})
    return int(any(row["failures"] for row in rows.values()))


# --- the site ---------------------------------------------------------------------------------------------------------


def train(address: str, site: int, seed: int, folder: Path) -> None:
    """Train until a file says that it is enough, and log every step."""
    torch.set_num_threads(1)
    text, held_out_text = read_sources()
    torch.manual_seed(seed)
    model = GPT(layers=1, width=128, heads=4, sequence=SEQUENCE)
    optimizer = make_optimizer(model, lr=1e-3)
    state = folder / f"optimizer{site}.pt"
    if state.exists():
        optimizer.load_state_dict(torch.load(state))
    outer = zgraph.OuterSteps(model, zgraph.Meeting(address, deadline_s=DEADLINE_S), every=EVERY, fragments=FRAGMENTS)
    generator = torch.Generator().manual_seed(1000 * seed + 10 * site + int(time.time()) % 10)
    with (folder / f"site{site}.jsonl").open("a") as lines:
        known = write(lines, outer, {}, came=True)
        steps = 0
        while not (folder / "end").exists():
            steps += 1
            began = time.perf_counter()
            starts = torch.randint(len(text) - SEQUENCE, (BATCH,), generator=generator)
            model(*cut(text, starts, SEQUENCE)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if steps % EVERY == 0:
                torch.save(optimizer.state_dict(), state.with_suffix(".new"))
                state.with_suffix(".new").replace(state)
            time.sleep(max(0.0, STEP_S * (2 if site == SITES - 1 else 1) - (time.perf_counter() - began)))
            waited_s = outer.waited_s
            outer.step(weight=BATCH)
            known = write(lines, outer, known, waited_s=outer.waited_s - waited_s)
        windows = torch.linspace(0, len(held_out_text) - SEQUENCE - 1, 512).long().view(-1, 32)
        with outer.anchor():
            loss = evaluate(model, held_out_text, windows, SEQUENCE)
        write(lines, outer, known, loss=loss)


def write(lines: Any, outer: zgraph.OuterSteps, known: dict[int, int], **facts: Any) -> dict[int, int]:
    """Log a step with the changed anchors as [fragment, rounds, checksum]; return the rounds of each fragment."""
    rounds = {place: one.state.rounds for place, one in enumerate(outer._anchors)}
    changed = [
        [place, count, checksum([outer._anchors[place].values])]
        for place, count in rounds.items()
        if known.get(place) != count
    ]
    lines.write(json.dumps({**facts, "anchors": changed}) + "\n")
    lines.flush()
    return rounds


# --- the machine ------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, seed: int, kills: int) -> dict[str, Any]:
    """Run all sites, with faults if `kills` is not 0; return a summary of their logs."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, ShapedNetwork(SITES + 1, options.rate) as network:
        store = [sys.executable, "-m", "zgraph", "sites", "--port", str(PORT)]
        network.popen(SITES, store, {})
        time.sleep(5)
        logs = [Path(folder, f"site{site}.jsonl") for site in range(SITES)]

        def start(site: int) -> subprocess.Popen[bytes]:
            address = f"{network.address(SITES)}:{PORT}"
            arguments = ["site", address, str(site), str(seed), folder]
            environment = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
            return network.popen(site, [sys.executable, __file__, *arguments], environment)

        sites = [start(site) for site in range(SITES)]
        begun = [0] * SITES  # lines of the log when the site was started
        killed = 0
        while any(one.poll() is None for one in sites):
            time.sleep(chance.uniform(0.5, 4) if killed < kills else 1)
            counted = sum(counted_steps(_read(log)) for log in logs)
            live = [site for site, one in enumerate(sites) if one.poll() is None and _trains(logs[site], begun[site])]
            if killed < kills and len(live) > 1 and counted < 0.9 * options.steps:  # who comes later finds the end
                site = chance.choice(live)
                sites[site].kill()
                sites[site].wait()
                begun[site] = len(_read(logs[site]))
                sites[site] = start(site)
                killed += 1
                if killed == kills // 2:
                    _cut(network, chance.choice([one for one in range(SITES) if one != site]))
            if counted >= options.steps:
                Path(folder, "end").touch()
        ended = [one.returncode for one in sites]
        return {"killed": killed, "ended": ended} | judged([_read(log) for log in logs])


def _trains(log: Path, begun: int) -> bool:
    """Return whether a site has stepped since its last start, when its log had `begun` lines."""
    return any("waited_s" in line for line in _read(log)[begun:])


def _read(log: Path) -> list[dict[str, Any]]:
    """The lines of a log; the last one may have been cut by a kill."""
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def counted_steps(log: list[dict[str, Any]]) -> float:
    """Return the number of a site's steps whose rounds have counted, as a mean over fragments."""
    own = [0] * FRAGMENTS  # since the last round of each fragment
    found = 0.0
    for line in log:
        if line.get("came"):
            own = [0] * FRAGMENTS
            continue
        own = [count + ("waited_s" in line) for count in own]
        for place, _, _ in line["anchors"]:
            found += own[place] / FRAGMENTS
            own[place] = 0
    return found


def _cut(network: ShapedNetwork, host: int) -> None:
    namespace = network.namespace(host)
    subprocess.run(["ip", "-n", namespace, "link", "set", INTERFACE, "down"], check=True)
    time.sleep(CUT_S)
    subprocess.run(["ip", "-n", namespace, "link", "set", INTERFACE, "up"], check=True)


def judged(logs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Summarize the sites' logs, and list violations of the guarantees."""
    failures: list[str] = []
    digests: dict[tuple[int, int], int] = {}
    for log in logs:
        last: dict[int, int] = {}
        for line in log:
            for place, rounds, digest in line["anchors"]:
                if digests.setdefault((place, rounds), digest) != digest and rounds:
                    failures.append(f"fragment {place} differs after round {rounds}")
                if not line.get("came") and rounds <= last.get(place, -1):
                    failures.append(f"fragment {place} goes from round {last[place]} to {rounds}")
                last[place] = rounds
    waits = [line["waited_s"] for log in logs for line in log if "waited_s" in line]
    if sum("loss" in line for log in logs for line in log) < SITES:
        failures.append("a site has not come to the end")
    if max(waits) > DEADLINE_S + 2:
        failures.append(f"a step has waited for {max(waits):.1f} s")
    losses = [line["loss"] for log in logs for line in log if "loss" in line]
    return {
        "rounds": len({rounds for _, rounds in digests if rounds}),
        "came": sum(bool(line.get("came")) for log in logs for line in log),
        "steps": [sum("waited_s" in line for line in log) for log in logs],
        "counted_steps": [round(counted_steps(log)) for log in logs],
        "longest_wait_s": max(waits),
        "held_out": losses,
        "failures": failures,
    }


if __name__ == "__main__":
    sys.exit(main())
