"""Layer norm of long rows, in Gluon: a row waits on the chip between the passes over it.

Backward, both means of a row must be known before the first element of its gradient, and the sums for weight and bias
stay in registers from the first row to the last. For both there is no room in registers when rows are long. So the rows
of x and dy, and the weight, live in shared memory, where the next rows arrive while this one is worked on. Forward, and
backward beyond 12288 numbers of 16 bits or 8192 of 32, rows are cut into parts: see ``exchange``. So are backward all
that begin between two multiples of 16 bytes. Forward, a part is so short that its weight and bias stay in registers
from the first row to the last.
"""

import math
from typing import NamedTuple

import torch
from triton.language.extra.cuda import gdc_launch_dependents

from .._launch import cdiv, launch, num_multiprocessors
from .._vectors import rows_begin_alike
from ._gluon import async_copy, async_copy_to_shared, gl, gluon
from .exchange import at_a_time, mailboxes, max_parts, receive, send

# Forward, a part is a warp's: this much of a row, in chunks of so many vectors of 16 bytes for each thread. With more
# warps in a program they wait for each other, five times a row.
_PART_BYTES = 7 * 1024
_STEPS = 2
# Rows in shared memory: one that is written, one whose statistics are computed, one on its way; and programs of a
# multiprocessor: so few that each thread has the registers for its share of weight and bias.
_FWD_STAGES = 3
_FWD_PROGRAMS = 8
# Rows are taken that have more numbers than the first, and if they do not begin with a vector also those of more than
# the second, where x has no fewer bytes than the third. On an H200 tl's kernels are faster for all others.
_FWD_ROWS = 24576, 8192, 48 * 2**20

# Backward, whole rows: warps of the only program on a multiprocessor, elements of a chunk, eight for each thread;
# chunks of the longest row; and rows in shared memory: one at work, one on its way. A third was slower.
_NUM_WARPS = 16
_CHUNK = _NUM_WARPS * 32 * 8
_MAX_CHUNKS = 3
_STAGES = 2
# Backward, parts: warps of a program, chunks of a part, and rows in shared memory: one whose gradient is computed, one
# whose sums are, one on its way. A multiprocessor has programs with this many chunks in all.
_PART_WARPS_BWD = 4
_PART_CHUNKS = (3, 4)
_PART_STAGES = 3
_CHUNKS_PER_PROCESSOR = 12
# As _FWD_ROWS, of the rows that tl's kernel for rows in registers has left.
_BWD_ROWS = 8192, 2048, 32 * 2**20


# --- forward ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _begin(row, row_stride, VECTOR: gl.constexpr, ALIGNED: gl.constexpr):
    """Where in its first vector of 16 bytes a row begins."""
    if ALIGNED:
        return 0
    else:
        return (row * row_stride % VECTOR).to(gl.int32)


@gluon.jit
def _row_ptr(ptr, row, row_stride, VECTOR: gl.constexpr):
    """The vector of 16 bytes in which a row begins."""
    return ptr + row * row_stride // VECTOR * VECTOR


@gluon.jit
def _whole(cols, begin, end, VECTOR: gl.constexpr, ALIGNED: gl.constexpr):
    """Which columns lie in vectors that are all of a part. In this form masks keep copies and stores 16 bytes wide."""
    vectors = cols // VECTOR * VECTOR
    if ALIGNED:
        return vectors < end
    else:
        return (vectors >= begin) & (vectors + VECTOR <= end)


