"""The kernels in C, which need NumPy's headers. All else is in pyproject.toml."""

from pathlib import Path

import numpy
from setuptools import Extension, setup

NATIVE = Path("src/tracediff/kernels/native")

setup(
    ext_modules=[
        Extension(
            "tracediff.kernels._native",
            sources=sorted(map(str, NATIVE.glob("*.c"))),
            depends=sorted(map(str, NATIVE.glob("*.h"))),
            include_dirs=[numpy.get_include()],
            # Fused multiply-adds would round differently.
            extra_compile_args=["-O3", "-ffp-contract=off", "-fvisibility=hidden", "-g0"],
            optional=True,  # where it cannot be compiled, NumPy does its work
        )
    ]
)
