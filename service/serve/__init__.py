"""The processes of `mlcd serve`: one server process, or several on one port."""
