"""What evaluate.py says of its results in words and tables."""

import typing

from colbench import DOMAINS, counted, harmless

REASON_CHARACTERS = 300  # of an error in a sentence

HEADINGS = {  # number -> heading, factor; the domain names the reward
    "success": ("Success %", 100),
    "reward": (None, 100),
    "turns": ("Turns", 1),
    "tokens": ("Agent tokens", 1),
    "no_answer": ("No answer %", 100),
    "errors": ("Errors %", 100),
    "leaking": ("Leaking %", 100),
    "clean_success": ("Success without leaks %", 100),
}


def main_metric(results):
    """The number that decides who is better: success, or the reward where there is no success."""
    return "success" if DOMAINS[results["domain"]].has_success else "reward"


def with_interval(number, factor, sign=""):
    """("56.8", "[53.7, 59.9]"); dashes where there is nothing to count, or no interval."""
    if number is None:
        return "–", ""
    value = f"{factor * number['value']:{sign}.1f}"
    if number["low"] is None:
        return value, "[–]"
    low, high = (f"{factor * number[key]:{sign}.1f}" for key in ("low", "high"))
    return value, f"[{low}, {high}]"


def in_words(number, unit):
    """A share or a difference of shares as "56.8 % [53.7, 59.9]"."""
    value, ends = with_interval(number, 100)
    return f"{value} {unit} {ends}"


def verdict(results):
    """Sentences on who won: the best policy against the next best, then against the others."""
    metric, leads = main_metric(results), results["leads"]
    text, factor = heading(metric, results)
    achieved = {}
    for name, policy in results["policies"].items():
        number = policy["numbers"][metric]
        if number and metric == "success":
            achieved[name] = f"solves {in_words(number, '%')}"
        elif number:
            achieved[name] = f"reaches {' '.join(with_interval(number, factor))}"
    of_what = "of the tasks" if metric == "success" else f"({text})"
    if not achieved:
        nothing = "No policy has an episode without an error, so there is nothing to compare."
        return [nothing, *stopped_dialogues(results)]
    if leads:
        first, second = leads[0]["policy"], leads[0]["against"]
        points = in_words(leads[0]["difference"], "points")
        if leads[0]["tasks"] < results["tasks"]:
            points += f" on the {counted(leads[0]['tasks'], 'task')} that both finished"
        if is_ahead(leads[0]):
            sentences = [f"{first} wins: {first} {achieved[first]} {of_what}, {points} more than"
                         f" {second}, the next best."]
        else:
            sentences = [f"The winner is not settled: {first} {achieved[first]} {of_what},"
                         f" {second} {achieved[second]}; the difference is {points},"
                         f" {p_value(leads[0])}."]
    else:
        sentences = [f"{name} {words} {of_what}." for name, words in achieved.items()]
    others = []
    for pair in leads[1:]:
        doubt = "" if is_ahead(pair) else f", which is not settled ({p_value(pair)})"
        others.append(f"{pair['against']} by {in_words(pair['difference'], 'points')}{doubt}")
    if others:
        sentences.append(f"{first} leads {'; '.join(others)}.")
    return [*sentences, *tasks_nobody_solves(results), *stopped_dialogues(results),
            *silent_policies(results), *different_humans(results)]


def is_ahead(pair):
    """Whether the first policy is settled to be the better one on the tasks that both finished.

    The best mean can be that of a policy which an error kept from the harder tasks.
    """
    return pair["settled"] and pair["difference"]["value"] > 0


def p_value(pair):
    return f"sign test p = {pair['sign_test_p']:.2g}"


def tasks_nobody_solves(results):
    """A sentence on the tasks that no policy can solve."""
    if not results["unsolvable"]:
        return []
    return [f"{results['unsolvable']} of {results['tasks']} tasks cannot be solved by their own"
            " solution; these count as not solved."]


def stopped_dialogues(results):
    """A sentence for each policy that an error kept from finishing its dialogues."""
    sentences = []
    for name, policy in results["policies"].items():
        if policy["errors"]:
            reason = max(policy["errors"], key=policy["errors"].get)
            reason = harmless(" ".join(reason.split()))[:REASON_CHARACTERS]
            count = sum(policy["errors"].values())
            sentences.append(f"An error stopped {count} of {policy['episodes']} dialogues of"
                             f" {name}, which count nowhere else; the most frequent: {reason}")
    return sentences


