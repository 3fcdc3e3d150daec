"""Files that stages exchange: readers, ranked candidates, import of logs and WebSight rows."""
