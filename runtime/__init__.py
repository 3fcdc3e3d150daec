"""How a script runs: processes, files that survive a kill, run.json, machine flags, models.

Nothing here knows a loss, a pair or a task. Rows of files are checked, and results put into words.
"""
