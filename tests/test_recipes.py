"""The recipes for real models as smoke runs: SHORT=1, with the human behind a server.

Run: pytest tests/test_recipes.py
"""

import json
import os
import random
import shutil
import subprocess

import pytest
from conftest import ROOT, metrics
from test_servers import running

from colbench import read_tasks
from toy.world import SCRIPTED

pytestmark = pytest.mark.slow


def scripted_human(domain):
    """The embedded world's human behind a server: it finds the task by what the human wants."""
    tasks = read_tasks(f"toy:{domain}:train", 60) + read_tasks(f"toy:{domain}:test", 20)
    by_wish = {json.dumps(task["hidden_information"])[1:-1]: task for task in tasks}

    def answer(body, seed):
        assert body["model"] == "human"
        if domain == "frontend":  # it sees screenshots, and no page that it could read
            return "i want another color ."
        prompt = json.dumps(body["messages"][0]["content"])
        task = next(task for wish, task in by_wish.items() if wish in prompt)
        return SCRIPTED[domain, "human", ""](task, body["messages"], random.Random(seed))

    return answer


def short_run(recipe, domain, folder):
    """What it printed, and the folder of its table."""
    with running(scripted_human(domain), models=["human"]) as server:
        variables = {"SHORT": "1", "HUMAN_URL": server.url, "OUT": str(folder),
                     "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", f"runs/{recipe}.sh"], cwd=ROOT, text=True,
                              env=os.environ | variables, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert server.seen_models == {"human"}
    return json.loads((folder / "test/results.json").read_text())


@pytest.mark.parametrize("domain", ["backend", "frontend"])
def test_a_short_run_of_the_paper_scale_recipe_goes_from_episodes_to_a_report(domain, tmp_path):
    if domain == "frontend" and not shutil.which("chromium"):
        pytest.skip("no Chromium here; apt-get install chromium")
    results = short_run(f"{domain}_8b", domain, tmp_path)
    for name in ("critic", "sweet", "mtdpo", "rft"):
        assert metrics(tmp_path / name), name
    assert {"sweet", "mtdpo", "rft"} <= set(results["policies"])
    assert (tmp_path / "test/report.html").stat().st_size > 10_000


def test_a_short_run_of_the_recipe_for_one_gpu_goes_from_episodes_to_a_report(tmp_path):
    results = short_run("backend_1gpu", "backend", tmp_path)
    assert {"sweet", "base"} <= set(results["policies"])
    assert (tmp_path / "critic/lora.matrices").is_file()
    assert (tmp_path / "report.html").stat().st_size > 10_000
