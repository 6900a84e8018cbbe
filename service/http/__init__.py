"""Everything that knows HTTP: the application, its routes, and the languages that it speaks."""
