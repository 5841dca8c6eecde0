"""The adapter that `levade chat pypi:levade-calculator` loads. `PATH` is the directory of its files."""

from pathlib import Path

PATH = Path(__file__).parent / "model"
