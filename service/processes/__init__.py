"""Several server processes on one port: a supervisor and what it starts."""
