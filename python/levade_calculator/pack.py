"""Builds the wheel of this package from a checkpoint of an adapter.

The weights are not in the repository. README.md says how they are trained.

    python3 python/levade_calculator/pack.py runs/adapter/checkpoints/best --out dist
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parents[1] / "recipes/calculator/recipe.toml"
FILES = ["adapter_config.json", "adapter_model.safetensors"]


def resolve(checkpoint: Path) -> Path:
    """Returns the directory of a checkpoint. `checkpoints/best` is a file that contains its name."""
    return checkpoint.with_name(checkpoint.read_text().strip()) if checkpoint.is_file() else checkpoint


def main() -> None:
    """Copies the package, the adapter and the recipe to a temporary directory, and builds the wheel there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="directory with an adapter, or checkpoints/best of a run")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="directory of the wheel [default: dist]")
    arguments = parser.parse_args()
    checkpoint = resolve(arguments.checkpoint)
    missing = [name for name in FILES if not (checkpoint / name).is_file()]
    if missing:
        sys.exit(f"{checkpoint} has no {missing[0]}; name a checkpoint of a run with model.lora")
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "package"
        shutil.copytree(HERE, package)
        model = package / "src/levade_calculator/model"
        model.mkdir()
        for path in [*(checkpoint / name for name in FILES), RECIPE]:
            shutil.copy(path, model)
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", arguments.out, package]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
