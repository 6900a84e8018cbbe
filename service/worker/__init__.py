"""`mlcd worker`: performs the tasks of batch jobs."""
