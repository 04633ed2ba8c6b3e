"""Settings of the documentation site."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hf_specdec

project = "hf_specdec"
author = "The hf_specdec contributors"
project_copyright = "2026, The hf_specdec contributors"
release = version = hf_specdec.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"

html_theme = "furo"
html_title = f"hf_specdec {release}"

# The page about the command line includes this file: the program describes itself, so the page cannot fall behind.
command_line = Path(__file__).parent / "_build" / "cli.md"
command_line.parent.mkdir(exist_ok=True)
typer_docs = ["-m", "typer", "hf_specdec.cli", "utils", "docs", "--name", "hf-specdec", "--output"]
subprocess.run([sys.executable, *typer_docs, command_line], check=True, stdout=subprocess.DEVNULL)
