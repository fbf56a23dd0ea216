"""Triton GPU kernels that behave like their torch namesakes.

Replace ``torch.softmax(x, -1)`` by ``triton_gallery.softmax(x, -1)`` and nothing else changes, except the speed; what
differs elsewhere is told ahead of the API's pages. On a machine without a GPU, importing the package switches Triton's
interpreter on, so the same kernels run on CPU tensors.
"""

import os
import sys

import torch

__version__ = "0.1.0"

# Triton reads TRITON_INTERPRET while it is imported, so this comes before anything that imports Triton.
if "TRITON_INTERPRET" not in os.environ and not (torch.cuda.is_available() or torch.xpu.is_available()):
    if "triton" in sys.modules:
        print(
            "triton_gallery: no GPU found, and triton was imported first, so its interpreter stays off and no kernel "
            "can run. Import triton_gallery before triton, or set TRITON_INTERPRET=1 before Python starts.",
            file=sys.stderr,
        )
    else:
        os.environ["TRITON_INTERPRET"] = "1"
        print("triton_gallery: no GPU found; kernels run on CPU tensors in Triton's interpreter.", file=sys.stderr)

# Set too late, it would let the interpreter run our kernels, and the compiler those of Triton that they call.
if "triton" in sys.modules:
    import triton

    if triton.knobs.runtime.interpret and isinstance(triton.language.sum, triton.JITFunction):
        raise ImportError(
            "triton_gallery: TRITON_INTERPRET was set after triton had been imported, which is too late; set it before "
            "Python starts, or before the first import of triton or triton_gallery"
        )

from . import benchmark, codegen
from ._tuning import set_tuning
from .attention import attention
from .dropout import dropout
from .layer_norm import layer_norm, rms_norm
from .matmul import matmul
from .softmax import log_softmax, softmax
from .trace import trace
from .vector_add import add

__all__ = [
    "add",
    "attention",
    "benchmark",
    "codegen",
    "dropout",
    "layer_norm",
    "log_softmax",
    "matmul",
    "rms_norm",
    "set_tuning",
    "softmax",
    "trace",
]
