"""The plan of work that one machine is too small for: hours, memory, storage, network and money."""
