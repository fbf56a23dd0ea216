"""Reads what `triton_gallery.codegen` reports of a kernel from the text of its assembly.

The keys of every answer are the fields of `triton_gallery.codegen.Kernel` that depend on the target's family.
"""

import re


def read_ptx(ptx: str, log: str) -> dict:
    """From NVIDIA's assembly, and from what ptxas said when it made machine code of it."""
    widths = {"ld": [], "st": []}
    # For example "ld.global.L1::evict_last.v4.b32": four times 32 bits.
    for access, modifiers in re.findall(r"\b(ld|st)\.(\S*\bglobal\S*)", ptx):
        parts = modifiers.split(".")
        vector = next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)
        if size := re.search(r"\d+$", parts[-1]):  # not in every way to write inline assembly
            widths[access].append(vector * int(size[0]))
    # "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;": 16 bytes.
    copies = re.findall(r"\bcp\.async\.c[ag]\.shared\S*\s+\[[^]]*\],\s*\[[^]]*\],\s*(0x[\da-f]+|\d+)", ptx)
    widths["ld"] += [8 * int(size, 0) for size in copies]
    matrix = {"mma": r"\bmma\.sync", "wgmma": r"\bwgmma\.mma_async", "tcgen05": r"\btcgen05\.mma"}
    return dict(
        registers=_most(r"Used (\d+) registers", log),
        spills=_total(r"(\d+) bytes spill stores", log),
        stack=_most(r"(\d+) bytes stack frame", log),
        load_bits=max(widths["ld"], default=None),
        store_bits=max(widths["st"], default=None),
        tma_loads=len(re.findall(r"\bcp\.async\.bulk\.tensor\.\dd\.(?:tile::gather4\.)?shared", ptx)),
        tma_stores=len(re.findall(r"\bcp\.(?:reduce\.)?async\.bulk\.tensor\.\dd\.(?:tile::scatter4\.)?global", ptx)),
        matrix=_count(matrix, ptx),
        warnings=tuple(sorted(set(re.findall(r"\(C75\d\d\).*", log)))),
    )


def read_amdgcn(asm: str) -> dict:
    """From AMD's assembly, whose end describes the code object."""
    spilled = _most(r"\.vgpr_spill_count:\s*(\d+)", asm)
    return dict(
        registers=_most(r"\.vgpr_count:\s*(\d+)", asm),
        spills=None if spilled is None else 4 * spilled,
        stack=_most(r"\.private_segment_fixed_size:\s*(\d+)", asm),
        load_bits=widest_amd("load", asm),
        store_bits=widest_amd("store", asm),
        tma_loads=0,
        tma_stores=0,
        matrix=_count({"mfma": r"\bv_s?mf(?:ma|mac)_", "wmma": r"\bv_wmma_"}, asm),
        warnings=(),
    )


def widest_amd(access: str, asm: str) -> int | None:
    """From names such as global_load_dwordx4, buffer_load_ushort and, on newer GPUs, global_load_b128."""
    bits = []
    for kind in set(re.findall(rf"\b(?:global|buffer|flat)_{access}_(?:d16_|hi_)*(\w+)", asm)):
        if dword := re.fullmatch(r"dword(?:x(\d))?", kind):
            bits.append(32 * int(dword[1] or 1))
        elif sized := re.search(r"[biu](\d+)", kind):
            bits.append(int(sized[1]))
        else:
            bits.append(8 if "byte" in kind else 16)
    return max(bits, default=None)


def _count(families: dict[str, str], asm: str) -> dict[str, int]:
    counts = {family: len(re.findall(pattern, asm)) for family, pattern in families.items()}
    return {family: count for family, count in counts.items() if count}


def _most(pattern: str, text: str) -> int | None:
    return max(map(int, re.findall(pattern, text)), default=None)


def _total(pattern: str, text: str) -> int | None:
    found = re.findall(pattern, text)
    return sum(map(int, found)) if found else None
