"""The adapter that `levade chat pypi:levade-calculator` loads. Its files lie in `PATH`."""

from pathlib import Path

PATH = Path(__file__).parent / "model"
