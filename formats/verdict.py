"""What evaluate.py says of its results: who won, what to beware of, and tables."""

import math

from runtime.names import GRADER
from runtime.text import harmless, with_interval


def verdict(results):
    """Sentences: the best policy against the next best, the others, then what to beware of, and
    what else than the policies may explain a difference.
    """
    policies = results["policies"]
    return [*who_won(results), *cautions(results), *different_humans(policies),
            *different_rules(policies), *different_judges(policies),
            *choices_among_candidates(policies)]


def who_won(results):
    """Sentences: the best policy and the next best, then how the best leads each of the others."""
    if not results["ranking"]:
        return ["No policy has an episode without an error, so there is nothing to compare."]
    best, *others = results["ranking"]
    if results["leads"]:
        first, *further = results["leads"]
        sentences = first_lead(first, results) + further_leads(further, results)
    else:
        sentences = [f"{achievement(name, results)} {of_what(results)}."
                     for name in results["policies"] if name in results["ranking"]]
    compared = {lead["against"] for lead in results["leads"]}
    apart = [name for name in others if name not in compared]
    if apart:
        sentences.append(f"No task was finished by both {best} and {' or '.join(apart)}, so these"
                         " are not compared.")
    if not all(map(is_ahead, results["leads"])):
        sentences.append("Settled: the interval excludes 0, and the sign test agrees, with p below"
                         " 0.05.")
    return sentences


def first_lead(lead, results):
    """Sentences on the best policy and the first one that it is compared with."""
    best, second = lead["policy"], lead["against"]
    solved = f"{achievement(best, results)} {of_what(results)}"
    points = in_points(lead["difference"], results)
    if lead["tasks"] < results["tasks"]:
        points += f" on the tasks that both finished ({lead['tasks']})"
    next_best = ", the next best" if second == results["ranking"][1] else ""
    if is_ahead(lead):
        return [f"{best} wins: {solved}, {points} more than {second}{next_best}."]
    return [f"The winner is not settled: {solved}, {achievement(second, results)}; the difference"
            f" is {points}, sign test p = {lead['sign_test_p']:.2g}."]


def further_leads(leads, results):
    """Sentences on the best policy and the others that it is compared with."""
    best = results["ranking"][0]
    factor, digits = scale(results["metric"], results)
    sentences, clauses, level = [], [], []
    for lead in leads:
        other, points = lead["against"], in_points(lead["difference"], results)
        if abs(factor * lead["difference"]["value"]) < 0.5 * 10**-digits:  # it is written as 0
            level.append(other)
        elif lead["difference"]["value"] < 0:  # errors kept the best from harder tasks
            sentences.append(f"On the tasks that {best} and {other} both finished"
                             f" ({lead['tasks']}), the difference is {points}.")
        elif lead["settled"]:
            clauses.append(f"{other} by {points}")
        else:
            clauses.append(f"{other} by {points}, which is not settled (sign test p ="
                           f" {lead['sign_test_p']:.2g})")
    if clauses:
        sentences.append(f"{best} leads {'; '.join(clauses)}.")
    if level:
        sentences.append(f"{best} is level with {' and '.join(level)}.")
    return sentences


def of_what(results):
    """What a policy solves a share of, or the name of the reward that it reaches."""
    if results["metric"] == "reward":
        return f"({heading('reward', results)})"
    return "of the tasks"


def in_points(difference, results):
    """Such as "18.0 points [12.6, 23.6]"; of the rewards of logs "1.500 [0.500, 2.500]"."""
    factor, _ = scale(results["metric"], results)
    return written(difference, results["metric"], results, " points" if factor == 100 else "")


def achievement(name, results):
    """Such as "sweet solves 56.8 % [53.7, 59.9]"."""
    metric = results["metric"]
    number = results["policies"][name]["numbers"][metric]
    if metric == "success":
        return f"{name} solves {written(number, metric, results, ' %')}"
    return f"{name} reaches {written(number, metric, results)}"


def is_ahead(lead):
    """Whether the first policy of `lead` is settled to be better on the tasks that both finished.

    Its mean over all tasks is the best, but maybe only because errors kept it from harder ones.
    """
    return lead["settled"] and lead["difference"]["value"] > 0


def cautions(results):
    """Sentences on what makes the numbers mean less than they seem to."""
    if results["leads"] and min(policy["seeds"] for policy in results["policies"].values()) < 3:
        yield ("With fewer than three seeds of a policy, the intervals hardly cover how much"
               " another training run would differ.")
    if results["unsolvable"]:
        yield (f"{results['unsolvable']} of {results['tasks']} tasks cannot be solved by their own"
               " solution; these count as not solved.")
    for name, policy in results["policies"].items():
        if policy["copies"]:
            different = policy["seeds"] - policy["copies"]
            yield (f"The {policy['seeds']} files of {name} are only {different} different ones and"
                   " copies of these, so the intervals are too narrow; collect each seed with its"
                   " own --seed.")
        if policy["errors"]:
            reason, _ = policy["errors"].most_common(1)[0]
            reason = harmless(" ".join(reason.split()))[:300]
            yield (f"An error stopped {policy['errors'].total()} of {policy['episodes']} dialogues"
                   f" of {name}, which count nowhere else; the most frequent: {reason}")
    silent = []
    for name, policy in results["policies"].items():
        number = policy["numbers"]["no_answer"]
        if number and number["value"] > 0.5:
            silent.append(f"{name} {100 * number['value']:.0f} %")
    if silent:
        yield (f"More than half of the episodes end without an answer ({', '.join(silent)}):"
               " success there says more about whether a policy answers at all than about its"
               " answers.")


