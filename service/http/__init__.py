"""The parts that know HTTP: the application, its routes, and the dialects that it speaks."""
