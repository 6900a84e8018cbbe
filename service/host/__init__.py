"""The process and its machine: signals, allocator, open files, thread budget."""
