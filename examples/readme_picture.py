"""Draw the picture of the README from a demo run.

``python examples/readme_picture.py runs/demo docs/images/demo.svg``
"""

import argparse
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

from rocktokens.cli.demo import movement_table
from rocktokens.demo import measure_movement
from rocktokens.run_dir import RunDir
from rocktokens.types import RockSet

_FONT_FROM_THE_NET = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def main() -> None:
    """Print what training moved, and what not, to a recording console and save it as SVG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=RunDir)
    parser.add_argument("svg", type=Path)
    arguments = parser.parse_args()
    console = Console(record=True, width=80, force_terminal=True)
    rocks = RockSet.load(arguments.run.rocks)
    movement, types = measure_movement(arguments.run, rocks)
    console.print(movement_table(types, 16, movement.prompts))
    arguments.svg.parent.mkdir(parents=True, exist_ok=True)
    svg = console.export_svg(title="rocktokens demo", theme=DIMMED_MONOKAI)
    arguments.svg.write_text(_FONT_FROM_THE_NET.sub("", svg), encoding="utf-8")


if __name__ == "__main__":
    main()
