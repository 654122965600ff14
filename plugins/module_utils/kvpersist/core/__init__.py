"""Pure functions and dataclasses. Imports the standard library and its own room, nothing else."""
