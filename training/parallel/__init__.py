"""What is spread over ranks: for now, class centers on one."""
