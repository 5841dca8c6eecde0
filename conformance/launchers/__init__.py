"""Real launchers on one Linux host, each with two machines, for `launch.py`; and what they share."""