def silent_policies(results):
    """A sentence for each policy that mostly sends questions where answers are graded."""
    sentences = []
    for name, policy in results["policies"].items():
        silent = policy["numbers"]["no_answer"]
        if silent and silent["value"] > 0.5:
            sentences.append(f"{100 * silent['value']:.0f} % of the episodes of {name} end without"
                             " an answer: its success says little about its answers.")
    return sentences


def different_humans(results):
    """A sentence where not all dialogues were held with the same human."""
    humans = sorted({human for policy in results["policies"].values()
                     for human in policy["humans"]})
    if len(humans) < 2:
        return []
    return [f"The dialogues were held with different humans ({', '.join(humans)}), so differences"
            " between policies may be due to them."]


class Table(typing.NamedTuple):
    title: str
    headings: list
    rows: list  # of cells (text, interval); the interval may be empty
    folded: bool = False  # only a click away in the report, and not on the terminal


def heading(key, results):
    """(heading, factor) of a number."""
    if key.startswith("pass^"):
        return f"{key} %", 100
    text, factor = HEADINGS[key]
    if key == "reward":
        text = DOMAINS[results["domain"]].reward_heading
    if key == "tokens" and not results["in_tokens"]:
        text = "Agent words"
    return text, factor


def all_tables(results):
    tables = [policy_table(results)]
    _, zeros = number_keys(results)
    if zeros:
        tables.append(number_table("Zero for every policy", results, zeros, folded=True))
    metric = main_metric(results)
    for pairs, folded in (
        ([pair for pair in results["pairs"] if pair["metric"] == metric], False),
        ([pair for pair in results["pairs"] if pair["metric"] != metric], True),
    ):
        if pairs:
            tables.append(pair_table(results, pairs, folded))
    return tables


def number_keys(results):
    """(numbers to show, numbers that are zero for every policy).

    The main metric is always shown. A number that no policy has is in neither, nor is success
    without leaks where nothing leaks.
    """
    metric = main_metric(results)
    shown, zeros = [], []
    numbers = [policy["numbers"] for policy in results["policies"].values()]
    for key in numbers[0]:
        found = [policy[key]["value"] for policy in numbers if policy[key]]
        if any(found) or (found and key == metric):
            shown.append(key)
        elif found:
            zeros.append(key)
    if "leaking" not in shown and "clean_success" in shown:
        shown.remove("clean_success")
    return shown, zeros


def policy_table(results):
    """One line for each policy, with the main metric and what is not zero for all."""
    shown, _ = number_keys(results)
    return number_table("", results, shown)


def number_table(title, results, keys, folded=False):
    """One policy a row, one number a column."""
    columns = [heading(key, results) for key in keys]
    rows = []
    for name, policy in results["policies"].items():
        counts = [(f"{count:,}", "") for count in (results["tasks"], policy["episodes"])]
        cells = [with_interval(policy["numbers"][key], factor)
                 for key, (_, factor) in zip(keys, columns, strict=True)]
        rows.append([(name, ""), *counts, *cells])
    texts = [text for text, _ in columns]
    return Table(title, ["Policy", "Tasks", "Episodes", *texts], rows, folded)


def pair_table(results, pairs, folded=False):
    """One comparison a row; all pairs compare the same number."""
    rows = []
    for pair in pairs:
        ties = pair["tasks"] - pair["wins"] - pair["losses"]
        rows.append([
            (f"{pair['policy']} − {pair['against']}", ""),
            with_interval(pair["difference"], 100, "+"),
            ("yes" if pair["settled"] else "not settled", ""),
            (f"{pair['wins']} / {pair['losses']} / {ties}", ""),
            with_interval(pair["win_rate"], 100),
            (f"{pair['sign_test_p']:.2g}", ""),
        ])
    text, _ = heading(pairs[0]["metric"], results)
    headings = ["Comparison", "Difference", "Settled", "Won / lost / tied", "Win rate %"]
    return Table(f"{text} compared on the same tasks", [*headings, "Sign test p"], rows, folded)


def lines_of(table, markdown=False):
    """A table as lines of aligned text or of markdown."""
    grid = [table.headings]
    for row in table.rows:
        grid.append([" ".join(part for part in parts if part) for parts in row])
    if markdown:
        grid = [[text.replace("|", "\\|") for text in row] for row in grid]
        grid.insert(1, ["---"] * len(table.headings))
        return ["| " + " | ".join(row) + " |" for row in grid]
    widths = [max(len(text) for text in column) for column in zip(*grid, strict=True)]
    lines = []
    for row in grid:
        padded = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines
