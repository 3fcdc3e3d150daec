"""`colbench.py websight`: rows of WebSight as frontend tasks."""

import json
import os
import tempfile
from pathlib import Path

from judge.pages import official_addresses
from runtime.checks import expect
from runtime.files import read_jsonl

TRAIN_ROWS = 10_000  # the paper trains on the first 10,000 WebSight rows, tests on later ones


def websight(rows_path, train_path, test_path=None):
    """WebSight rows as tasks: the first 10,000 go to train_path, those after them to test_path."""
    for path in filter(None, (train_path, test_path)):
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=Path(train_path).absolute().parent) as folder:
        parts = [Path(folder, "train"), Path(folder, "test")]
        with open(parts[0], "w") as train, open(parts[1], "w") as test:
            for index, (where, row) in enumerate(read_jsonl(rows_path)):
                page = official_addresses(expect(row, "text", str, where))
                request = expect(row, "llm_generated_idea", str, where)
                task = {"problem_description": request, "domain": "frontend",
                        "ground_truth": page, "hidden_information": page}
                print(json.dumps(task), file=train if index < TRAIN_ROWS else test)
        os.replace(parts[0], train_path)
        if test_path:
            os.replace(parts[1], test_path)