def different_humans(policies):
    humans = {harmless(human) for policy in policies.values() for human in policy["humans"]}
    if len(humans) > 1:
        yield (f"The dialogues were held with different humans ({', '.join(sorted(humans))}), so"
               " differences between policies may be due to them.")


def different_rules(policies):
    """A sentence on limits of turns or, where these agree, on instructions.

    A policy with a single turn is a baseline, which differs in both from those with several.
    """
    limits = {name: policy["max_turns"] for name, policy in policies.items()
              if policy["max_turns"] and policy["max_turns"] > 1}
    prompts = [  # of policies with several turns, of those with one
        {tuple(policy["prompts"]) for policy in policies.values()
         if policy["prompts"] and (policy["max_turns"] == 1) == single}
        for single in (False, True)]
    if len(set(limits.values())) > 1:
        listed = ", ".join(f"{name} {limit}" for name, limit in limits.items())
        yield (f"The policies had different numbers of turns (--max_turns: {listed}), so"
               " differences may be due to them.")
    elif max(map(len, prompts)) > 1:
        yield ("The agents had different instructions (agent_prompt in the episodes), so"
               " differences may be due to them.")


def different_judges(policies):
    judges = {name: " or ".join(policy["judges"]) for name, policy in policies.items()
              if policy["judges"]}
    if len(set(judges.values())) > 1:
        listed = ", ".join(f"{name} {harmless(judge) or 'the defaults'}"
                           for name, judge in judges.items())
        yield (f"The answers were graded with different flags ({listed}), so differences may be"
               " due to them.")


def choices_among_candidates(policies):
    """A sentence for each policy whose turns were chosen among candidates."""
    for name, policy in policies.items():
        for count, scorer in policy["best_of"]:
            sentence = (f"Each turn of {name} was the best of {count} candidates by"
                        f" {harmless(scorer)}.")
            if not scorer.startswith(GRADER):  # a language model, which sees no solution
                sentence += (" A critic that sees the solution cannot choose for a deployed"
                             " policy.")
            yield sentence


# -----------------------------------------------------------------------------
# Tables: rows of texts, the headings first


HEADINGS = {  # number -> heading, factor
    "success": ("Success %", 100),
    "reward": ("", None),  # each domain has its own
    "turns": ("Turns", 1),
    "words": ("Agent words", 1),
    "no_answer": ("No answer %", 100),
    "errors": ("Errors %", 100),
    "leaking": ("Leaking %", 100),
    "clean_success": ("Success without leaks %", 100),
}


def heading(key, results):
    return results["reward_heading"] if key == "reward" else HEADINGS[key][0]


def scale(key, results):
    """(what a number is multiplied by, its decimal places); rewards of logs may be tiny."""
    if key != "reward":
        return HEADINGS[key][1], 1
    if results["reward_factor"] != 1:
        return results["reward_factor"], 1
    rewards = [policy["numbers"]["reward"] for policy in results["policies"].values()]
    largest = max((abs(reward["value"]) for reward in rewards if reward), default=0)
    digits = 2 - math.floor(math.log10(largest)) if largest else 3
    return 1, min(100, max(3, digits))  # 100: a browser writes no more


def written(number, key, results, unit="", sign=""):
    factor, digits = scale(key, results)
    return with_interval(number, factor, unit, sign, digits)


def policy_table(results):
    """A policy a row; a column for the main number and for those that are not zero for all."""
    policies, metric = results["policies"], results["metric"]
    keys = []
    for key in HEADINGS:
        found = [policy["numbers"][key] for policy in policies.values() if policy["numbers"][key]]
        if any(number["value"] for number in found) or (found and key == metric):
            keys.append(key)
    if "leaking" not in keys and "clean_success" in keys:
        keys.remove("clean_success")  # it is the success
    rows = [["Policy", "Tasks", "Episodes", *(heading(key, results) for key in keys)]]
    for name, policy in policies.items():
        counts = [f"{count:,}" for count in (results["tasks"], policy["episodes"])]
        cells = [written(policy["numbers"][key], key, results) for key in keys]
        rows.append([name, *counts, *cells])
    return rows


def pair_table(results):
    """One row for each comparison with the first policy; those of the main number come first."""
    rows = [["Comparison", "Number", "Difference", "Settled", "Won / lost / tied", "Win rate %",
             "Sign test p"]]
    metric = results["metric"]
    for pair in sorted(results["comparisons"], key=lambda pair: pair["metric"] != metric):
        ties = pair["tasks"] - pair["wins"] - pair["losses"]
        rows.append([
            f"{pair['policy']} − {pair['against']}",
            heading(pair["metric"], results),
            written(pair["difference"], pair["metric"], results, sign="+"),
            "yes" if pair["settled"] else "no",
            f"{pair['wins']} / {pair['losses']} / {ties}",
            with_interval(pair["win_rate"], 100),
            f"{pair['sign_test_p']:.2g}",
        ])
    return rows


def all_tables(results):
    tables = [policy_table(results)]
    if results["comparisons"]:
        tables.append(pair_table(results))
    return tables
