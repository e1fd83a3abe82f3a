"""The core of the simulator compiled to machine code by mypyc: the same modules, about two and a half times as fast.

`kvtwin compile` compiles them once for this environment, which takes a minute and a C compiler. From then on they are
what is imported, as long as the sources are those that were compiled: a build is filed under a digest of them, so a
changed source is never shadowed by an old build. Without a build the simulator runs as it is written.
`KVTWIN_COMPILED=0` ignores a build, `KVTWIN_COMPILED=FOLDER` keeps builds elsewhere.

Results are the same bytes with and without: the compiled code does the same operations on the same numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location, spec_from_loader
from pathlib import Path
from types import ModuleType

# What runs for each plan or each request, but for code that inherits from built-in types.
CORE = (
    "sim.beams",
    "sim.clients",
    "sim.engine",
    "sim.memory.holders",
    "sim.memory.host",
    "sim.memory.paged",
    "sim.memory.prefix",
    "sim.metrics",
    "sim.plan",
    "sim.recorder",
    "sim.samples",
    "sim.scheduler.base",
    "sim.scheduler.continuous",
    "sim.scheduler.groups",
    "sim.scheduler.steady",
    "sim.scheduler.work",
    "sim.sequence",
    "sim.tables",
    "sim.timing.roofline",
)
SWITCH = "KVTWIN_COMPILED"
_GROUP = "kvtwin_core"  # the modules are one library, under this name with mypyc's ending
_SHARED = f"{_GROUP}__mypyc"
_ROOT = Path(__file__).resolve().parent.parent
_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"


class CompiledFinder:
    """Finds the modules of the core in a build.

    Args:
        build: the folder of one, laid out like the sources.
    """

    def __init__(self, build: Path) -> None:
        self._build = build

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a module of the core is; None for any other."""
        if name not in CORE and name != _SHARED:
            return None
        file = self._build / f"{name.replace('.', '/')}{_SUFFIX}"
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, str(file)))


def prefer_compiled() -> bool:
    """Lets the core be imported from its build if there is one of these very sources; says whether there is."""
    folder = _builds()
    if folder is None or not folder.is_dir() or not (build := folder / _digest()).is_dir():
        return False
    sys.meta_path.insert(0, CompiledFinder(build))
    return True


def as_written(target: type) -> type:
    """The class whose signature and annotations are those of `target`: itself, or its source if it is compiled.

    Compiled code keeps neither. Names in the annotations mean what they mean in the module of `target`.
    """
    module = sys.modules[target.__module__]
    if not isinstance(getattr(module, "__loader__", None), ExtensionFileLoader):
        return target
    name = f"{module.__name__}__source"
    if name not in sys.modules:
        loader = SourceFileLoader(name, str(_source(module.__name__)))
        spec = spec_from_loader(name, loader)
        assert spec is not None
        sys.modules[name] = module_from_spec(spec)
        loader.exec_module(sys.modules[name])
    written: type = getattr(sys.modules[name], target.__name__)
    return written


def build() -> Path:
    """Compiles the core; returns the folder of the build, which replaces earlier ones.

    Raises:
        UserError: no compiler, or something else that compiling needs is missing.
    """
    from workloads.errors import UserError

    folder = _builds()
    if folder is None:
        raise UserError(f"{SWITCH}=0 turns compiled code off; unset it to compile.")
    try:
        import setuptools  # noqa: F401  # distutils' place is taken by it
        from mypyc.build import mypycify
    except ImportError as error:
        raise UserError(f"compiling needs the package {error.name}; pip install 'kvtwin[compiled]'.") from None
    from setuptools import setup
    from setuptools.errors import BaseError

    destination = folder / _digest()
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        for package in ("sim", "workloads"):
            shutil.copytree(_ROOT / package, package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        # -ffp-contract: a multiplication and an addition must round twice, as they do in Python.
        os.environ["CFLAGS"] = f"{os.environ.get('CFLAGS', '')} -ffp-contract=off".strip()
        paths = [f"{name.replace('.', '/')}.py" for name in CORE]
        try:
            extensions = mypycify(["--ignore-missing-imports", *paths], group_name=_GROUP, opt_level="3")
            arguments = ["--quiet", "build_ext", "--build-lib", "built", "--build-temp", "objects"]
            setup(name=_GROUP, packages=[], py_modules=[], ext_modules=extensions, script_args=arguments)
        except (BaseError, SystemExit) as error:
            raise UserError(
                f"the core cannot be compiled ({_first_line(error)}). It needs a C compiler and Python's headers "
                "(Debian: gcc python3-dev); without a build everything works, only slower."
            ) from None
        _replace(folder, destination, Path("built"))
    return destination


def _builds() -> Path | None:
    """The folder of all builds; None if none shall be used."""
    where = os.environ.get(SWITCH, "")
    if where == "0":
        return None
    return Path(where) if where else Path(sysconfig.get_path("platlib")) / "kvtwin_compiled"


def _digest() -> str:
    """Of what a build is made from: the sources, and the Python whose interface it uses."""
    digest = hashlib.sha256(_SUFFIX.encode())
    for name in CORE:
        digest.update(_source(name).read_bytes())
    return digest.hexdigest()[:16]


def _source(name: str) -> Path:
    return _ROOT / f"{name.replace('.', '/')}.py"


def _replace(folder: Path, destination: Path, built: Path) -> None:
    """Puts a build in its place whole, and clears away those of other sources."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{destination.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(built, part)
    _remove(other for other in folder.iterdir() if other != part)
    part.rename(destination)


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
