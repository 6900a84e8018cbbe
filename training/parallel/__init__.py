"""What is spread over the processes of a training: samples, class centers and, on request, the tower."""
