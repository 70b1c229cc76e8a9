"""One name for one kernel, whichever tool wrote it.

Profilers print the same symbol differently: with `.kd` or ` [clone .kd]` (rocprofiler-sdk inside Kineto), mangled,
with other blanks, or through another demangler (Nsight). `normalize` brings them to one form to compare by; the raw
name is what a user sees.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from functools import lru_cache

_SUFFIX = re.compile(r"\s*(?:\[clone \.kd\]|\(\.kd\)|\.kd)$")
# Nsight: [lambda(float) (instance 1)], (int)4, (unsigned long)1, (bool)1, <unnamed>:: against {lambda(float)#1}, 4,
# 1ul, true, (anonymous namespace)::
_LAMBDA = re.compile(r"\[lambda(\([^\[\]]*\)) \(instance (\d+)\)\]")
_CAST = re.compile(r"\((int|long|unsigned int|unsigned long|long long|unsigned long long|bool|short|char)\)(-?\d+)")
_LITERAL = {"int": "", "short": "", "char": "", "long": "l", "unsigned int": "u", "unsigned long": "ul",
            "long long": "ll", "unsigned long long": "ull"}
_TILE = re.compile(r"MT\d+x\d+x\d+")
_HASH = re.compile(r"_[0-9a-f]{6,}(?=_|$)|(?<=_)\d+(?=_|$)")


@lru_cache(maxsize=65536)
def normalize(name: str) -> str:
    """The form by which names of different tools are compared: no suffix, demangled, no blanks."""
    name = demangle(_SUFFIX.sub("", name.strip()))
    if "(instance " in name:
        name = _LAMBDA.sub(r"{lambda\1#\2}", name)
    if ")" in name:
        name = _CAST.sub(_literal, name)
    name = name.replace("<unnamed>", "(anonymous namespace)")
    return "".join(name.split())


@lru_cache(maxsize=65536)
def family(name: str) -> str:
    """What stays of a name when template arguments, parameters and tuned variants change: the base function, for
    Tensile its problem type and tile, for Triton the name without hash and counters. A match by it is approximate."""
    plain = demangle(_SUFFIX.sub("", name.strip()))
    if plain.startswith(("Cijk_", "Custom_Cijk")):
        tile = _TILE.search(plain)
        problem = "_".join(plain.split("_")[:6])
        return problem if tile is None else f"{problem.split('_MT')[0]} {tile.group()}"
    if plain.startswith("triton_"):
        return _HASH.sub("", plain)
    base = _without_brackets(plain.replace("(anonymous namespace)", "").replace("<unnamed>", ""))
    return base.split("(")[0].split()[-1].strip(":") if base.split("(")[0].split() else plain


def demangle(name: str) -> str:
    """`_Z...` as C++ writes it, by the C++ library of this machine; the name itself where there is none."""
    convert = _demangler()
    if convert is None or not name.startswith("_Z"):
        return name
    status = ctypes.c_int()
    text = convert(name.encode(), None, None, ctypes.byref(status))
    if not text:
        return name
    try:
        return ctypes.cast(text, ctypes.c_char_p).value.decode(errors="replace")  # type: ignore[union-attr]
    finally:
        _free()(text)


def _literal(match: re.Match[str]) -> str:
    kind, digits = match.groups()
    return ("true" if digits == "1" else "false") if kind == "bool" else digits + _LITERAL[kind]


def _without_brackets(name: str) -> str:
    """The name without everything between < and >."""
    out, depth = [], 0
    for part in re.split(r"([<>])", name):
        if part == "<":
            depth += 1
        elif part == ">":
            depth = max(depth - 1, 0)
        elif depth == 0:
            out.append(part)
    return "".join(out)


@lru_cache(maxsize=1)
def _demangler() -> ctypes._NamedFuncPointer | None:
    library = ctypes.util.find_library("stdc++") or ctypes.util.find_library("c++")
    try:
        convert = ctypes.CDLL(library or "libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return None
    convert.restype = ctypes.c_void_p
    convert.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    return convert


@lru_cache(maxsize=1)
def _free() -> ctypes._NamedFuncPointer:
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free.restype = None
    return free
