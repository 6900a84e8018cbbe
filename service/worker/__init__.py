"""`mlcd worker`: does the work of batch jobs."""
