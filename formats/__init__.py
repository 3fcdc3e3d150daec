"""Files that stages exchange: readers of ours, import of trajectories, logs and WebSight rows."""
