"""Foreign files to ours: trajectories and logs (colbench.py import), WebSight rows."""
