"""Real launchers on one Linux host for `launch.py`, each with two machines, and their shared code."""
