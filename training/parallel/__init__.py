"""The parts of a training that are spread over processes: samples, class centers, and the tower."""
