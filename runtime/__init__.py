"""How a script runs: processes, files that survive a kill, run.json, machine flags, models.

Nothing here computes a loss or knows a pair; messages read metrics by their names.
"""
