"""Builds the CPU library without torch or Python headers, so that one wheel serves every Python and torch."""

import os

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SUFFIX = ".dll" if os.name == "nt" else ".so"
EXPORTS = [
    "spotlights_best_level",
    "spotlights_dots_pay",
    "spotlights_gelu_response",
    "spotlights_gelu_response_gradient",
    "spotlights_gelu_response_sums",
    "spotlights_multiply_adds",
    "spotlights_scale_add",
    "spotlights_serial_for",
    "spotlights_squeeze_excite",
    "spotlights_wbmm_forward",
    "spotlights_wbmm_pack",
    "spotlights_wbmm_packed_size",
    "spotlights_wbmm_weight_gradient",
]


class BuildLibrary(build_ext):
    """The library is loaded by ctypes: no Python in its name, no module function in its exports."""

    def copy_extensions_to_source(self):
        for extension in self.extensions:
            os.makedirs(os.path.dirname(self.get_ext_fullpath(extension.name)), exist_ok=True)
        super().copy_extensions_to_source()

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + SUFFIX

    def get_export_symbols(self, ext):
        return ext.export_symbols


class UniversalWheel(bdist_wheel):
    """Any Python 3, this platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


library = Extension(
    "spotlights.lib.libspotlights",
    sources=["csrc/excite.cpp", "csrc/response.cpp", "csrc/wbmm.cpp"],
    depends=["csrc/*.h", "csrc/*.inc"],
    language="c++",
    extra_compile_args=["/O2", "/std:c++17"]
    if os.name == "nt"
    else ["-O2", "-std=c++17", "-fno-math-errno", "-Wno-psabi", "-g0"],
    export_symbols=EXPORTS,
    optional=True,  # without a compiler the package installs and computes with torch alone
)

setup(ext_modules=[library], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": UniversalWheel})
