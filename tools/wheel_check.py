"""What an installed wheel must hold: run by `make wheel-check` in an environment with the core dependencies only."""

import contextlib
import importlib.metadata
import importlib.util
import io
import sys
from pathlib import Path

EXTRAS = ("transformers", "accelerate", "peft", "torch_geometric", "matplotlib", "sklearn", "scipy", "ray", "beartype")

present = [name for name in EXTRAS if importlib.util.find_spec(name)]
assert not present, f"the environment is not clean: it has {', '.join(present)}"

import alignattn  # noqa: E402  (after the check that nothing else is there to help)

package = Path(alignattn.__file__).parent
assert package.is_relative_to(sys.prefix), f"imported from {package}, not from the installed wheel"
assert (package / "py.typed").is_file(), "py.typed is missing: type checkers would ignore the annotations"
missing = [name for name in alignattn.__all__ if not hasattr(alignattn, name)]
assert not missing, f"__all__ names what is not there: {', '.join(missing)}"
version = importlib.metadata.version("alignattn")
assert getattr(alignattn, "__version__", version) == version, f"__version__ is not the wheel's {version}"

from alignattn.cli import main  # noqa: E402

out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    assert main(["run", "--list"]) == 0
    assert main(["demo"]) == main(["compare", str(package)]) == main(["run", "digits"]) == 1
    assert main(["report", str(package)]) == 1
assert "digits" in out.getvalue(), "the recipes are missing"
assert (package / "paper_values" / "glue.toml").is_file(), "the paper's values are missing"
assert all((package / "report" / name).is_file() for name in ("style.css", "page.js")), "the report's files are missing"
assert err.getvalue().count("pip install 'alignattn[demo]'") == 4, f"no word of what to install: {err.getvalue()}"