@gluon.jit
def _copy_chunk(
    smem, slot, x_part_ptr, c: gl.constexpr, cols, begin, end, row, n_rows,
    VECTOR: gl.constexpr, N_FULL: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """Start the copy of the whole vectors of chunk c of a part of a row, if that row exists."""
    cols = c * cols.shape[0] + cols
    mask = (row < n_rows) & (cols >= 0)  # the second is always true, and gives the first the shape of the chunk
    if c >= N_FULL or (c == 0 and not ALIGNED):
        mask = mask & _whole(cols, begin, end, VECTOR, ALIGNED)
    async_copy_to_shared(smem.index(slot), x_part_ptr + cols, mask=mask)


@gluon.jit
def _clear(smem, cols, N_SLOTS: gl.constexpr):
    """Fill shared memory with 0, which stays wherever no copy writes."""
    for k in gl.static_range(N_SLOTS):
        smem.index(k).store(gl.full([cols.shape[0]], 0.0, smem.dtype, cols.type.layout))


@gluon.jit
def _apart(cols, ALIGNED: gl.constexpr):
    """The columns in the order in which threads move what all rows share: one by one where vectors do not fit it.

    Then neighbours are moved by neighbouring threads. A thread that moved eight by itself would touch as many sectors
    of memory with each.
    """
    if ALIGNED:
        return cols
    else:
        return gl.arange(0, cols.shape[0], gl.BlockedLayout([1], [32], cols.type.layout.warps_per_cta, [0]))


@gluon.jit
def _of_part(cols, begin, end, VECTOR: gl.constexpr, ALIGNED: gl.constexpr):
    """Which columns are a part's."""
    if ALIGNED:
        # Whole vectors, and a mask that says so keeps loads and stores 16 bytes wide.
        return cols // VECTOR * VECTOR < end
    else:
        return (cols >= begin) & (cols < end)


@gluon.jit
def _load_part(ptr, cols, begin, end, VECTOR: gl.constexpr, N_CHUNKS: gl.constexpr, ALIGNED: gl.constexpr):
    """Load a part of weight or bias into registers, chunk by chunk; nothing where there is none."""
    CHUNK: gl.constexpr = cols.shape[0]
    chunks = ()
    if ptr is not None:
        # 16-bit numbers that are loaded one by one would keep a register each. What is read back has two in one.
        smem = gl.allocate_shared_memory(ptr.dtype.element_ty, [CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        for c in gl.static_range(N_CHUNKS):
            apart = c * CHUNK + _apart(cols, ALIGNED)
            smem.store(gl.load(ptr + apart, mask=_of_part(apart, begin, end, VECTOR, ALIGNED)))
            chunks += (smem.load(cols.type.layout),)
    return chunks


@gluon.jit
def _widen(x):
    """x as float32, not before it is needed: 16-bit numbers that wait in a loop take half as many registers."""
    if x.dtype.primitive_bitwidth == 16:
        # Without this move, which the compiler does not see through, it would convert them once, ahead of the loop.
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x.to(gl.float32)


@gluon.jit
def _store_chunk(
    part_ptr, out, c: gl.constexpr, cols, begin, end,
    VECTOR: gl.constexpr, N_FULL: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """Store the whole vectors of chunk c of a part."""
    cols = c * cols.shape[0] + cols
    mask = None
    if c >= N_FULL or (c == 0 and not ALIGNED):
        mask = _whole(cols, begin, end, VECTOR, ALIGNED)
    gl.store(part_ptr + cols, out.to(part_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _ends(cols, begin, end, VECTOR: gl.constexpr):
    """The columns of a part outside its whole vectors, one for each of the first threads; and which threads have one.

    What lies there is loaded, computed and stored by itself.
    """
    i = gl.arange(0, cols.shape[0] // VECTOR, gl.BlockedLayout([1], [32], cols.type.layout.warps_per_cta, [0]))
    ends = gl.where(i < VECTOR, i, end // VECTOR * VECTOR + i - VECTOR)
    of_part = (ends >= begin) & (ends < end) & ((i >= VECTOR) | (begin > 0)) & (i < 2 * VECTOR)
    return ends, of_part


@gluon.jit
def _load_ends(part_ptr, ends, mask):
    """The numbers at the ends of a part, and 0 for all other threads."""
    return gl.load(part_ptr + ends, mask=mask, other=0.0)


@gluon.jit
def _by_vector(x, VECTOR: gl.constexpr):
    """The sums of the vectors of a chunk."""
    sums = gl.sum(x.reshape([x.shape[0] // VECTOR, VECTOR]), 1)
    return gl.convert_layout(sums, gl.BlockedLayout([1], [32], x.type.layout.warps_per_cta, [0]))


@gluon.jit
def _statistics(
    smem, slot, x_ends, of_part, cols, begin, end, VECTOR: gl.constexpr,
    SUBTRACT_MEAN: gl.constexpr, N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """The mean of a part of a row (0 for RMS norm), and the sum of the squared distances from it."""
    CHUNK: gl.constexpr = cols.shape[0]
    LAYOUT: gl.constexpr = cols.type.layout
    mean = 0.0
    if SUBTRACT_MEAN:
        total = gl.zeros([CHUNK], gl.float32, LAYOUT)
        for c in gl.static_range(N_CHUNKS):
            total += smem.index(slot * N_CHUNKS + c).load(LAYOUT).to(gl.float32)
        if not ALIGNED:
            total = _by_vector(total, VECTOR) + x_ends.to(gl.float32)
        mean = gl.sum(total, 0) / (end - begin)
    m2 = gl.zeros([CHUNK], gl.float32, LAYOUT)
    for c in gl.static_range(N_CHUNKS):
        x = smem.index(slot * N_CHUNKS + c).load(LAYOUT).to(gl.float32) - mean
        if c >= N_FULL or (c == 0 and not ALIGNED):
            # The zeros outside would now hold -mean.
            x = gl.where(_whole(c * CHUNK + cols, begin, end, VECTOR, ALIGNED), x, 0.0)
        m2 += x * x
    if not ALIGNED:
        x = gl.where(of_part, x_ends.to(gl.float32) - mean, 0.0)
        m2 = _by_vector(m2, VECTOR) + x * x
    return mean, gl.sum(m2, 0)


@gluon.jit(do_not_specialize=["n_rows", "n_parts"])
def _layer_norm_parts_fwd_kernel(
    x_ptr,  # (n_rows, n_cols), 16-byte aligned
    weight_ptr,  # (n_cols,) or None
    bias_ptr,  # (n_cols,) or None
    y_ptr,  # (n_rows, n_cols), its rows beginning where in a vector those of x do
    mean_ptr,  # (n_rows,), or None for RMS norm
    rstd_ptr,  # (n_rows,)
    mail_ptr,  # (n_rows, n_parts)
    n_rows,
    n_parts,
    part_cols,  # columns of a part; the last one may have fewer
    n_cols,
    x_row_stride,
    eps,
    VECTOR: gl.constexpr,  # numbers in 16 bytes
    CHUNK_STEPS: gl.constexpr,  # vectors per thread in a chunk
    N_CHUNKS: gl.constexpr,  # chunks of a part
    N_FULL: gl.constexpr,  # of these, those that every part fills
    STAGES: gl.constexpr,
    MAX_PARTS: gl.constexpr,
    ALIGNED: gl.constexpr,  # all rows begin with a vector; if not, those of a program begin at the same place in one
    num_warps: gl.constexpr,
):
    """Programs 0 to n_parts - 1 own row 0, one part each, the next n_parts programs row 1, and so on.

    Such a group goes on with the row that lies as many rows further as there are groups. What a part has found of a row
    is sent before the row ahead of it is written, and asked for after that: so the other parts' have had the time of a
    whole row to come.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [num_warps], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CHUNK: gl.constexpr = CHUNK_STEPS * 32 * num_warps * VECTOR
    SUBTRACT_MEAN: gl.constexpr = mean_ptr is not None
    smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    cols = gl.arange(0, CHUNK, LAYOUT)
    part = gl.program_id(0) % n_parts
    row = (gl.program_id(0) // n_parts).to(gl.int64)
    n_groups = gl.num_programs(0) // n_parts
    # From the vector in which a part begins, its numbers are those from `begin` to `end`.
    first = part * part_cols
    begin = _begin(row, x_row_stride, VECTOR, ALIGNED)
    end = begin + gl.minimum(n_cols - first, part_cols)
    x_ptr += first
    y_ptr += first
    _clear(smem, cols, STAGES * N_CHUNKS)
    for k in gl.static_range(STAGES):
        ahead = row + k * n_groups
        for c in gl.static_range(N_CHUNKS):
            x_part_ptr = _row_ptr(x_ptr, ahead, x_row_stride, VECTOR)
            _copy_chunk(smem, k * N_CHUNKS + c, x_part_ptr, c, cols, begin, end, ahead, n_rows, VECTOR, N_FULL, ALIGNED)
        async_copy.commit_group()
    # All rows share these. Loaded again for each, they would take twice as much of the L2 cache's rate as x does.
    weight_part_ptr = None if weight_ptr is None else weight_ptr + (first - begin)
    bias_part_ptr = None if bias_ptr is None else bias_ptr + (first - begin)
    weights = _load_part(weight_part_ptr, cols, begin, end, VECTOR, N_CHUNKS, ALIGNED)
    biases = _load_part(bias_part_ptr, cols, begin, end, VECTOR, N_CHUNKS, ALIGNED)
    ends, of_part = _ends(cols, begin, end, VECTOR)
    ENDS: gl.constexpr = ends.type.layout
    x_ends = gl.zeros([CHUNK // VECTOR], x_ptr.dtype.element_ty, ENDS)
    next_ends = x_ends
    if not ALIGNED:
        if weight_ptr is not None:
            end_weights = _load_ends(weight_part_ptr, ends, of_part)
        if bias_ptr is not None:
            end_biases = _load_ends(bias_part_ptr, ends, of_part)
        x_ends = _load_ends(_row_ptr(x_ptr, row, x_row_stride, VECTOR), ends, of_part)
        next_row = row + n_groups
        next_ends = _load_ends(_row_ptr(x_ptr, next_row, x_row_stride, VECTOR), ends, of_part & (next_row < n_rows))
    async_copy.wait_group(STAGES - 1)
    part_mean, part_m2 = _statistics(
        smem, 0, x_ends, of_part, cols, begin, end, VECTOR, SUBTRACT_MEAN, N_CHUNKS, N_FULL, ALIGNED
    )
    send(mail_ptr + row * n_parts, part_mean, part_m2, part)
    step = 0
    while row < n_rows:
        next_row = row + n_groups
        ahead_ends = next_ends
        if not ALIGNED:
            ahead = next_row + n_groups
            ahead_ends = _load_ends(_row_ptr(x_ptr, ahead, x_row_stride, VECTOR), ends, of_part & (ahead < n_rows))
        if next_row < n_rows:
            async_copy.wait_group(STAGES - 2)
            next_mean, next_m2 = _statistics(
                smem, (step + 1) % STAGES, next_ends, of_part, cols, begin, end, VECTOR, SUBTRACT_MEAN, N_CHUNKS,
                N_FULL, ALIGNED,
            )  # fmt: skip
            send(mail_ptr + next_row * n_parts, next_mean, next_m2, part)
        means, m2s, parts = receive(mail_ptr + row * n_parts, n_parts, MAX_PARTS, num_warps)
        # Chan's formula joins the parts: each brings its own spread, and the distance of its mean from the row's.
        counts = gl.where(parts < n_parts, gl.minimum(n_cols - parts * part_cols, part_cols), 0).to(gl.float32)
        m2s = gl.where(parts < n_parts, m2s, 0.0)
        mean = 0.0
        if SUBTRACT_MEAN:
            mean = gl.sum(means * counts, 0) / n_cols
            m2s += gl.where(parts < n_parts, (means - mean) * (means - mean) * counts, 0.0)
        rstd = gl.rsqrt(gl.sum(m2s, 0) / n_cols + eps)
        if part == 0:
            gl.store(rstd_ptr + row, rstd)
            if SUBTRACT_MEAN:
                gl.store(mean_ptr + row, mean)
        slot = step % STAGES
        ahead = row + STAGES * n_groups
        x_part_ptr = _row_ptr(x_ptr, ahead, x_row_stride, VECTOR)
        y_part_ptr = _row_ptr(y_ptr, row, n_cols, VECTOR)
        for c in gl.static_range(N_CHUNKS):
            y = (smem.index(slot * N_CHUNKS + c).load(LAYOUT).to(gl.float32) - mean) * rstd
            if weight_ptr is not None:
                y *= _widen(weights[c])
            if bias_ptr is not None:
                y += _widen(biases[c])
            _store_chunk(y_part_ptr, y, c, cols, begin, end, VECTOR, N_FULL, ALIGNED)
            _copy_chunk(
                smem, slot * N_CHUNKS + c, x_part_ptr, c, cols, begin, end, ahead, n_rows, VECTOR, N_FULL, ALIGNED
            )
        async_copy.commit_group()
        if not ALIGNED:
            y_ends = (x_ends.to(gl.float32) - mean) * rstd
            if weight_ptr is not None:
                y_ends *= end_weights.to(gl.float32)
            if bias_ptr is not None:
                y_ends += end_biases.to(gl.float32)
            gl.store(y_part_ptr + ends, y_ends.to(y_ptr.dtype.element_ty), mask=of_part)
        x_ends, next_ends = next_ends, ahead_ends
        row = next_row
        step += 1
    async_copy.wait_group(0)


class Plan(NamedTuple):
    """How rows are cut, and how many groups of programs, each with a row at a time, there is room for."""

    aligned: bool  # all rows begin with a vector of 16 bytes
    n_parts: int
    part_cols: int
    n_chunks: int  # of a part
    max_groups: int


def _pays(x: torch.Tensor, aligned: bool, long: int, long_unaligned: int, n_bytes: int) -> bool:
    return x.shape[1] > long or (not aligned and x.shape[1] > long_unaligned and x.nbytes >= n_bytes)


def _max_groups(max_programs: int, n_parts: int, n_cols: int, vector: int) -> int:
    """How many groups there is room for, if all rows of each are to begin at the same place in a vector."""
    period = vector // math.gcd(n_cols, vector)
    return max_programs // n_parts // period * period


def plan_forward(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Plan | None:
    """What suits these rows; None where the kernel cannot take them, or does not pay."""
    n_cols = x.shape[1]
    widest = max(t.element_size() for t in (x, weight, bias) if t is not None)
    if widest > 4 or not n_cols * x.element_size() < 2**31:
        return None
    vector = 16 // x.element_size()
    aligned = n_cols % vector == 0
    if not _pays(x, aligned, *_FWD_ROWS) or not rows_begin_alike(vector, n_cols, x):
        return None
    # A part of the widest tensor is no longer than _PART_BYTES, with what it may begin late by.
    n_parts = cdiv(n_cols * widest, _PART_BYTES - (0 if aligned else 64 * widest))
    part_cols = cdiv(n_cols, 64 * n_parts) * 64  # whole cache lines
    n_parts = cdiv(n_cols, part_cols)
    n_chunks = cdiv(part_cols + (0 if aligned else vector - 1), _STEPS * 32 * vector)
    max_groups = _max_groups(_FWD_PROGRAMS * num_multiprocessors(x.device), n_parts, n_cols, vector)
    return Plan(aligned, n_parts, part_cols, n_chunks, max_groups) if max_groups > 0 else None


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
    plan: Plan,
) -> None:
    """Write y, and the mean and rstd of each row."""
    n_rows, n_cols = x.shape
    aligned, n_parts, part_cols, n_chunks, max_groups = plan
    vector = 16 // x.element_size()
    launch(
        _layer_norm_parts_fwd_kernel, (min(n_rows, max_groups) * n_parts,),
        x, weight, bias, y, mean, rstd, mailboxes(n_rows, n_parts, x.device),
        n_rows, n_parts, part_cols, n_cols, x.stride(0), eps,
        VECTOR=vector, CHUNK_STEPS=_STEPS, N_CHUNKS=n_chunks,
        N_FULL=(n_cols - (n_parts - 1) * part_cols) // (_STEPS * 32 * vector), STAGES=_FWD_STAGES,
        MAX_PARTS=max_parts(n_parts, 1), ALIGNED=aligned, num_warps=1, **at_a_time(_FWD_PROGRAMS, 1),
    )  # fmt: skip


# --- backward ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _copy_row(
    x_smem, dy_smem, slot, x_part_ptr, dy_part_ptr, x_row_stride, dy_row_stride, cols, begin, end, row, n_rows,
    VECTOR: gl.constexpr, N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """Start the copies of a part of a row of x and of dy, if that row exists."""
    x_part_ptr = _row_ptr(x_part_ptr, row, x_row_stride, VECTOR)
    dy_part_ptr = _row_ptr(dy_part_ptr, row, dy_row_stride, VECTOR)
    for c in gl.static_range(N_CHUNKS):
        _copy_chunk(x_smem, slot * N_CHUNKS + c, x_part_ptr, c, cols, begin, end, row, n_rows, VECTOR, N_FULL, ALIGNED)
        _copy_chunk(
            dy_smem, slot * N_CHUNKS + c, dy_part_ptr, c, cols, begin, end, row, n_rows, VECTOR, N_FULL, ALIGNED
        )
    async_copy.commit_group()


@gluon.jit
def _load_both_ends(
    x_part_ptr, dy_part_ptr, row, n_rows, x_row_stride, dy_row_stride, ends, of_part, VECTOR: gl.constexpr
):  # fmt: skip
    """The numbers of x and dy at the ends of a part of a row, if that row exists."""
    mask = of_part & (row < n_rows)
    x = _load_ends(_row_ptr(x_part_ptr, row, x_row_stride, VECTOR), ends, mask)
    dy = _load_ends(_row_ptr(dy_part_ptr, row, dy_row_stride, VECTOR), ends, mask)
    return x, dy.to(gl.float32)


@gluon.jit
def _load_stats(mean_ptr, rstd_ptr, row, n_rows, num_warps: gl.constexpr):
    """Mean and rstd of a row, as tensors of one element: a scalar would be waited for at once."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    offsets = gl.minimum(row, n_rows - 1) + gl.arange(0, 1, ONE)
    mean = gl.zeros([1], gl.float32, ONE)
    if mean_ptr is not None:
        mean = gl.load(mean_ptr + offsets)
    return mean, gl.load(rstd_ptr + offsets)


@gluon.jit
def _load_chunk(x_smem, dy_smem, slot, c: gl.constexpr, mean, N_CHUNKS: gl.constexpr, LAYOUT: gl.constexpr):
    """How far a chunk of x is from the mean, and dy."""
    x = x_smem.index(slot * N_CHUNKS + c).load(LAYOUT).to(gl.float32) - mean
    return x, dy_smem.index(slot * N_CHUNKS + c).load(LAYOUT).to(gl.float32)


@gluon.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@gluon.jit
def _sums(
    x_smem, dy_smem, weight_smem, slot, mean, rstd, x_ends, g_ends, cols, end,
    VECTOR: gl.constexpr, N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """What a part adds to a row's sums of g * x_hat and of g. Outside of its whole vectors, dy is 0."""
    LAYOUT: gl.constexpr = cols.type.layout
    gx_sum = gl.zeros([cols.shape[0]], gl.float32, LAYOUT)
    g_sum = gl.zeros([cols.shape[0]], gl.float32, LAYOUT)
    for c in gl.static_range(N_CHUNKS):
        x, dy = _load_chunk(x_smem, dy_smem, slot, c, mean, N_CHUNKS, LAYOUT)
        g = dy * weight_smem.index(c).load(LAYOUT).to(gl.float32)
        gx = g * x
        if c >= N_FULL:
            # They are 0 there. But with this choice whole rows of float16 numbers take a tenth less time on an H200.
            inside = c * cols.shape[0] + cols < end
            gx, g = gl.where(inside, gx, 0.0), gl.where(inside, g, 0.0)
        gx_sum += gx
        g_sum += g
    if not ALIGNED:
        gx_sum = _by_vector(gx_sum, VECTOR) + g_ends * (x_ends.to(gl.float32) - mean)
        g_sum = _by_vector(g_sum, VECTOR) + g_ends
    gx_sum, g_sum = gl.reduce((gx_sum, g_sum), 0, _add_pairs)
    return gx_sum * rstd, g_sum


@gluon.jit
def _gradient(
    x_smem, dy_smem, weight_smem, dx_part_ptr, slot, mean, rstd, gx_mean, g_mean, dw, db, cols, begin, end,
    VECTOR: gl.constexpr, N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr, ALIGNED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store a part of a row of dx. Returns dw and db, with what this row adds to them."""
    new_dw = ()
    new_db = ()
    for c in gl.static_range(N_CHUNKS):
        x, dy = _load_chunk(x_smem, dy_smem, slot, c, mean, N_CHUNKS, LAYOUT)
        x_hat = x * rstd
        dx = (dy * weight_smem.index(c).load(LAYOUT).to(gl.float32) - g_mean - x_hat * gx_mean) * rstd
        _store_chunk(dx_part_ptr, dx, c, cols, begin, end, VECTOR, N_FULL, ALIGNED)
        new_dw += (dw[c] + dy * x_hat,)
        new_db += (db[c] + dy,)
    return new_dw, new_db


@gluon.jit
def _load_weight(
    weight_smem, weight_part_ptr, cols, begin, end, VECTOR: gl.constexpr, N_CHUNKS: gl.constexpr, ALIGNED: gl.constexpr
):  # fmt: skip
    """Fill a part of the weight into shared memory: ones where there is none."""
    CHUNK: gl.constexpr = cols.shape[0]
    for c in gl.static_range(N_CHUNKS):
        apart = c * CHUNK + _apart(cols, ALIGNED)
        if weight_part_ptr is not None:
            weight = gl.load(weight_part_ptr + apart, mask=_of_part(apart, begin, end, VECTOR, ALIGNED), other=0.0)
        else:
            weight = gl.full([CHUNK], 1.0, weight_smem.dtype, apart.type.layout)
        weight_smem.index(c).store(weight)


@gluon.jit
def _zeros(N_CHUNKS: gl.constexpr, CHUNK: gl.constexpr, LAYOUT: gl.constexpr):
    zeros = ()
    for _ in gl.static_range(N_CHUNKS):
        zeros += (gl.zeros([CHUNK], gl.float32, LAYOUT),)
    return zeros


@gluon.jit
def _store_sums(
    partial_ptr, sums, end_sums, row, first, n_cols, cols, begin, end, VECTOR: gl.constexpr, ALIGNED: gl.constexpr
):  # fmt: skip
    """Store a program's share of the gradient of the weight or the bias, if it is asked for."""
    CHUNK: gl.constexpr = cols.shape[0]
    if partial_ptr is not None:
        # Such a row begins where in a vector all rows of this program do.
        part_ptr = _row_ptr(partial_ptr, row, n_cols, VECTOR) + first
        for c in gl.static_range(len(sums)):
            apart = c * CHUNK + _apart(cols, ALIGNED)
            share = gl.convert_layout(sums[c], apart.type.layout)
            gl.store(part_ptr + apart, share, mask=_whole(apart, begin, end, VECTOR, ALIGNED))
        if not ALIGNED:
            ends, of_part = _ends(cols, begin, end, VECTOR)
            gl.store(part_ptr + ends, end_sums, mask=of_part)


@gluon.jit(do_not_specialize=["n_rows"])
def _layer_norm_bwd_resident_kernel(
    dy_ptr,  # (n_rows, n_cols), rows 16-byte aligned
    x_ptr,  # (n_rows, n_cols), rows 16-byte aligned
    weight_ptr,  # (n_cols,) or None
    mean_ptr,  # (n_rows,), or None for RMS norm
    rstd_ptr,  # (n_rows,)
    dx_ptr,  # (n_rows, n_cols)
    dw_partial_ptr,  # (n_programs, n_cols) or None
    db_partial_ptr,  # (n_programs, n_cols) or None
    n_rows,
    n_cols,
    dy_row_stride,
    x_row_stride,
    N_CHUNKS: gl.constexpr,
    N_FULL: gl.constexpr,  # of these, those that need no mask
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Program i owns rows i, i + n_programs, ... and row i of the partial sums.

    dx = (g - mean(g) - x_hat * mean(g * x_hat)) * rstd with g = dy * weight and x_hat = (x - mean) * rstd;
    dw = sum(dy * x_hat) and db = sum(dy).
    """
    VECTOR: gl.constexpr = 8
    CHUNK: gl.constexpr = num_warps * 32 * VECTOR
    LAYOUT: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [num_warps], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WEIGHT: gl.constexpr = x_ptr.dtype.element_ty if weight_ptr is None else weight_ptr.dtype.element_ty
    x_smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    dy_smem = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    weight_smem = gl.allocate_shared_memory(WEIGHT, [N_CHUNKS, CHUNK], SHARED)
    cols = gl.arange(0, CHUNK, LAYOUT)
    program = gl.program_id(0).to(gl.int64)
    n_programs = gl.num_programs(0)
    _clear(x_smem, cols, STAGES * N_CHUNKS)
    _clear(dy_smem, cols, STAGES * N_CHUNKS)
    for k in gl.static_range(STAGES - 1):
        _copy_row(
            x_smem, dy_smem, k, x_ptr, dy_ptr, x_row_stride, dy_row_stride, cols, 0, n_cols, program + k * n_programs,
            n_rows, VECTOR, N_CHUNKS, N_FULL, True,
        )  # fmt: skip
    _load_weight(weight_smem, weight_ptr, cols, 0, n_cols, VECTOR, N_CHUNKS, True)
    dw = _zeros(N_CHUNKS, CHUNK, LAYOUT)
    db = _zeros(N_CHUNKS, CHUNK, LAYOUT)
    means, rstds = _load_stats(mean_ptr, rstd_ptr, program, n_rows, num_warps)
    step = 0
    row = program
    while row < n_rows:
        async_copy.wait_group(STAGES - 2)
        _copy_row(
            x_smem, dy_smem, (step + STAGES - 1) % STAGES, x_ptr, dy_ptr, x_row_stride, dy_row_stride, cols, 0,
            n_cols, row + (STAGES - 1) * n_programs, n_rows, VECTOR, N_CHUNKS, N_FULL, True,
        )  # fmt: skip
        mean, rstd = gl.max(means, 0), gl.max(rstds, 0)
        means, rstds = _load_stats(mean_ptr, rstd_ptr, row + n_programs, n_rows, num_warps)
        slot = step % STAGES
        gx_sum, g_sum = _sums(
            x_smem, dy_smem, weight_smem, slot, mean, rstd, None, None, cols, n_cols, VECTOR, N_CHUNKS, N_FULL, True
        )
        g_mean = g_sum / n_cols if mean_ptr is not None else 0.0
        dw, db = _gradient(
            x_smem, dy_smem, weight_smem, _row_ptr(dx_ptr, row, n_cols, VECTOR), slot, mean, rstd, gx_sum / n_cols,
            g_mean, dw, db, cols, 0, n_cols, VECTOR, N_CHUNKS, N_FULL, True, LAYOUT,
        )  # fmt: skip
        step += 1
        row += n_programs
    async_copy.wait_group(0)
    gdc_launch_dependents()
    _store_sums(dw_partial_ptr, dw, None, program, 0, n_cols, cols, 0, n_cols, VECTOR, True)
    _store_sums(db_partial_ptr, db, None, program, 0, n_cols, cols, 0, n_cols, VECTOR, True)


@gluon.jit(do_not_specialize=["n_rows", "n_parts"])
def _layer_norm_parts_bwd_kernel(
    dy_ptr,  # (n_rows, n_cols), 16-byte aligned
    x_ptr,  # (n_rows, n_cols), 16-byte aligned
    weight_ptr,  # (n_cols,) or None
    mean_ptr,  # (n_rows,), or None for RMS norm
    rstd_ptr,  # (n_rows,)
    dx_ptr,  # (n_rows, n_cols); its rows, and those of dy, begin where in a vector those of x do
    dw_partial_ptr,  # (n_groups, n_cols) or None
    db_partial_ptr,  # (n_groups, n_cols) or None
    mail_ptr,  # (n_rows, n_parts)
    n_rows,
    n_parts,
    part_cols,  # columns of a part; the last one may have fewer
    n_cols,
    dy_row_stride,
    x_row_stride,
    VECTOR: gl.constexpr,  # numbers in 16 bytes
    N_CHUNKS: gl.constexpr,  # chunks of a part
    N_FULL: gl.constexpr,  # of these, those that every part fills
    STAGES: gl.constexpr,
    MAX_PARTS: gl.constexpr,
    ALIGNED: gl.constexpr,  # all rows begin with a vector; if not, those of a program begin at the same place in one
    num_warps: gl.constexpr,
):
    """The same for a part of each row: programs i * n_parts to (i + 1) * n_parts - 1 own rows i, i + n_groups, ...

    The sums of a row are sent before the gradient of the row ahead of it is computed, and asked for after that: so the
    other parts' have had the time of a whole row to come.
    """
    CHUNK: gl.constexpr = num_warps * 32 * VECTOR
    LAYOUT: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [num_warps], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WEIGHT: gl.constexpr = x_ptr.dtype.element_ty if weight_ptr is None else weight_ptr.dtype.element_ty
    x_smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    dy_smem = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    weight_smem = gl.allocate_shared_memory(WEIGHT, [N_CHUNKS, CHUNK], SHARED)
    cols = gl.arange(0, CHUNK, LAYOUT)
    part = gl.program_id(0) % n_parts
    group = (gl.program_id(0) // n_parts).to(gl.int64)
    n_groups = gl.num_programs(0) // n_parts
    # From the vector in which a part begins, its numbers are those from `begin` to `end`.
    first = part * part_cols
    begin = _begin(group, x_row_stride, VECTOR, ALIGNED)
    end = begin + gl.minimum(n_cols - first, part_cols)
    x_ptr += first
    dy_ptr += first
    dx_ptr += first
    _clear(x_smem, cols, STAGES * N_CHUNKS)
    _clear(dy_smem, cols, STAGES * N_CHUNKS)
    for k in gl.static_range(STAGES - 1):
        _copy_row(
            x_smem, dy_smem, k, x_ptr, dy_ptr, x_row_stride, dy_row_stride, cols, begin, end, group + k * n_groups,
            n_rows, VECTOR, N_CHUNKS, N_FULL, ALIGNED,
        )  # fmt: skip
    weight_part_ptr = None if weight_ptr is None else weight_ptr + (first - begin)
    _load_weight(weight_smem, weight_part_ptr, cols, begin, end, VECTOR, N_CHUNKS, ALIGNED)
    dw = _zeros(N_CHUNKS, CHUNK, LAYOUT)
    db = _zeros(N_CHUNKS, CHUNK, LAYOUT)
    means, rstds = _load_stats(mean_ptr, rstd_ptr, group, n_rows, num_warps)
    mean, rstd = gl.max(means, 0), gl.max(rstds, 0)
    means, rstds = _load_stats(mean_ptr, rstd_ptr, group + n_groups, n_rows, num_warps)
    # What is loaded one by one is asked for two rows ahead of its gradient.
    ends, of_part = _ends(cols, begin, end, VECTOR)
    ENDS: gl.constexpr = ends.type.layout
    x_ends = gl.zeros([CHUNK // VECTOR], x_ptr.dtype.element_ty, ENDS)
    next_x_ends = x_ends
    g_ends = gl.zeros([CHUNK // VECTOR], gl.float32, ENDS)
    end_weights, dy_ends, next_dy_ends, dw_ends, db_ends = g_ends, g_ends, g_ends, g_ends, g_ends
    if not ALIGNED:
        end_weights = gl.full([CHUNK // VECTOR], 1.0, gl.float32, ENDS)
        if weight_ptr is not None:
            end_weights = _load_ends(weight_part_ptr, ends, of_part).to(gl.float32)
        x_ends, dy_ends = _load_both_ends(
            x_ptr, dy_ptr, group, n_rows, x_row_stride, dy_row_stride, ends, of_part, VECTOR
        )
        next_x_ends, next_dy_ends = _load_both_ends(
            x_ptr, dy_ptr, group + n_groups, n_rows, x_row_stride, dy_row_stride, ends, of_part, VECTOR
        )
        g_ends = dy_ends * end_weights
    async_copy.wait_group(STAGES - 2)
    gx_sum, g_sum = _sums(
        x_smem, dy_smem, weight_smem, 0, mean, rstd, x_ends, g_ends, cols, end, VECTOR, N_CHUNKS, N_CHUNKS, ALIGNED
    )
    send(mail_ptr + group * n_parts, gx_sum, g_sum, part)
    step = 0
    row = group
    while row < n_rows:
        _copy_row(
            x_smem, dy_smem, (step + STAGES - 1) % STAGES, x_ptr, dy_ptr, x_row_stride, dy_row_stride, cols, begin,
            end, row + (STAGES - 1) * n_groups, n_rows, VECTOR, N_CHUNKS, N_FULL, ALIGNED,
        )  # fmt: skip
        next_row = row + n_groups
        next_g_ends = next_dy_ends * end_weights
        ahead_x_ends, ahead_dy_ends = next_x_ends, next_dy_ends
        if not ALIGNED:
            ahead_x_ends, ahead_dy_ends = _load_both_ends(
                x_ptr, dy_ptr, next_row + n_groups, n_rows, x_row_stride, dy_row_stride, ends, of_part, VECTOR
            )
        next_mean, next_rstd = gl.max(means, 0), gl.max(rstds, 0)
        means, rstds = _load_stats(mean_ptr, rstd_ptr, next_row + n_groups, n_rows, num_warps)
        async_copy.wait_group(STAGES - 2)
        # After the last row there is nothing to add up, and nobody sends it.
        gx_sum, g_sum = _sums(
            x_smem, dy_smem, weight_smem, (step + 1) % STAGES, next_mean, next_rstd, next_x_ends, next_g_ends, cols,
            end, VECTOR, N_CHUNKS, N_CHUNKS, ALIGNED,
        )  # fmt: skip
        if next_row < n_rows:
            send(mail_ptr + next_row * n_parts, gx_sum, g_sum, part)
        gx_sums, g_sums, parts = receive(mail_ptr + row * n_parts, n_parts, MAX_PARTS, num_warps)
        gx_sums = gl.where(parts < n_parts, gx_sums, 0.0)
        g_sums = gl.where(parts < n_parts, g_sums, 0.0)
        gx_sum, g_sum = gl.reduce((gx_sums, g_sums), 0, _add_pairs)
        g_mean = g_sum / n_cols if mean_ptr is not None else 0.0
        dw, db = _gradient(
            x_smem, dy_smem, weight_smem, _row_ptr(dx_ptr, row, n_cols, VECTOR), step % STAGES, mean, rstd,
            gx_sum / n_cols, g_mean, dw, db, cols, begin, end, VECTOR, N_CHUNKS, N_FULL, ALIGNED, LAYOUT,
        )  # fmt: skip
        if not ALIGNED:
            x_hat_ends = (x_ends.to(gl.float32) - mean) * rstd
            dx_ends = (g_ends - g_mean - x_hat_ends * (gx_sum / n_cols)) * rstd
            dx_ends = dx_ends.to(dx_ptr.dtype.element_ty)
            gl.store(_row_ptr(dx_ptr, row, n_cols, VECTOR) + ends, dx_ends, mask=of_part)
            dw_ends += dy_ends * x_hat_ends
            db_ends += dy_ends
        x_ends, dy_ends, g_ends = next_x_ends, next_dy_ends, next_g_ends
        next_x_ends, next_dy_ends = ahead_x_ends, ahead_dy_ends
        mean, rstd = next_mean, next_rstd
        step += 1
        row = next_row
    async_copy.wait_group(0)
    gdc_launch_dependents()
    _store_sums(dw_partial_ptr, dw, dw_ends, group, first, n_cols, cols, begin, end, VECTOR, ALIGNED)
    _store_sums(db_partial_ptr, db, db_ends, group, first, n_cols, cols, begin, end, VECTOR, ALIGNED)


def plan_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None) -> Plan | None:
    """What suits these rows; None where no kernel can take them, or it does not pay."""
    n_cols, size = x.shape[1], x.element_size()
    if size > 4 or dy.element_size() != size or (weight is not None and weight.element_size() > 4):
        return None
    vector = 16 // size
    aligned = n_cols % vector == 0
    if not _pays(x, aligned, *_BWD_ROWS) or not rows_begin_alike(vector, n_cols, dy, x):
        return None
    n_processors = num_multiprocessors(x.device)
    if aligned and size == 2 and n_cols <= _MAX_CHUNKS * _CHUNK:
        return Plan(aligned, 1, n_cols, cdiv(n_cols, _CHUNK), n_processors)
    # Parts of the length that leaves the fewest threads without a number, with room for what they may begin late by.
    chunk = _PART_WARPS_BWD * 32 * vector
    late = 0 if aligned else 16
    n_chunks = min(_PART_CHUNKS, key=lambda n: cdiv(n_cols, n * chunk - late) * n)
    part_cols = cdiv(n_cols, 16 * cdiv(n_cols, n_chunks * chunk - late)) * 16
    n_parts = cdiv(n_cols, part_cols)
    max_groups = _max_groups(_CHUNKS_PER_PROCESSOR // n_chunks * n_processors, n_parts, n_cols, vector)
    return Plan(aligned, n_parts, part_cols, n_chunks, max_groups) if max_groups > 0 else None


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dx: torch.Tensor,
    dw_partial: torch.Tensor | None,
    db_partial: torch.Tensor | None,
    n_groups: int,
    plan: Plan,
) -> None:
    """Write dx, and what each of n_groups adds to the gradients of weight and bias."""
    n_rows, n_cols = x.shape
    arguments = dy, x, weight, mean, rstd, dx, dw_partial, db_partial
    strides = dy.stride(0), x.stride(0)
    aligned, n_parts, part_cols, n_chunks, _ = plan
    if n_parts == 1 and aligned:
        # The last chunk has a mask even where it is full: without one, 12288 columns of float16 took a tenth longer on
        # an H200.
        launch(
            _layer_norm_bwd_resident_kernel, (n_groups,), *arguments, n_rows, n_cols, *strides,
            N_CHUNKS=n_chunks, N_FULL=n_chunks - 1, STAGES=_STAGES, num_warps=_NUM_WARPS,
        )  # fmt: skip
        return
    vector = 16 // x.element_size()
    last_cols = n_cols - (n_parts - 1) * part_cols
    launch(
        _layer_norm_parts_bwd_kernel, (n_groups * n_parts,),
        *arguments, mailboxes(n_rows, n_parts, x.device), n_rows, n_parts, part_cols, n_cols, *strides,
        VECTOR=vector, N_CHUNKS=n_chunks, N_FULL=last_cols // (_PART_WARPS_BWD * 32 * vector), STAGES=_PART_STAGES,
        MAX_PARTS=max_parts(n_parts, _PART_WARPS_BWD), ALIGNED=aligned, num_warps=_PART_WARPS_BWD,
        **at_a_time(_CHUNKS_PER_PROCESSOR // n_chunks, _PART_WARPS_BWD),
    )  # fmt: skip
