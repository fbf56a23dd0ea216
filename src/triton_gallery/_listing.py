"""Reads from the stages of a compilation which of their lines came from which line of the source."""

import re
from collections.abc import Iterator

_LOC = re.compile(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_DEFINITION = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)
_PLACE = re.compile(r'"([^"]*)":(\d+):')
_CALL = re.compile(r"callsite\((#loc\d*) at (#loc\d*)\)")
_NAMED = re.compile(r'"[^"]*"\((#loc\d*)\)')
# standard.py:263:15 @[ softmax.py:120:23 ], as LLVM writes it behind .loc; innermost call first
_CHAIN = re.compile(r"([\w.]+):(\d+):\d+")
# .loc 2 196 12, function_name $L__info_string0, inlined_at 2 216 16: from Triton 3.9 on PTX names the place of the call
_INLINED = re.compile(r"\.loc\s+(?P<here>\d+ \d+ \d+)(?:.* inlined_at (?P<call>\d+ \d+ \d+))?")
# //## File "/…/softmax.py", line 120, as nvdisasm writes it
_SASS_PLACE = re.compile(r'"([^"]*)", line (\d+)')
_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")


def by_line(kind: str, text: str, file: str, lines: range) -> dict[int, list[str]]:
    """The lines of one stage by the line of the source they came from.

    Args:
        kind: the stage: "ttir", "ttgir", "ptx", "sass" or "amdgcn".
        text: the stage, compiled with line information.
        file: the name of the source's file, without folders.
        lines: the lines of the kernel in it. What a function that it calls became belongs to the line of the call; SASS
            does not know that line, and has such instructions under `lines.stop`.
    """
    read = {
        "sass": _sass,
        "ptx": lambda text: _assembly(text, "//"),
        "amdgcn": lambda text: _assembly(text, ";"),
    }.get(kind, _ir)
    found: dict[int, list[str]] = {}
    at = lines.start
    for places, code in read(text):
        # The outermost place in the kernel. What has none, a closing brace or a label, stays with the line before it.
        other = lines.stop if kind == "sass" and places else at
        at = next((n for name, n in reversed(places) if name.rpartition("/")[2] == file and n in lines), other)
        found.setdefault(at, []).append(code)
    return found


Places = list[tuple[str, int]]  # file and line, the innermost call first


def _ir(text: str) -> Iterator[tuple[Places, str]]:
    definitions = dict(_DEFINITION.findall(text))

    def resolve(loc: str) -> Places:
        if call := _CALL.search(loc):
            return resolve(definitions.get(call[1], "")) + resolve(definitions.get(call[2], ""))
        if named := _NAMED.search(loc):
            return resolve(definitions.get(named[1], ""))
        return [(place[1], int(place[2]))] if (place := _PLACE.search(loc)) else []

    inside = False
    for line in text.splitlines():
        if line.startswith("#") and not line.startswith("#loc"):
            yield [], line  # a layout's definition
        if "func" in line and "@" in line and not inside:
            inside = True
            continue
        if not inside or line.startswith("#loc") or not (code := _LOC.sub("", line)).strip(" {}"):
            continue
        last = line.rpartition(" loc(")[2]
        name = re.match(r"#loc\d*", last)
        yield resolve(definitions.get(name[0], "") if name else last), code.removeprefix("    ")


def _assembly(text: str, comment: str) -> Iterator[tuple[Places, str]]:
    places: Places | None = None
    known: dict[str, Places] = {}
    inline = False
    for line in text.splitlines():
        code, _, remark = (part.strip() for part in line.partition(comment))
        if remark in ("begin inline asm", "end inline asm"):
            inline = remark == "begin inline asm"
        elif code.startswith(".loc") and inline:
            pass  # Triton 3.8 counts the lines of inline assembly as if they stood in the source, below its own line.
        elif code.startswith(".loc"):
            places = [(name, int(n)) for name, n in _CHAIN.findall(remark)]
            if inlined := _INLINED.match(code):
                places += known.get(inlined["call"], [])
                known[inlined["here"]] = places
        elif code.startswith((".section", ".end_amdhsa")) and places is not None:
            return
        elif places is not None and code and code[0] not in ".{}" and not code.startswith("$L__tmp"):
            yield places, code.replace("\t", " ")


def _sass(text: str) -> Iterator[tuple[Places, str]]:
    places: Places = []
    for line in text.splitlines():
        if "//##" in line:
            places = [(name, int(n)) for name, n in _SASS_PLACE.findall(line)]
        elif match := _SASS.search(line):
            yield places, match[1]
