"""How a script runs: processes, files that survive a kill, run.json, machine flags, models.

Nothing here knows a loss or a pair.
"""
