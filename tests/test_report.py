"""The report, opened and used in headless Chromium, and pairs for others."""

import base64
import json
import random
import re
import time
import types
import zlib

import conftest
import pytest
import torch
from conftest import dialogue, png, ranked_state, read_rows, run_script, write_episodes, write_rows

from formats.read import complete_episode
from judge.browser import CHROMIUM_FLAGS, DevTools
from report import __main__ as command
from report import charts, page
from report.training import held_out_tasks, method_among, read_training
from runtime.record import file_hash
from toy.world import toy_tasks
from train_critic import split_tasks
from train_policy import state_pairs

HOSTILE = (
    '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
    '<a href="javascript:window.hacked = 3">x</a> <!-- <script> {{7*7}} \u2028 '
    "${window.hacked = 4}"
)


class Reader:
    """Opens reports as a person does, and looks at what is drawn."""

    def __init__(self):
        self.events = []
        self.devtools = DevTools(CHROMIUM_FLAGS, self.events.append)
        self.devtools.set_deadline(30)
        self.devtools.open_page()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.devtools.call(f"{domain}.enable")

    def run(self, expression):
        """The value of a JavaScript expression, awaited where it is a promise."""
        answer = self.devtools.call("Runtime.evaluate", expression=expression, returnByValue=True,
                                    awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, url, width=1280):
        call = self.devtools.call
        self.devtools.set_deadline(60)
        self.events.clear()
        call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
             mobile=False)
        # From a blank page, as a new fragment of the same address would load nothing.
        call("Page.navigate", url="about:blank")
        call("Page.navigate", url=url)
        until = time.monotonic() + 20
        loaded = ("location.protocol === 'file:' && document.readyState === 'complete'"
                  " && !document.querySelector('[aria-busy=true]')")
        while not self.run(loaded):
            assert time.monotonic() < until, "the page did not load"
            time.sleep(0.05)

    def press_enter(self, focused):
        self.run(f"{focused}.focus()")
        self.devtools.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r")
        self.devtools.call("Input.dispatchKeyEvent", type="keyUp", key="Enter")

    def set(self, name, value):
        """Fill in a field and tell the page, as the browser does after typing."""
        field = f"document.getElementById({json.dumps(name)})"
        self.run(f"{field}.value = {json.dumps(value)};"
                 f"{field}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def each(self, selector, expression):
        """The value of a JavaScript expression in `e` for each element of the selector."""
        elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.run(f"{elements}.map(e => {expression})")

    def count(self, selector):
        return self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    def complaints(self):
        """Exceptions, log entries (a violated content policy is one), requests leaving the page."""
        found = []
        for event in self.events:
            if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(event)
            if event["method"] == "Network.requestWillBeSent":
                url = event["params"]["request"]["url"]
                if not url.startswith(("file:", "data:", "about:")):
                    found.append(event)
        return found


def critic_of(values, dropped=0):
    """A critic whose turns have these advantages, and a list of the episodes that it has read."""
    read = []
    return types.SimpleNamespace(
        dialogue_row=lambda found: read.append(found) or types.SimpleNamespace(
            ids=[1], turns=len(values), dropped=dropped),
        turn_advantages=lambda rows: torch.tensor([values] * len(rows))), read


def episode(task, passed=True, text="Round the result?", **more):
    solution, request = "def f(x):\n    return x", f"Write function number {task}"
    row = conftest.episode(
        f"task{task}", 1.0 if passed else 0.5, answer=solution,
        texts=(request, text, "Yes, to two digits.", "I WANT TO ANSWER: def f"),
        reasons={"test1": "passed", "test2": "passed" if passed else "timed out"})
    row["task"] |= {"problem_description": request, "ground_truth": solution,
                    "test_cases": {"test1": "f(1)", "test2": "f(2)"}}
    return row | more


def make_report(*words):
    command.main(command.parse_args([str(word) for word in words]))


def write_report(folder, *flags, **policies):
    """The path of a report over `policies`, name -> rows."""
    files = [f"{name}={write_rows(folder / f'{name}.jsonl', rows)}"
             for name, rows in policies.items()]
    report = folder / "report.html"
    make_report(*files, "--output", report, *flags)
    return report


def write_run(folder, rows, script, **flags):
    """metrics.jsonl of a training run, with its record."""
    path = write_rows(folder / "metrics.jsonl", rows)
    record = {"script": script, "flags": flags, "inputs": {}}
    (folder / "run.json").write_text(json.dumps(record))
    return path


def ranked(number, **more):
    texts = [f"Which unit? {index}" for index in range(4)]
    values = 0.1 * (number + 1), 0.02, -0.01, -0.1 * (number + 1)
    state = ranked_state(dict(zip(texts, values, strict=True)))
    state["task"]["task_id"] = f"task{number}"
    return state | more


def write_sweet(folder):
    steps = [{"step": i, "train/loss": 2 - i / 40, "train/accuracy": 0.9, "train/margin": i / 40,
              "train/nll": 0.5, "optim/lr": 1e-6, "time/step": 1} for i in range(40)]
    return write_run(folder, steps, "train_policy.py", candidates="ranked.jsonl",
                     episodes=None, model="toy/base")


def write_critic(folder):
    steps = [{"step": i, "train/loss": 1 / (i + 1), "time/step": 1} for i in range(9)]
    steps.append({"step": 9, "holdout/accuracy": 0.9, "holdout/pairs": 20.0})
    steps.append({"step": 10, "credit_auc/all": 0.95, "credit_auc/question_question": 0.75})
    return write_run(folder, steps, "train_critic.py", privileged="ground_truth", model="toy/base")


@pytest.fixture(scope="module")
def browser(chromium):
    reader = Reader()
    yield reader
    reader.devtools.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    scores = {"advantages": [0.2, -0.1], "credits": ["useful question", "wrong answer"]}
    ours = [episode(task, passed=task % 2 == 0, **scores) for task in range(6)]
    picture = base64.b64encode(png("blue", 4, 3)).decode()
    ours[5] |= {"screenshot": picture, "solution_screenshot": picture, "leak": 0.9}
    texts = ["Why?", "Why?", "Why?", "Needle in the hay?", "Why?", "Why?"]
    theirs = [episode(task, passed=False, text=text) for task, text in enumerate(texts)]
    theirs[4] |= {"error": "server gone", "reward": None, "success": None}
    theirs[5]["dialogue_history"][-1] = {"role": "assistant", "content": "And the unit?"}
    theirs[5] |= {"reasons": {"test1": "no answer", "test2": "no answer"}, "reward": 0.0}
    metrics = [f"critic={write_critic(folder / 'critic')}", f"ours={write_sweet(folder / 'ours')}"]
    return write_report(folder, "--metrics", *metrics, ours=ours, theirs=theirs)


@pytest.fixture
def shown(browser, report):
    browser.open(report.as_uri())
    return browser


def test_report_opens_with_tables_charts_and_all_episodes_and_no_complaint(shown):
    assert shown.text("#count") == "12 of 12 dialogues, 6 of 6 tasks"
    assert shown.count(".row") == 12 and shown.count(".task") == 6
    assert shown.count("#results figure") == 3 and shown.count("#training figure") == 5
    assert shown.complaints() == []


# -----------------------------------------------------------------------------
# What is told before any table


def test_each_policy_is_described_in_a_clause_if_its_file_says_who_played(browser, tmp_path):
    write_run(tmp_path / "trained", [], "train_policy.py", candidates=None, episodes=["e.jsonl"],
              model="some/base", lr=1e-6)
    rows = [episode(0, agent=str(tmp_path / "trained"), human="scripted")]
    for name, turns in (("ours", 10), ("single", 1)):
        run = {"flags": {"tasks": "test.jsonl", "judge": "fixed", "max_turns": turns,
                         "require_protection": True}, "inputs": {}, "commit": "abc1234"}
        (tmp_path / f"{name}.jsonl.run.json").write_text(json.dumps(run))
    odd = {"screenshot": {}, "solution_screenshot": [], "credits": [["x"], 1]}
    files = {"ours": rows, "single": rows, "foreign": [episode(0, **odd)]}
    browser.open(write_report(tmp_path, **files).as_uri())
    assert browser.count(".row") == 3
    ours, single, foreign = browser.each("#policies p", "e.innerText")
    assert ours == "ours – multi-turn DPO on pairs of whole dialogues, from some/base"
    assert single.endswith("from some/base; in one turn")
    assert foreign == "foreign" and "unknown" not in browser.run("document.body.innerText")


def test_turns_and_endings_are_stacked_by_their_share(shown):
    titles = shown.each("#results figcaption", "e.innerText")
    assert titles == ["Success %, with 95 % intervals", "What the turns are, %",
                      "How episodes end, %"]
    turns, endings = "#results figure:nth-of-type(2)", "#results figure:nth-of-type(3)"
    assert shown.each(f"{turns} .legend span", "e.innerText") == ["useful question", "wrong answer"]
    tips = shown.each(f"{endings} rect", "e.textContent")
    assert tips == ["ours, solved: 50.0 %", "ours, wrong answer: 50.0 %",
                    "theirs, wrong answer: 66.7 %", "theirs, no answer: 16.7 %",
                    "theirs, error: 16.7 %"]
    widths = shown.each(f"{endings} rect", "e.width.baseVal.value")
    assert widths[2] == pytest.approx(4 * widths[3], rel=0.1)
    colours = shown.each(f"{endings} .swatch", "getComputedStyle(e).backgroundColor")
    assert len(set(colours)) == 4


def test_endings_tell_cut_answers_errors_and_early_ones_apart():
    def ending(text="I WANT TO ANSWER: x", domain="backend", finished=None, **more):
        history = dialogue("p", text)
        if finished is not None:  # imported rows do not say
            history[1]["finished"] = finished
        row = episode(0, passed=False, dialogue_history=history) | {"reasons": {}} | more
        row["task"] |= {"domain": domain}
        if domain != "backend":
            del row["task"]["test_cases"]
            row["success"] = None
        return charts.ending(complete_episode(row))

    assert ending() == ending(finished=True) == ending(finished=None) == "wrong answer"
    assert ending(finished=False) == "cut"
    assert ending(reasons={"test1": "solution failed"}) == "solution failed"
    assert ending(error="gone", success=None) == "error"
    assert ending("What now?") == "no answer"
    assert ending(credits=["early answer"]) == "early answer"
    assert ending(domain="frontend") == "answered"
    for reasons in ({}, {"page": "rendered"}):
        assert ending("a page", domain="frontend", reasons=reasons) == "out of turns"
    assert ending("a page", domain="logged") == "ended"
    assert ending("What now?", reward=1.0, success=True) == "solved"


def test_questions_on_the_last_turn_are_called_so(browser, tmp_path):
    task, = toy_tasks("toy:backend:test", 1)
    texts = task["problem_description"], "Tell me the frame.", "No wish there."
    ends = {"answers": f"I WANT TO ANSWER:\n{task['ground_truth']}", "asks": "Tell me the frame."}
    rows = {name: [{"task": task, "dialogue_history": dialogue(*texts, end),
                    "reward": float(name == "answers")}] for name, end in ends.items()}
    report = write_report(tmp_path, **rows)
    browser.open(report.as_uri())
    assert "question on the last turn" in browser.text("#results figure:nth-of-type(2) .legend")
    assert "early answer" not in browser.text("#results")
    browser.set("policy", "asks")
    notes = browser.each(".assistant small", "e.innerText")
    assert "true credit: question on the last turn · last turn, without an answer" in notes[1]
    assert "no answer · " in browser.text(".row span")


def test_critic_is_measured_on_held_out_pairs_and_by_kind(shown):
    titles = shown.each("#critic figcaption", "e.innerText")
    assert titles == ["critic: the better one ranked higher, %"]
    values = shown.each("#critic figure:first-of-type tbody tr",
                        "[...e.cells].map(cell => cell.textContent.trim())")
    assert values == [["20 held-out pairs of dialogues", "90.0"],
                      ["AUC, any two candidates", "95.0"], ["AUC, two questions", "75.0"]]


def cells_of(browser, table):
    return browser.each(f"{table} tbody tr", "[...e.cells].map(cell => cell.innerText.trim())")


def test_tables_show_the_numbers_of_evaluate(browser, report, tmp_path):
    files = [f"{name}={report.with_name(name + '.jsonl')}" for name in ("ours", "theirs")]
    done = run_script("evaluate.py", *files, "--output", tmp_path)
    tables = [[line.strip("| ").split("|") for line in table.splitlines()]
              for table in (tmp_path / "results.md").read_text().split("\n\n")]
    browser.open(report.as_uri())
    for number, (headings, _, *rows) in enumerate(tables, 1):
        table = f"#tables > .scroll:nth-of-type({number})"
        assert browser.each(f"{table} th", "e.innerText") == [text.strip() for text in headings]
        assert cells_of(browser, table) == [[text.strip() for text in row] for row in rows]
    said, *_ = done.stdout.split("\n\n")
    assert browser.each("#sentences p", "e.textContent") == said.split("\n")
    assert "backend · 6 tasks · 12 episodes" in browser.text("#subtitle")
    assert "95 % intervals over tasks, 2,000 bootstrap draws" in browser.text("#subtitle")


# -----------------------------------------------------------------------------
# Charts


def test_bars_are_as_long_as_their_numbers_inside_their_whiskers(shown):
    chart = "#results figure:nth-of-type(1)"
    assert shown.text(f"{chart} figcaption") == "Success %, with 95 % intervals"
    widths = shown.each(f"{chart} rect", "e.width.baseVal.value")
    labels = shown.each(f"{chart} text:not(.axis)", "e.textContent")
    assert labels[::2] == ["ours", "theirs"] and widths[0] > widths[1] == 0
    assert labels[1].startswith("50.0 [") and labels[3].startswith("0.0 [0.0, ")
    ends = shown.each(f"{chart} .whisker", "[...e.points].map(point => point.x)")[0]
    assert ends[0] < 8 + widths[0] < ends[1]
    value, low, high = map(float, re.findall(r"[\d.]+", labels[1]))
    scale = widths[0] / value
    axis = shown.each(f"{chart} .grid", "e.points[0].x")
    assert axis == pytest.approx([8 + scale * share for share in (0, 25, 50, 75, 100)], abs=0.1)
    assert shown.each(f"{chart} .axis", "e.textContent") == ["0", "25", "50", "75", "100"]
    assert ends == pytest.approx([8 + scale * low, 8 + scale * high], abs=0.1)


def test_a_policy_has_one_colour_everywhere(shown):
    bars = shown.each("#results figure:first-of-type rect", "getComputedStyle(e).fill")
    assert shown.each("#policies strong", "e.innerText") == ["ours", "theirs", "critic"]
    swatches = shown.each("#policies .swatch", "getComputedStyle(e).backgroundColor")
    curves = shown.each("#training figure > svg .line", "getComputedStyle(e).stroke")
    assert bars == swatches[:2] and swatches[2] == curves[0] and set(curves[1:]) == {bars[0]}
    assert len(set(swatches)) == 3


def test_values_can_be_read_by_keyboard_and_screen_reader(shown):
    figures = shown.count("figure:has(svg)")
    assert shown.count("figure > details > summary") == figures
    named = shown.each("figure > svg", "[e.getAttribute('role'), e.getAttribute('aria-label')]")
    assert all(role == "img" for role, _ in named)
    assert "ours 50.0 [" in named[0][1] and "theirs 0.0 [" in named[0][1]
    shown.press_enter("document.querySelector('#results figure summary')")
    assert shown.run("document.querySelector('#results figure details').open") is True
    (ours, _) = cells_of(shown, "#results figure:first-of-type")
    assert ours[0] == "ours" and ours[1].startswith("50.0 [")


def test_a_log_has_bars_below_and_above_zero_and_neither_endings_nor_answers(browser, tmp_path):
    roles = ["system", "user", "tool", "assistant", "assistant"]
    history = [{"role": role, "content": role[0]} for role in roles]

    def logged(*rewards):
        task = {"domain": "logged", "problem_description": "u", "ground_truth": ""}
        return [{"task": task | {"task_id": str(index)}, "dialogue_history": history,
                 "reward": reward} for index, reward in enumerate(rewards)]

    metrics = write_run(tmp_path, [{"step": 0, "holdout/accuracy": 0.8, "holdout/pairs": 10.0}],
                        "train_critic.py")
    report = write_report(tmp_path, "--metrics", f"critic={metrics}", bad=logged(-4.0, -2.0),
                          good=logged(7.0, 9.0))
    browser.open(report.as_uri())
    ranks, *others = browser.each("#sentences p", "e.innerText")
    assert ranks.startswith("critic ranks 80 % of 10 held-out pairs") and "tell little" in ranks
    assert others[0].startswith("The winner is not settled: good reaches 8.000 [7.000, 9.000]")
    titles = browser.each("#results figcaption", "e.innerText")
    assert titles == ["Reward, with 95 % intervals"]
    assert "8.000 [7.000, 9.000]" in browser.text("#results")
    left, right = browser.each("#results figure:first-of-type rect",
                               "[e.x.baseVal.value, e.x.baseVal.value + e.width.baseVal.value]")
    assert left[0] < left[1] == right[0] < right[1]  # from zero, to either side
    assert "answer" not in browser.run("document.getElementById('dialogues').innerText").lower()
    speakers = browser.each(".turn .speaker span", "e.innerText")
    assert speakers == ["system", "Human", "tool", "Agent", "Agent"]
    assert browser.complaints() == []


def page_episode(task, answer):
    row = episode(task, reward=0.25, success=None, reasons={}, answer=answer)
    row["task"] |= {"domain": "frontend", "ground_truth": "<html>x</html>"}
    return row


def test_frontend_report_draws_the_reward_as_there_is_no_success(browser, tmp_path):
    rows = [page_episode(task, "<html>y</html>") for task in range(3)]
    browser.open(write_report(tmp_path, ours=rows).as_uri())
    assert browser.text("#sentences p").startswith("ours reaches 25.0 [")
    titles = browser.each("#results figcaption", "e.innerText")
    assert titles == ["Similarity × 100, with 95 % intervals", "How episodes end, %"]
    bar = browser.each("#results figure:nth-of-type(1) text:not(.axis)", "e.textContent")
    assert bar[0] == "ours" and bar[1].startswith("25.0 [")
    assert browser.text("#results figure:nth-of-type(2) .legend") == "answered"
    titles = browser.each(".pages figcaption", "e.innerText")
    assert titles == ["Agent's page", "Solution page"]
    assert "·" in browser.text(".row b") and browser.complaints() == []


def test_an_agent_that_shows_no_page_has_no_picture_in_the_report(browser, tmp_path):
    browser.open(write_report(tmp_path, ours=[page_episode(0, "no page")]).as_uri())
    assert browser.each(".pages figcaption", "e.innerText") == ["Solution page"]


# -----------------------------------------------------------------------------
# Dialogues


def test_filters_by_outcome_policy_and_text_narrow_the_list(shown):
    for name, value, expected in (
        ("outcome", "solved", 3), ("outcome", "error", 1), ("outcome", "leaking", 1),
        ("policy", "theirs", 6), ("search", "NEEDLE", 1), ("search", "no such text", 0),
    ):
        shown.set(name, value)
        assert (name, value, shown.count(".row")) == (name, value, expected)
        shown.set(name, "")
    shown.set("order", "low")
    assert "reward 0.50" in shown.text(".row")


def test_tasks_are_listed_by_their_requests_with_their_policies_below(shown):
    titles = shown.each(".task .request", "e.innerText")
    assert titles == [f"Write function number {task}" for task in range(6)]
    long, none = shown.run("['word '.repeat(30), ' '].map(request => titleOf({request, id: 7}))")
    assert len(long) == 90 and long.startswith("word word") and long.endswith("…") and none == 7
    rows = shown.each(".task:first-child .row span", "e.innerText")
    assert rows == ["ours · solved · 2 turns", "theirs · wrong answer · reward 0.50 · 2 turns"]


def test_the_dialogue_shown_first_is_where_the_critic_tells_turns_apart_most(browser, tmp_path):
    scores = ([0.2, -0.1], [0.1, None], [0.4, -0.3], [0.5, 0.4])
    rows = [episode(task, advantages=pair) for task, pair in enumerate(scores)]
    browser.open(write_report(tmp_path, ours=rows).as_uri())
    assert "sample 0 of task2" in browser.text("#episode")


@pytest.mark.parametrize("dropped, expected", [(0, [1.0, 2.0, None]), (1, [None, 1.0, 2.0])])
def test_advantages_stand_at_their_turns_if_the_last_is_empty_or_the_first_was_dropped(
        dropped, expected):
    row = episode(0)
    row["dialogue_history"] = dialogue("t", "one", "a", "two", "b", " ")
    row["dialogue_history"][-1]["finished"] = False
    row = complete_episode(row)
    critic, _ = critic_of([1.0, 2.0], dropped)
    page.add_advantages(critic, [row])
    assert row["advantages"] == expected


def test_a_critic_of_tokens_shades_turns_if_it_sums_its_tokens_and_is_refused_otherwise():
    row = episode(0)
    critic, _ = critic_of([1.0] * 99)  # of 99 tokens
    with pytest.raises(SystemExit, match="found 99 advantages .* has to sum them"):
        page.add_advantages(critic, [row])
    summed = [1.0] * row["turns"]
    critic.turn_advantages = lambda rows: torch.tensor([summed])
    page.add_advantages(critic, [row])
    assert row["advantages"] == summed


def test_clicking_a_row_shows_dialogue_tests_shading_and_solution(shown):
    shown.set("policy", "ours")
    shown.run("document.querySelectorAll('.row')[1].click()")
    text = re.sub(r"\s+", " ", shown.text("#episode"))
    for part in ("task1", "sample 0", "wrong answer", "advantage -0.100",
                 "true credit: useful question", "1 of 2 passed", "f(2) – timed out",
                 "Yes, to two digits.", "Solution", "Answer"):
        assert part in text
    shades = shown.each("#episode .assistant", "getComputedStyle(e).backgroundColor")
    assert len(set(shades)) == 2 and shown.complaints() == []


def test_screenshots_stand_side_by_side_and_load(browser, report):
    browser.open(report.as_uri() + "#episode=ours%2Ftask5%2F0")
    browser.run("Promise.all([...document.images].map(image => image.decode())).then(() => 0)")
    assert browser.each(".pages img", "e.naturalWidth") == [4, 4]
    left, right = browser.each(".pages img", "e.getBoundingClientRect().top")
    assert left == right


def test_address_names_the_episode_and_opens_it_again(browser, report):
    browser.open(report.as_uri())
    browser.run("document.querySelectorAll('.row')[3].click()")
    address, title = browser.run("location.href"), browser.text("#episode")
    assert "#episode=" in address
    browser.open(address)
    assert browser.text("#episode") == title


def test_rows_are_buttons_so_that_a_keyboard_reaches_every_dialogue(shown):
    shown.press_enter("document.querySelectorAll('.row')[2]")
    assert shown.each(".row", "e.ariaCurrent").index("true") == 2
    assert "task1" in shown.text("#episode")


def test_hostile_text_shows_as_text_and_runs_nothing(browser, tmp_path):
    hostile = {"text": HOSTILE, "answer": HOSTILE, "credits": [HOSTILE]}
    rows = [episode(task, reasons={HOSTILE: HOSTILE}, **hostile) for task in (0, 1)]
    rows[0]["task"] |= {"problem_description": HOSTILE, "ground_truth": HOSTILE, "task_id": HOSTILE}
    rows[0]["dialogue_history"][1]["output"] = HOSTILE + " thought"
    rows[0]["screenshot"] = 'x" onerror="window.hacked = 5'
    rows[1] |= {"error": HOSTILE, "reward": None, "success": None}
    rows[1]["task"]["task_id"] = "__proto__"
    name = "<script>window.hacked(6)<b>"
    flags = ["--metrics", f"{name}={write_sweet(tmp_path / name)}"]
    report = write_report(tmp_path / "<b onclick=alert(1)>", *flags, **{name: rows})
    browser.open(report.as_uri())
    rows = "document.querySelectorAll('.row')"
    browser.run(f"{rows}[1].click(); {rows}[0].click()")
    browser.run("for (const part of document.querySelectorAll('details')) part.open = true")
    time.sleep(0.2)  # for handlers that must not run
    assert browser.run("window.hacked") is None and browser.count("script") == 3
    assert browser.count("a, iframe, [onerror], [onclick]") == 0 and browser.count("img") == 1
    shown = browser.run("document.getElementById('episode').textContent")
    assert shown.count(HOSTILE) >= 6
    for part in ("#tables tbody", "#results", "#training", "#policies", "#sentences"):
        assert name in browser.run(f"document.querySelector('{part}').textContent")
    requests = [event for event in browser.complaints() if event["method"] != "Log.entryAdded"]
    assert requests == []


@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_its_width(browser, report, width):
    browser.open(report.as_uri(), width)
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_2500_episodes_open_within_seconds_in_5_megabytes(browser, tmp_path):
    """Texts of a real task's length that hardly compress, as different words do."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(4000)]
    scores = {"advantages": [0.1, 0.2]}
    policies = {
        name: [episode(task, text=" ".join(draw.choices(words, k=250)), **scores)
               for task in range(500)]
        for name in "abcde"
    }
    report = write_report(tmp_path, **policies)
    assert report.stat().st_size < 5_000_000
    seconds = []
    for _ in range(3):  # the best of three, as the machine may have other things to do
        start = time.monotonic()
        browser.open(report.as_uri())
        seconds.append(time.monotonic() - start)
    assert browser.text("#count") == "2500 of 2500 dialogues, 500 of 500 tasks"
    assert browser.count(".row") <= 300 and min(seconds) < 4
    browser.set("search", "number 249")
    assert browser.text("#count").startswith("5 of 2500")


def unpacked(*arguments):
    packed = page.packed_episodes(*arguments)
    return json.loads(zlib.decompress(base64.b64decode(packed))), len(packed)


def test_no_more_pages_are_drawn_than_the_file_can_hold(monkeypatch):
    picture, drawn = png("red"), []
    browser = types.SimpleNamespace(picture=lambda html: drawn.append(html) or picture)
    episodes = [episode(task, answer=f"<html>{task}</html>", screenshot=None, error=None,
                        solution_screenshot=None) for task in range(10)]
    monkeypatch.setattr(page, "PAGE_BYTES", 5 * len(page.thumbnail(picture)))
    page.add_screenshots(episodes, browser)
    assert len(drawn) == len(set(drawn)) == 6
    assert episodes[0]["screenshot"] and not episodes[9]["screenshot"]


def test_the_critic_reads_all_dialogues_that_the_file_can_hold_and_not_many_more(monkeypatch):
    draw = random.Random(0)
    run = [complete_episode(episode(task, text=draw.randbytes(1000).hex(), advantages=[9.0, 9.0]))
           for task in range(200)]
    critic, read = critic_of([1.0, 1.0])
    monkeypatch.setattr(page, "PAGE_BYTES", 60_000)
    page.annotate({"p": [run]}, critic, ())
    held, _ = unpacked({"p": [run]}, page.PAGE_BYTES)
    assert held["scale"] == 1.0  # not that of the file's own advantages
    held = [record for task in held["tasks"] for record in task["episodes"]]
    assert all(record["advantages"] == [1.0, 1.0] for record in held)
    assert 0 < len(held) <= len(read) < 2 * len(held) < 200


def test_the_strongest_shade_is_that_of_all_but_the_largest_twentieth():
    rows = [complete_episode(episode(task)) for task in range(10)]
    for index, row in enumerate(rows):
        row["advantages"] = [float(index), -10.0 - index if index < 9 else 1000.0]
    assert unpacked({"p": [rows]}, 10**6)[0]["scale"] == 18.0
    rows[0]["advantages"] = rows[1]["advantages"] = [None, float("nan")]
    assert unpacked({"p": [rows[:2]]}, 10**6)[0]["scale"] == 1.0


def test_of_a_task_with_more_episodes_than_the_file_can_hold_the_first_ones_are_kept():
    draw = random.Random(0)
    runs = [[episode(task, sample=sample, text=draw.randbytes(1000).hex())
             for sample in range(samples)] for task, samples in ((0, 10), (1, 2))]
    _, size = unpacked({"p": runs}, 10**6)
    held, _ = unpacked({"p": runs}, size // 2)
    assert 0 < held["omitted"]["episodes"] < 10
    (task,) = held["tasks"]
    kept = 12 - held["omitted"]["episodes"]
    assert [int(record["sample"]) for record in task["episodes"]] == list(range(kept))


def test_an_agent_beside_the_run_json_of_another_program_is_reported(tmp_path):
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/run.json").write_text('{"foo": 1}')
    assert write_report(tmp_path, p=[episode(0, agent=str(tmp_path / "agent"))]).exists()


def test_shared_pictures_are_stored_once_and_too_much_omits_pictures_then_episodes():
    draw = random.Random(0)
    run = [episode(task, screenshot=base64.b64encode(draw.randbytes(3000)).decode(), error=None,
                   solution_screenshot="shared") for task in range(10)]
    policies = {"p": [run]}
    whole, size = unpacked(policies, 10**6)
    assert len(whole["pictures"]) == 11 and whole["omitted"] == {"episodes": 0, "screenshots": 0}
    tight, tight_size = unpacked(policies, size - 8000)
    assert tight["omitted"]["episodes"] == 0 < tight["omitted"]["screenshots"] < 10
    assert len(tight["tasks"]) == 10 and tight_size <= size - 8000
    tiny, tiny_size = unpacked(policies, 650)
    assert 0 < tiny["omitted"]["episodes"] < 10 and tiny["pictures"] == [] and tiny_size <= 650


def test_episodes_of_a_second_seed_have_names_of_their_own():
    row = complete_episode(episode(0))
    found = [page.episode_record("p", seed, row) for seed in (0, 1)]
    assert [record["id"] for record in found] == ["p/task0/0", "p/task0/0, seed 1"]
    assert [record["sample"] for record in found] == ["0", "0, seed 1"]


def test_a_leak_of_half_of_the_solution_is_one_as_in_the_tables():
    rows = [complete_episode(episode(0) | {"leak": leak}) for leak in (0.499, 0.5)]
    assert [page.episode_record("p", 0, row)["leaking"] for row in rows] == [False, True]


def test_training_can_be_watched_before_there_are_episodes(browser, tmp_path, capsys):
    metrics, report = write_sweet(tmp_path / "sweet"), tmp_path / "watched" / "report.html"
    with open(metrics, "a") as file:
        file.write('{"step": 40, "train/lo')  # the run still writes
    make_report("--metrics", f"sweet={metrics}", "--output", report)
    told = ("sweet: step 39, loss 1.04 nats, training pairs ranked right 90 %,"
            " margin of chosen over rejected 0.963 nats.")
    assert told in capsys.readouterr().out
    assert [path.name for path in report.parent.iterdir()] == ["report.html"]
    browser.open(report.as_uri())
    assert browser.text("#sentences") == told
    assert browser.each("section[id]:not([hidden])", "e.id") == ["training"]
    assert browser.count("#training figure") == 4 and browser.complaints() == []


def test_page_is_one_file_with_a_policy_that_allows_nothing_else(report):
    page = report.read_text()
    assert "default-src 'none'" in page and "unsafe" not in page
    assert not re.findall(r"(?:src|href)=[\"']?(?:http|//)", page) and "innerHTML" not in page


# -----------------------------------------------------------------------------
# Training runs


def test_what_a_fork_logs_of_its_training_is_drawn_under_its_own_name(tmp_path):
    steps = [{"step": step, "train/loss": 1.0, "train/kl": 0.1 * step} for step in range(9)]
    run = read_training("fork", write_run(tmp_path, steps, "train_policy.py"))
    assert [(curve["title"], curve["folded"]) for curve in charts.training_curves(run)] == [
        ("Loss", False), ("train/kl", True)]


def test_runs_of_one_method_are_told_apart_by_the_flags_that_differ(tmp_path):
    flags = {"privileged": "ground_truth", "nll": 0.01, "model": "toy/base", "seed": 0,
             "packed": False, "episodes": ["e"]}
    runs = []
    for name, script, more in (("a", "train_critic.py", {}), ("b", "train_critic.py", {
            "nll": 0.0, "packed": True, "episodes": ["e", "f"]}),
                               ("policy", "train_policy.py", {"candidates": "c", "nll": 3.0})):
        (tmp_path / name).mkdir()
        steps = [{"step": 0, "train/loss": 1.0}]
        runs.append(read_training(name, write_run(tmp_path / name, steps, script, **flags | more)))
    critic = "log-ratio critic that sees the solution, from toy/base"
    assert [method_among(run, runs[:2]) for run in runs[:2]] == [
        f"{critic}, --nll 0.01, --episodes e", f"{critic}, --nll 0.0, --packed, --episodes e f"]
    assert method_among(runs[0], runs[::2]) == critic
    assert method_among(runs[2], runs).endswith("from toy/base")


def test_a_page_that_cannot_be_written_fails_before_the_work(tmp_path):
    with pytest.raises(OSError, match="'/proc"):  # where even root creates no file
        make_report(f"x={tmp_path / 'missing.jsonl'}", "--output", "/proc/x.html")


def test_training_curves_skip_what_is_not_finite_and_stay_small(tmp_path):
    lines = []
    for step in range(5000):
        loss = float("nan") if step == 5 else 1.0
        lines.append({"step": step, "train/loss": loss, "time/step": 1, "other": 1})
    run = read_training("run", write_rows(tmp_path / "metrics.jsonl", lines))
    (curve,) = charts.training_curves(run)
    points = curve["points"]
    assert curve["title"] == "Loss" and len(points) <= 200
    assert {value for _, value in points} == {1.0}
    assert [points[0][0], points[-1][0]] == [0, 4999]


def test_a_smoothed_point_is_the_mean_of_the_steps_around_it():
    points, window = charts.smoothed([(step, step ** 2) for step in range(40)])
    assert window == 3 and points[0] == (0, 0.5) and points[-1] == (39, (38 ** 2 + 39 ** 2) / 2)
    assert points[20] == (20, pytest.approx((19 ** 2 + 20 ** 2 + 21 ** 2) / 3))
    assert charts.smoothed([(step, step) for step in range(9)])[1] == 1


def test_only_the_last_line_of_metrics_may_be_half_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step')  # a training that still writes
    assert [row["step"] for row in read_training("run", path).rows] == [0, 1]
    path.write_text('{"step": 0}\n{"step\n{"step": 2}\n')
    with pytest.raises(SystemExit, match=f"{path}: line 2: found broken JSON"):
        read_training("run", path)


def test_a_file_without_steps_is_refused_as_metrics(tmp_path):
    path = write_rows(tmp_path / "episodes.jsonl", [episode(0)])
    with pytest.raises(SystemExit, match=f"{path}: found a line without a step, expected"):
        read_training("run", path)


@pytest.mark.parametrize("seed", [0, 3])
def test_held_out_tasks_are_those_of_the_critics_files_and_seed_and_none_if_a_file_has_changed(
        tmp_path, seed):
    rows = read_rows(write_episodes(tmp_path / "all.jsonl", tasks=20, samples=1))
    files = [str(write_rows(tmp_path / f"{index}.jsonl", rows[10 * index:10 * index + 10]))
             for index in range(2)]
    record = {"flags": {"episodes": files, "holdout": 0.2, "seed": seed},
              "inputs": {name: file_hash(name) for name in files}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    ids = [row["task"]["task_id"] for row in rows]
    assert held_out_tasks(tmp_path) == set(split_tasks(ids, 0.2, seed)[1])
    assert split_tasks(ids, 0.2, 0)[1] != split_tasks(ids, 0.2, 3)[1]
    write_rows(tmp_path / "1.jsonl", rows[:1])
    assert held_out_tasks(tmp_path) == set()


# -----------------------------------------------------------------------------
# Pairs for other trainers


def test_pairs_are_those_that_the_trainer_draws_in_the_form_of_trl(tmp_path, capsys):
    failed = ranked(4, error="gone", candidates=None, finished=None)
    states = [*map(ranked, range(3)), ranked(3, finished=[False, True, True, True]), failed,
              ranked(5, advantages=None)]
    path, output = write_rows(tmp_path / "ranked.jsonl", states), tmp_path / "pairs.jsonl"
    make_report("pairs", path, "--output", output, "--pairs_per_state", 3, "--seed", 7)
    rows = read_rows(output)
    expected = [(state["task"]["task_id"], *pair) for state in states[:4]
                for pair in state_pairs(state, "halves", 3, 7)]
    assert len(rows) == len(expected) == 12
    for row, (task_id, chosen, rejected) in zip(rows, expected, strict=True):
        assert row["prompt"] == states[0]["messages"]
        assert row["chosen"] == [{"role": "assistant", "content": f"Which unit? {chosen}"}]
        assert row["rejected"] == [{"role": "assistant", "content": f"Which unit? {rejected}"}]
        assert row["finished"] == [task_id != "task3" or chosen != 0, True]
    count = sum(not row["finished"][0] for row in rows)
    assert capsys.readouterr().out.startswith(
        f"{output}: 12 pairs of 4 states (2 more have no advantages); {count} with a candidate that"
        " was cut at the token limit")
    make_report("pairs", path, "--output", output, "--pairs_per_state", 3, "--seed", 7)  # the same
    for existing in (path, output):  # the input; what other flags have written
        with pytest.raises(SystemExit, match=f"{existing}: found something else than what this"):
            make_report("pairs", path, "--output", existing)
    assert read_rows(output) == rows and len(read_rows(path)) == len(states)


def test_candidates_that_give_no_pair_leave_no_file(tmp_path):
    path = write_rows(tmp_path / "ranked.jsonl", [ranked(0, advantages=[0.5] * 4)])
    with pytest.raises(SystemExit, match="found no pair with --pairing halves, expected"):
        make_report("pairs", path, "--output", tmp_path / "pairs.jsonl")
    assert not (tmp_path / "pairs.jsonl").exists()


@pytest.mark.parametrize("finished", [(True, False), (False, True), (True, True)])
def test_pairs_with_a_cut_side_and_bad_chosen_sides_are_counted(tmp_path, capsys, finished):
    for chosen in (0.1, -0.1):
        state = ranked_state({"a": chosen, "b": -0.2}, finished=list(finished))
        path = write_rows(tmp_path / f"{chosen}.jsonl", [state])
        make_report("pairs", path, "--output", tmp_path / f"pairs{chosen}.jsonl")
        said = capsys.readouterr().out
        assert ("1 with a candidate that was cut" in said) == (not all(finished))
        assert ("1 chosen candidates have an advantage below 0" in said) == (chosen < 0)
        row, = read_rows(tmp_path / f"pairs{chosen}.jsonl")
        assert row["finished"] == list(finished) and row["advantages"] == [chosen, -0.2]
