"""What property-based tests of kernels over single rows choose from."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, OPTIONS

SOME_EXAMPLES = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ANY_ROWS = dict(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 4),
    width=st.integers(0, 3),  # 0: logits [B, V]
    vocab_size=st.one_of(st.integers(1, 40), st.integers(1_000, 1_050), st.integers(8_000, 9_000)),
    dtype=st.sampled_from(DTYPES),
    option=st.sampled_from(OPTIONS),
    hot=st.booleans(),
)
