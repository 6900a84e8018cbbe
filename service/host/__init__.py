"""The process on its machine: signals, the allocator, the thread budget."""
