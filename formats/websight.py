"""`colbench.py websight`: rows of WebSight as frontend tasks."""

from judge.pages import official_addresses
from runtime.files import as_jsonl, expect, read_jsonl, write_new
from runtime.text import counted

TRAIN_ROWS = 10_000  # the paper trains on the first 10,000 WebSight rows, tests on later ones


def websight(rows_path, train_path, test_path=None):
    """WebSight rows as tasks: the first 10,000 go to train_path, those after them to test_path."""
    tasks = []
    for where, row in read_jsonl(rows_path):
        page = official_addresses(expect(row, "text", str, where))
        request = expect(row, "llm_generated_idea", str, where)
        tasks.append({"problem_description": request, "domain": "frontend", "ground_truth": page,
                      "hidden_information": page})
    parts = tasks[:TRAIN_ROWS], tasks[TRAIN_ROWS:]
    for path, part in zip((train_path, test_path), parts, strict=True):
        if path:
            write_new(path, as_jsonl(part))
            print(f"{path}: {counted(len(part), 'task')}")
        elif part:
            print(f"{counted(len(part), 'row')} beyond the first {TRAIN_ROWS:,} left out: no TEST"
                  " file was named")
