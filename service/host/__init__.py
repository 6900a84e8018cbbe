"""The process on its machine: signals, child processes, the allocator, the thread budget."""
