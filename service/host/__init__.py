"""The process and its machine: signals, child processes, the allocator, the thread budget."""
