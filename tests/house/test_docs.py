"""Every Python block of the README and of docs/ runs as printed; what is drawn from code and figures is up to date."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zgraph
from tests.support.doc_blocks import PAGES, ROOT, SETTINGS, Story, blocks_of, run_story, settings_of, stories
from tests.support.ranks import Ranks

STORIES = stories()
TOOLS = ("docs/tools/draw_rooms.py", "docs/tools/fill_tables.py", "docs/tools/draw_ratios.py")


def test_every_block_has_one_setting_and_every_setting_a_block() -> None:
    blocks = [(page.name, block) for page in PAGES for block in blocks_of(page)]
    assert [(page, block) for page, block in blocks if len(settings_of(block)) != 1] == []
    used = {id(settings_of(block)[0]) for _, block in blocks}
    assert [setting.begins for setting in SETTINGS if id(setting) not in used] == []


# Slow: the default lowering compiles C++.
@pytest.mark.parametrize("story", STORIES, ids=[f"{one.page}: {one.blocks[0][:30].strip()}" for one in STORIES])
def test_blocks_run_as_printed(ranks: Ranks, tmp_path: Path, story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    if story.on == "ranks":
        ranks.run(run_story, story, str(tmp_path))
    elif story.on == "a GPU":
        if not torch.cuda.is_available():
            pytest.skip("there is no GPU; that the block compiles is tested everywhere")
        alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
        for name, value in alone.items():
            monkeypatch.setenv(name, str(value))
        run_story(story, str(tmp_path))
        dist.destroy_process_group()
    else:
        run_story(story, str(tmp_path))


def test_every_block_is_python() -> None:
    for story in STORIES:
        for block in story.blocks:
            compile(block, f"a block of {story.page}", "exec")


def test_the_table_of_models_has_every_model_of_the_zoo() -> None:
    tree = ast.parse((ROOT / "examples" / "zoo.py").read_text())
    (zoo,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ZOO"
    ]
    assert isinstance(zoo, ast.Dict)
    shown = json.loads((ROOT / "examples" / "benchmarks" / "results" / "zoo.json").read_text())["rows"]
    assert [row["model"] for row in shown] == [ast.literal_eval(key) for key in zoo.keys if key is not None]


@pytest.mark.parametrize("tool", TOOLS)
def test_generated_docs_are_up_to_date(tool: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / tool), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_example_has_a_row_in_their_readme() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    examples = [path.name for path in sorted((ROOT / "examples").glob("*.py")) if path.name != "__init__.py"]
    assert examples
    assert [name for name in examples if f"| `{name}` |" not in text] == []


def test_examples_shown_on_pages_are_there() -> None:
    included = [
        line.split('"')[1] for page in PAGES for line in page.read_text().splitlines() if line.startswith("--8<--")
    ]
    assert included
    assert [name for name in included if not (ROOT / name).is_file()] == []


def test_links_lead_somewhere() -> None:
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md"]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    inside = [(page, *link.partition("#")[::2]) for page, link in links if "://" not in link]
    assert inside
    assert [(page.name, path) for page, path, _ in inside if path and not (page.parent / path).exists()] == []
    wanted = [((page.parent / path) if path else page, anchor) for page, path, anchor in inside if anchor]
    assert [(page.name, anchor) for page, anchor in wanted if anchor not in anchors(page)] == []


def anchors(page: Path) -> list[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]


def test_the_reference_has_every_public_name() -> None:
    shown = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    modules = ("metrics", "passes")
    homes = {name: f"{getattr(zgraph, name).__module__}.{name}" for name in zgraph.__all__ if name not in modules}
    homes |= {name: f"{getattr(zgraph.metrics, name).__module__}.{name}" for name in zgraph.metrics.__all__}
    passes = {name: getattr(zgraph.passes, name) for name in zgraph.passes.__all__ if name != "presets"}
    homes |= {name: f"{found.__module__}.{name}" for name, found in passes.items()}
    # The page shows the whole module of errors.
    assert {home for home in homes.values() if not home.startswith("zgraph.errors.")} <= {*shown}
    assert "zgraph.errors" in shown
