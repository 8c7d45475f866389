"""Packaging: what is installed, what it needs, and where the integrations live."""

from __future__ import annotations

import pathlib
import re

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).resolve().parent

# easyckpt/integrations is a symbolic link to integrations/ so that a checkout runs uninstalled. A wheel has no links:
# the packages below the link are listed from their real folder and mapped into the easyckpt package.
ENGINE = find_packages(include=["easyckpt", "easyckpt.*"], exclude=["easyckpt.integrations", "easyckpt.integrations.*"])
INTEGRATIONS = ["easyckpt.integrations", *(f"easyckpt.integrations.{name}" for name in find_packages("integrations"))]


def version() -> str:
    """The version that the package itself states, read without importing it (it imports torch)."""
    text = (HERE / "easyckpt" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^VERSION = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError("easyckpt/version.py states no VERSION")
    return match.group(1)


def readme() -> str:
    """The long description; empty while there is no README."""
    path = HERE / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


setup(
    name="easyckpt",
    version=version(),
    description="Asynchronous distributed checkpoint engine for PyTorch training",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.14",
    packages=[*ENGINE, *INTEGRATIONS],
    package_dir={"easyckpt": "easyckpt", "easyckpt.integrations": "integrations"},
    package_data={"easyckpt": ["py.typed"]},
    install_requires=[
        "torch>=2.6",
        "numpy>=1.26",
        "psutil>=5.9",
        "pyyaml>=6.0",
        "rich>=13.0",
        "safetensors>=0.4.3",
        "typer>=0.15",
        "typing_extensions>=4.5",
        "xxhash>=3.4",
    ],
    extras_require={
        "plots": ["matplotlib>=3.8"],
        "transformers": ["transformers>=4.46", "accelerate>=1.0"],
        "accelerate": ["accelerate>=1.0"],
        "dev": [
            "hypothesis",
            "matplotlib>=3.8",
            "mypy",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "types-psutil",
            "types-PyYAML",
        ],
        "fuse": ["mfusepy"],
    },
    entry_points={"console_scripts": ["easyckpt = easyckpt.cli:main"]},
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
