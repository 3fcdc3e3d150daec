"""The commands of colbench.py: check, import, show, websight."""

import argparse

from formats.check import check_tasks
from formats.logs import import_command
from formats.websight import websight
from runtime.processes import launch


def main(description, argv=None):
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="grade every solution against itself; exit status 1"
                                " if a task cannot be solved in full")
    check.add_argument("tasks", help="task file")
    check.add_argument("--judge", choices=("fixed", "official"), default="fixed",
                       help="grading semantics")
    check.add_argument("--require_protection", action="store_true",
                       help="refuse if the sandbox lacks a protection")
    load = commands.add_parser("import", help="make episodes of official trajectories or of logs")
    load.add_argument("file", help="JSONL: the official trajectories, or one object a line with"
                      " `messages` and `reward`")
    load.add_argument("--output", required=True, help="EPISODES.jsonl to write")
    load.add_argument("--agent_prompt", help="file with the instructions that the agent had, where"
                      " the file omits them (default: ours; of logs none)")
    load.add_argument("--judge", choices=("fixed", "official"), default="fixed",
                      help="how official answers without a reward are graded")
    show = commands.add_parser("show", help="print dialogues to read")
    show.add_argument("episodes", help="file of episodes")
    show.add_argument("task", nargs="?", help="task_id of the one task to show, or its number from"
                      " 1 on (default: all)")
    convert = commands.add_parser("websight", help="turn WebSight rows into frontend tasks")
    convert.add_argument("rows", help="JSONL with llm_generated_idea and text")
    convert.add_argument("train", help="task file for the first 10,000 rows")
    convert.add_argument("test", nargs="?", help="task file for the rows after them")
    launch(run_command, parser.parse_args(argv), advice="Rerun the same command.")


def run_command(args):
    if args.command == "check":
        if not check_tasks(args.tasks, args.judge, args.require_protection):
            raise SystemExit(1)  # the table above says why
    elif args.command == "import":
        import_command(args)
    elif args.command == "show":
        from report.show import show_command  # late: report/ stands above
        show_command(args)
    else:
        websight(args.rows, args.train, args.test)
