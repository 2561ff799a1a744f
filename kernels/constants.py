"""Constants of the Triton kernels."""

from typing import Any

import triton.language as tl


class Constant(tl.constexpr):  # type: ignore[misc]  # Triton has no types
    """A `tl.constexpr` for global use.

    At every launch Triton compares all global constants that a kernel uses with what they were when it was compiled. Between two
    of `tl.constexpr` that takes half a microsecond, and a kernel here uses 20."""

    def __ne__(self, other: Any) -> Any:
        return self.value != other.value if type(other) is Constant else super().__ne__(other)
