"""The models an agent talks to: what one must be, how its answers are read, and one by script."""
