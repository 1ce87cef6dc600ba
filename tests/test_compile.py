"""Runs compiled_training.py in a pytest without the checks of shapes around functions, which dynamo cannot trace."""

import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("compiled_training.py")


@pytest.mark.parametrize("which", ["plain_training", "not plain_training"])
def test_compiled(which):
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--show-capture=no"]
    ran = subprocess.run([*command, str(FILE), "-k", which], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:]
    assert " passed" in ran.stdout and "skipped" not in ran.stdout
