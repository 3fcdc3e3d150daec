"""`python -m report`: a page from episodes and metrics. No script needs it."""
