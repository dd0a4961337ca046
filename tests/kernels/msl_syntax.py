"""What can be said of a generated MSL text without running it: does it keep to C++14 and to MSL's own rules?

clang checks the text with the address spaces as types; the lint finds what C++ allows and MSL does not.
Numbers are sections of the Metal Shading Language Specification, version 4.
"""

import functools
import re

from msl_emulator import LANGUAGE, THREAD_ATTRIBUTES, Failed, clang, expanded
from msl_text import Text

SCALARS = "bool char uchar short ushort int uint long ulong half float bfloat float16_t bfloat16_t"
# 5.1.3 kernel, 5.2.1 buffer, 5.2.3.6 where a thread is.
ATTRIBUTES = {"kernel", "buffer", *THREAD_ATTRIBUTES}
SPACES = {"device", "constant", "threadgroup", "thread"}


@functools.cache
def check(text: Text) -> None:
    """Raise Failed if `text` would not compile on a Mac, as far as can be told here."""
    # clang cannot instantiate a kernel the way MLX does; its address makes it instantiate all the same.
    unit = f"{expanded(text)}auto instance = &{text.instance};\n"
    run = clang((*LANGUAGE, "-fsyntax-only", "-pedantic-errors"), unit)
    if run.returncode:
        raise Failed("address-space" if _mixes_address_spaces(run.stderr) else "syntax", run.stderr)
    for complaint in lint(expanded(text)):
        raise Failed("lint", f"{text.name}: {complaint}")


def lint(source: str) -> list[str]:
    """What is wrong with `source`, an expanded text, by rules that clang's C++ does not have."""
    source = re.sub(r"^#.*$", "", source, flags=re.M)
    complaints = [
        f"[[{name}]] is not an attribute of the shim"
        for name in re.findall(r"\[\[\s*(\w+)", source)
        if name not in ATTRIBUTES
    ]
    code = re.sub(r"\[\[.*?\]\]", "", source)
    declared = re.findall(r"\b(?:struct|using|typename|class)\s+(\w+)", code)
    declared += re.findall(r"\btypedef\b[^;]*?(\w+)\s*;", code)
    types = rf"(?:{'|'.join([*SCALARS.split(), *declared])})(?:[234]\b|\b)(?:\s*<[^<>;]*>)?"
    # 4: every pointer and reference names its address space.
    pointer = rf"((?:\b\w+\s+)*)\b{types}\s*(?:const\s*)?[*&]\s*(?:const\s+)?\(?(?=\w|[,>)])"
    for match in re.finditer(pointer, code):
        if not set(match[1].split()) & SPACES:
            complaints.append(f"no address space: {match[0].strip()}…")
    # 4: a C-style cast can drop an address space without a word.
    for match in re.finditer(r"\(([^()]*\*\s*(?:const\s*)?)\)\s*[\w(&]", code):
        complaints.append(f"a C-style pointer cast: {match[0]}…")
    # 1.5.4: no lambda expressions, which begin where no operand stands before the bracket.
    for match in re.finditer(r"(?:[^\w\s\])>]|\breturn)\s*(\[[^\[\]]*\]\s*(?:\([^()]*\)\s*)?\{)", code):
        complaints.append(f"a lambda: {match[1]}")
    return complaints


def _mixes_address_spaces(errors: str) -> bool:
    """Whether clang complains of a pointer to one address space where another one is wanted."""
    conversions = re.findall(r"error: cannot initialize.*", errors)
    mixed = any(len(set(re.findall(r"\b(device|constant|threadgroup)\b", c))) == 2 for c in conversions)
    return mixed or "address space" in errors
